"""The formats of hardware specifications (OCP MX, NVFP4): bytes as torch's 8-bit floats read them, and training."""

from __future__ import annotations

import copy

import kernel_cases
import pytest
import torch
from kernel_cases import Case, check
from torch import Tensor

import masterless as ml
from masterless.backends.cpu import library as kernels
from masterless.formats import FormatError, as_first_moment, as_second_moment, codec, parse
from masterless.formats.packing import unpack
from masterless.formats.storage import Storage, predicted_bytes
from masterless.optim import AdamW
from masterless.step import dispatch
from masterless.tensor import gather

MX = ("mxfp8", "mxfp8-e5m2", "mxfp4")
ALL = (*MX, "nvfp4")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def read_by_torch(storage: Storage) -> Tensor:
    """The values of stored bytes, by the specification's words and torch's own 8-bit floats; fp64."""
    fmt, rows = storage.format, storage.layout.rows
    data = storage.tensors["codes"].view(rows, -1)
    if fmt.bits == 4:
        nibbles = torch.stack([data & 15, data >> 4], dim=-1).flatten(1).long()  # first element in the low half
        values = E2M1[nibbles & 7].double() * torch.where(nibbles >= 8, -1.0, 1.0)
    else:
        values = data.view(torch.float8_e5m2 if fmt.family.endswith("e5m2") else torch.float8_e4m3fn).double()
    values = values[:, : storage.layout.cols]
    scale = storage.tensors["scale"].view(rows, -1)
    if fmt.family == "nvfp4":
        scales = scale.view(torch.float8_e4m3fn).double() * storage.tensors["tensor_scale"].view(rows, 1).double()
    else:
        scales = scale.view(torch.float8_e8m0fnu).double()
    block = {"nvfp4": 16}.get(fmt.family, 32)
    return values * scales.repeat_interleave(block, dim=1)[:, : values.shape[1]]


@pytest.mark.parametrize("cols", [16, 32, 33, 128, 161, 320])
@pytest.mark.parametrize("name", ALL)
def test_stored_bytes_mean_what_the_specification_says(name, cols):
    x = torch.randn(5, cols, generator=torch.Generator().manual_seed(cols)) * torch.tensor(
        [[1.0], [1e-3], [30.0], [0.0], [1e-7]]
    )
    storage = Storage.zeros(parse(name), x.shape).encode_(x)
    assert torch.equal(storage.decode().double(), read_by_torch(storage))
    assert torch.equal(dispatch.dequantize(storage, torch.float32), storage.decode())
    # Half the largest gap of the grid, and the scale's own rounding up, bound the error of a block.
    gap = max(b - a for a, b in zip(parse(name).levels, parse(name).levels[1:], strict=False)) / parse(name).max_level
    block = 16 if name == "nvfp4" else 32
    peak = codec.block_peak(x, parse(name)).repeat_interleave(block, 1)[:, :cols]
    bound = peak * gap / 2 * (1.125 if name == "nvfp4" else 2.0)
    floor = 2.0**-9 * float(storage.tensors["tensor_scale"].max()) * 6 if name == "nvfp4" else 0.0
    assert ((storage.decode() - x).abs() <= bound.clamp(min=floor) * (1 + 2.0**-20)).all()


def test_e5m2_levels_are_torchs_bit_patterns():
    torchs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float()
    fmt = parse("mxfp8-e5m2")
    for level, code in zip(*fmt.table, strict=True):
        assert torchs[code].item() == level
    assert set(range(256)) - set(fmt.table[1]) == {0x7C, 0x7D, 0x7E, 0x7F, 0x80, 0xFC, 0xFD, 0xFE, 0xFF}
    assert fmt.max_level == 57344.0


def test_every_e8m0_scale_is_read_as_torch_reads_it_and_rounding_goes_up_to_the_next():
    fmt, codes = parse("mxfp8"), torch.arange(255, dtype=torch.uint8).view(-1, 1)
    scales = codec.read_scale({"scale": codes}, fmt)
    assert torch.equal(scales.double(), codes.view(torch.float8_e8m0fnu).double())
    low = scales[scales <= codec.round_scale_up(torch.tensor(torch.inf), fmt)]
    assert torch.equal(codec.round_scale_up(low, fmt), low)
    assert torch.equal(codec.stored_scale(low, fmt)["scale"], codes.flatten()[: len(low)])
    above = torch.nextafter(low[:-1], torch.tensor(torch.inf))
    assert torch.equal(codec.round_scale_up(above, fmt), low[1:])


@pytest.mark.parametrize("unit", [1.0, 2.0**-10, 2.0**-126, 2.0**115])
def test_every_e4m3_scale_is_read_as_torch_reads_it_and_rounding_goes_up_to_the_next(unit):
    fmt, codes = parse("nvfp4"), torch.arange(127, dtype=torch.uint8).view(-1, 1)
    units = torch.full((127, 1), unit)
    scales = codec.read_scale({"scale": codes, "tensor_scale": units}, fmt)
    assert torch.equal(scales.double(), codes.view(torch.float8_e4m3fn).double() * unit)
    assert torch.equal(codec.round_scale_up(scales, fmt, units), scales)
    assert torch.equal(codec.stored_scale(scales, fmt, units)["scale"], codes)
    above = torch.nextafter(scales[:-1], torch.tensor(torch.inf))
    assert torch.equal(codec.round_scale_up(above, fmt, units[1:]), scales[1:])
    # Beyond the largest there is nothing.
    assert (codec.round_scale_up(scales[-1:] * 1.5, fmt, units[:1]) == scales[-1]).all()


def test_neighbours_share_a_byte():
    x = torch.tensor([[0.5, -6.0, 1.0, 3.0, -0.5]])
    storage = Storage.zeros(parse("mxfp4"), x.shape).encode_(x)
    assert storage.tensors["scale"].flatten().tolist() == [127]
    assert storage.tensors["codes"].flatten().tolist() == [0x1 | 0xF << 4, 0x2 | 0x5 << 4, 0x9]
    assert unpack(storage.tensors["codes"], 5, 4, adjacent=True).tolist() == [[1, 15, 2, 5, 9]]


def test_bytes_of_a_large_matrix():
    shape = (4096, 4096)
    count = shape[0] * shape[1]
    assert predicted_bytes(parse("mxfp8"), shape) == count * (1 + 1 / 32)
    assert predicted_bytes(parse("mxfp4"), shape) == count * (0.5 + 1 / 32)
    assert predicted_bytes(parse("nvfp4"), shape) == count * (0.5 + 1 / 16) + 4 * shape[0]
    for name in ALL:
        q = ml.QuantizedTensor.from_dense(torch.randn(6, 96), name)
        assert q.stored.nbytes == predicted_bytes(parse(name), (6, 96))


def test_a_moment_can_be_mx_and_not_nvfp4_and_a_second_moment_neither():
    for name in MX:
        assert as_first_moment(name) == parse(name)
    with pytest.raises(FormatError, match=r"tensor scale is fixed when a weight is made.*use 'mxfp4' or 'int4'"):
        as_first_moment("nvfp4")
    for name in ALL:
        with pytest.raises(FormatError, match="negative values, which a second moment has not"):
            as_second_moment(name)


# --- nvfp4's scale of the tensor ------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [3.0, 1e-3, 7e4, 1e-30, 1e30])
def test_the_tensor_scale_leaves_room_to_grow_and_to_shrink(largest):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    x = x / x.abs().max() * largest
    storage = Storage.zeros(parse("nvfp4"), x.shape).encode_(x)
    unit = storage.tensors["tensor_scale"]
    assert len(unit.unique()) == 1 and torch.frexp(unit).mantissa.eq(0.5).all()
    top = float(unit[0, 0]) * 448 * 6
    assert 28 * largest <= top <= 2 * 28 * largest
    # A block five hundred times smaller than the largest still has a scale with all of its bits.
    assert float(unit[0, 0]) * 2.0**-6 * 6 <= largest / 500


def test_steps_keep_the_tensor_scale_and_a_shard_needs_no_other():
    model = torch.nn.Linear(64, 48, bias=False)
    ml.quantize_(model, "nvfp4")
    before = {k: t.clone() for k, t in model.weight.stored.tensors.items()}
    opt = AdamW(model.named_parameters(), lr=2e-2, exp_avg="mxfp8", exp_avg_sq="log4")
    for step in range(40):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    after = model.weight.stored.tensors
    assert torch.equal(after["tensor_scale"], before["tensor_scale"])
    assert not torch.equal(after["codes"], before["codes"])
    assert not torch.equal(after["scale"], before["scale"])
    assert torch.equal(model.weight[8:20].dequantize(), model.weight.dequantize()[8:20])
    assert set(gather.visible_specs(parse("nvfp4"), (48, 64), 12)) == {"tensor_scale", "scale", "codes"}


def test_zeros_and_what_grows_from_them():
    """A layer that starts at zero (an output projection, an adapter) has a scale that ordinary weights fit in."""
    q = ml.QuantizedTensor.from_dense(torch.zeros(4, 64), "nvfp4")
    assert torch.equal(q.stored.tensors["tensor_scale"], Storage.zeros(parse("nvfp4"), (4, 64)).tensors["tensor_scale"])
    p = torch.nn.Parameter(q)
    opt = ml.SGD([p], lr=1.0)
    p.grad = -torch.linspace(0.5, 2.5, 256).view(4, 64)
    opt.step()
    exact = -p.grad
    assert ((p.dequantize() - exact).abs() <= exact * 0.5).all()  # E2M1 has gaps of a half, and nothing is clipped


# --- training, checkpoints, kernels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_a_run_resumes_to_the_bit(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.ReLU(), torch.nn.Linear(64, 96))
    ml.quantize_(model, name)
    exp_avg = "mxfp4" if name == "nvfp4" else name

    def build(m: torch.nn.Module) -> AdamW:
        return AdamW(m.named_parameters(), lr=1e-3, exp_avg=exp_avg, exp_avg_sq="log4")

    def train(m: torch.nn.Module, opt: AdamW, first: int, last: int) -> None:
        for step in range(first, last):
            x = torch.randn(16, 96, generator=torch.Generator().manual_seed(step))
            (m(x) - x).square().mean().backward()
            opt.step()
            opt.zero_grad()

    opt = build(model)
    train(model, opt, 0, 3)
    resumed = copy.deepcopy(model)
    resumed.load_state_dict(model.state_dict())
    again = build(resumed)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt, 3, 6)
    train(resumed, again, 3, 6)
    for a, b in zip(model.state_dict().values(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert opt.state_bytes() == opt.predicted_state_bytes()


@pytest.mark.skipif(not kernels.available(), reason="no compiled kernel")
@pytest.mark.parametrize("name", ALL)
def test_the_kernel_equals_the_reference_over_shapes_sizes_and_gradients(name):
    first = "mxfp8" if name == "nvfp4" else name
    check([Case(weight=name, first=first, second="log4", shape=shape) for shape in kernel_cases.SHAPES])
    check(
        [
            Case(weight=name, first=first, gradients=gradients, weight_size=size, policy=policy, lr=lr, shape=(3, 161))
            for gradients in kernel_cases.GRADIENTS
            for size in (0.05, 1e-38, 1e38)
            for policy in ("held", "recompute")
            for lr in (0.01, 1e30)
        ]
    )
