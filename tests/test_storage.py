"""Plain formats, master copies, and storages of tensors of every shape."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from masterless.formats import MASTER, codec, names, parse
from masterless.formats.layout import Layout, is_matrix_like
from masterless.formats.rounding import dither
from masterless.formats.storage import Storage, factored_rows, predicted_bytes, tensor_specs

SHAPES = [
    (),
    (0,),
    (1,),
    (5,),
    (130,),
    (0, 7),
    (3, 0),
    (4, 0, 5),
    (2, 3, 0, 40),
    (3, 1),
    (3, 40),
    (2, 127),
    (2, 129),
    (3, 300),
    (3, 2, 129),
    (2, 3, 5, 7),
    (8, 4, 3, 3),
    (1, 1, 1, 1, 9),
]
ELEMENTWISE = [n for n in names() if n not in ("factored", "none")]
HUGE = torch.finfo(torch.float32).max


def sample(shape, fmt, seed=0):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x if fmt.signed else x.abs()


# --- bf16 and fp32 ----------------------------------------------------------------------------------------


def float_patterns(lower: int) -> torch.Tensor:
    """All finite fp32 numbers whose lower 16 bits are `lower`: every sign, exponent and upper mantissa."""
    upper = torch.arange(2**16, dtype=torch.int64)
    x = codec.bits_float(((upper << 16) | lower) - ((upper >> 15) << 32))
    return x[x.isfinite()].view(1, -1)


@pytest.mark.parametrize("lower", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_nearest_is_torchs_cast(lower):
    """On every upper half. Only where torch's cast overflows ours stays at the largest finite number."""
    x = float_patterns(lower)
    ours = codec.encode(x, parse("bf16"))["values"]
    torchs = x.to(torch.bfloat16)
    overflow = torchs.isinf()
    assert torch.equal(ours[~overflow].view(torch.int16), torchs[~overflow].view(torch.int16))
    assert torch.equal(
        ours[overflow].float(), torchs[overflow].float().clamp(-3.3895313892515355e38, 3.3895313892515355e38)
    )
    assert int(overflow.sum()) == (2 if lower >= 0x8000 else 0)


@pytest.mark.parametrize("upper", [0x3F80, 0xBF80, 0x0000, 0x8000, 0x007F, 0x4242, 0x7F7E])
@pytest.mark.parametrize("lower", [0, 1, 0x1234, 0x8000, 0xFFFF])
def test_bf16_stochastic_is_exact_over_all_16_bits(upper, lower):
    """Of the 65536 dithers exactly `lower` round away from zero: the mean is x itself, not nearly."""
    pattern = (upper << 16 | lower) - (1 << 32 if upper >> 15 else 0)
    x = codec.bits_float(torch.full((1, 2**16), pattern))
    u = torch.arange(2**16, dtype=torch.int32).view(1, -1)
    stored = codec.encode(x, parse("bf16"), u)["values"].view(torch.int16).long() & 0xFFFF
    assert ((stored == upper) | (stored == upper + 1)).all()
    assert int((stored == upper + 1).sum()) == lower


def test_bf16_stochastic_never_overflows():
    x = torch.tensor([[HUGE, -HUGE]])
    for u in (0, 65535):
        stored = codec.encode(x, parse("bf16"), torch.full((1, 2), u))["values"]
        assert stored.isfinite().all()


def test_fp32_is_the_number_itself_and_not_an_alias():
    x = torch.tensor([[1.0, -0.0, 1e-45, HUGE]])
    stored = codec.encode(x, parse("fp32"), dither(1, 1, 4))["values"]
    assert torch.equal(stored.view(torch.int32), x.view(torch.int32))
    x.zero_()
    assert stored[0, 0] == 1


@pytest.mark.parametrize("name", [n for n in names() if parse(n).hidden == MASTER])
def test_a_master_copy_loses_nothing_and_shows_the_nearest_code(name):
    fmt, plain = parse(name), parse(name.removesuffix("+32"))
    x = sample((3, 200), fmt)
    parts = codec.encode(x, fmt)
    assert torch.equal(codec.decode(parts, 200, fmt), x)
    visible = codec.decode(parts, 200, fmt, visible=True)
    assert torch.equal(visible, codec.decode(codec.encode(x, plain), 200, plain))


@pytest.mark.parametrize("hidden", [2, 4, 6])
def test_hidden_bits_show_the_int4_rounding_of_the_fine_value(hidden):
    fmt = parse(f"int4+{hidden}")
    x = sample((3, 200), fmt)
    parts = codec.encode(x, fmt)
    fine, visible = (codec.decode(parts, 200, fmt, visible=v) for v in (False, True))
    scale = parts["scale"].float().repeat_interleave(128, 1)[:, :200]
    assert torch.equal(visible, (fine / scale + 0.5).floor() * scale)
    assert ((x - fine).abs() <= scale * 2.0**-hidden / 2 * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("name", ["factored", "none"])
def test_formats_without_elements_are_refused_by_the_codec(name):
    with pytest.raises(ValueError, match=f"'{name}' stores no elements"):
        codec.encode(torch.zeros(1, 1), parse(name))


# --- storages of every shape ------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_storage_holds_a_tensor_of_any_shape(name, shape):
    """Zeros at first; then what the codec makes of its rows; never more bytes than predicted."""
    fmt = parse(name)
    storage = Storage.zeros(fmt, shape)
    assert torch.equal(storage.decode(), torch.zeros(shape))
    assert torch.equal(storage.decode(visible=True), torch.zeros(shape))
    assert storage.nbytes == predicted_bytes(fmt, shape)
    x = sample(shape, fmt)
    layout = Layout.of(shape)
    for u in (None, dither(1, layout.rows, layout.cols)):
        decoded = storage.encode_(x, u).decode()
        assert decoded.shape == torch.Size(shape) and decoded.dtype == torch.float32
        if x.numel():
            rows = x.reshape(layout.rows, layout.cols)
            expected = codec.decode(codec.encode(rows, fmt, u), layout.cols, fmt)
            assert torch.equal(decoded, expected.view(shape))
        assert {n: (tuple(t.shape), t.dtype) for n, t in storage.tensors.items()} == tensor_specs(fmt, shape)
    storage.encode_(torch.zeros(shape))
    fresh = Storage.zeros(fmt, shape)
    assert all(torch.equal(storage.tensors[n], t) for n, t in fresh.tensors.items())


@pytest.mark.parametrize("name", [n for n in ELEMENTWISE if parse(n).scaled and not parse(n).fixed])
@pytest.mark.parametrize("granularity", ["row", "tensor", 32])
def test_other_granularities(name, granularity):
    fmt = parse(f"{name}:{granularity}")
    if fmt.kind == "log" and granularity == "tensor":
        return  # refused wherever it could be used (test_formats)
    for shape in ((), (0,), (3, 0), (5,), (3, 70), (2, 3, 129)):
        storage = Storage.zeros(fmt, shape)
        assert torch.equal(storage.decode(), torch.zeros(shape))
        x = sample(shape, fmt)
        decoded = storage.encode_(x).decode()
        assert storage.nbytes == predicted_bytes(fmt, shape)
        if x.numel():
            scales = {"row": Layout.of(shape).rows, "tensor": 1}.get(granularity)
            metadata = storage.tensors["top" if fmt.kind == "log" else "scale"]
            assert scales is None or metadata.numel() == scales
            assert (decoded - x).abs().max() <= x.abs().max() * (1 if fmt.bits < 4 or fmt.kind == "log" else 0.2)


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 9), max_size=4).map(tuple),
    last=st.integers(1, 200),
    name=st.sampled_from([n for n in ELEMENTWISE if not parse(n).two_level]),
)
def test_a_shard_of_slices_is_a_slice_of_the_whole(shape, last, name):
    """Any split along dimension 0 gives the same stored tensors as the whole, cut at the same place.

    A scale of the whole tensor (nvfp4) is found before the tensor is cut, and held by every part: test_microscaling.
    """
    shape = (*shape, last)
    fmt = parse(name)
    if len(shape) < 2:
        return
    x = sample(shape, fmt)
    layout = Layout.of(shape)
    u = dither(3, layout.rows, layout.cols)
    whole = Storage.zeros(fmt, shape).encode_(x, u)
    cut = shape[0] // 2
    for start, stop in ((0, cut), (cut, shape[0])):
        if start == stop:
            continue
        per_slice = layout.rows_per_slice
        rows = dither(3, (stop - start) * per_slice, layout.cols, first_row=start * per_slice)
        part = Storage.zeros(fmt, (stop - start, *shape[1:])).encode_(x[start:stop], rows)
        for key, tensor in part.tensors.items():
            assert torch.equal(tensor, whole.tensors[key][start:stop])


def test_the_layout_of_shapes():
    """Rows are the shortest trailing run of at least 32 elements, never dimension 0 unless it is the only one."""
    assert Layout.of(()) == Layout(1, 1, 1, 1)
    assert Layout.of((100,)) == Layout(1, 1, 100, 1)
    assert Layout.of((64, 48)) == Layout(64, 64, 48, 64)
    assert Layout.of((4, 64, 48)) == Layout(4, 256, 48, 64)
    assert Layout.of((64, 16, 3, 3)) == Layout(64, 64, 144, 64)
    assert Layout.of((64, 4, 8, 8)) == Layout(64, 256, 64, 4)
    assert Layout.of((64, 8)) == Layout(64, 64, 8, 64)
    assert [is_matrix_like(s) for s in ((64, 48), (64, 8), (4096,), (0, 64), (64, 16, 3, 3), ())] == [
        True,
        False,
        False,
        False,
        True,
        False,
    ]


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 4\) in storage of shape \(4, 3\)"):
        Storage.zeros(parse("int4"), (4, 3)).encode_(torch.zeros(3, 4))


# --- factored and none ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(5, 40), (3, 4, 40), (64, 16, 3, 3), (3, 2, 0, 40), (0, 40), (1, 1), (6, 8)], ids=str
)
def test_factored_storage_holds_row_and_column_means(shape):
    fmt, layout = parse("factored"), Layout.of(shape)
    storage = Storage.zeros(fmt, shape)
    assert torch.equal(storage.decode(), torch.zeros(shape))
    assert storage.nbytes == predicted_bytes(fmt, shape) == 4 * (layout.rows + layout.matrices * layout.cols)
    x = sample(shape, fmt)
    storage.encode_(x)
    if not x.numel():
        return
    stack = x.double().view(layout.matrices, layout.matrix_rows, layout.cols)
    row, col = stack.mean(2), stack.mean(1)
    # fp32 storage of fp64 means; the integer sums lose at most count * 2^-52 before that
    assert torch.allclose(storage.tensors["row"].double().view_as(row), row, rtol=2.0**-23, atol=0)
    assert torch.allclose(storage.tensors["col"].double(), col, rtol=2.0**-23, atol=0)
    estimate = row.unsqueeze(2) * col.unsqueeze(1) / row.mean(1).view(-1, 1, 1)
    # five fp32 roundings: row, its mean, the quotient, col, the product
    assert torch.allclose(storage.decode().double().view_as(stack), estimate, rtol=5 * 2.0**-24, atol=0)


def test_factored_rank_one_matrices_are_exact_up_to_rounding():
    x = torch.outer(torch.rand(7) + 0.1, torch.rand(50) + 0.1)
    assert torch.allclose(Storage.zeros(parse("factored"), (7, 50)).encode_(x).decode(), x, rtol=1e-6, atol=0)


def test_a_factored_rows_of_some_rows_is_a_slice_of_all():
    storage = Storage.zeros(parse("factored"), (4, 6, 40)).encode_(torch.rand(4, 6, 40))
    whole = factored_rows(storage)
    for start, stop in ((0, 5), (5, 24), (7, 8)):
        assert torch.equal(factored_rows(storage, start, stop), whole[start:stop])


def test_sums_of_factored_means_do_not_depend_on_the_order():
    """The same bits for any order of summation: permuted columns give the same row means, and vice versa."""
    x = torch.rand(50, 333, generator=torch.Generator().manual_seed(0)).exp().pow(9)
    order = torch.randperm(333, generator=torch.Generator().manual_seed(1))
    one, other = (Storage.zeros(parse("factored"), (50, 333)).encode_(y) for y in (x, x[:, order]))
    assert torch.equal(one.tensors["row"], other.tensors["row"])
    assert torch.equal(one.tensors["col"][:, order], other.tensors["col"])


def test_none_stores_nothing():
    storage = Storage.zeros(parse("none"), (4, 40))
    assert storage.nbytes == predicted_bytes(parse("none"), (4, 40)) == 0
    storage.encode_(torch.ones(4, 40))
    with pytest.raises(ValueError, match="stores nothing"):
        storage.decode()


def test_predicted_bytes_of_a_matrix_by_hand():
    """[3, 300] in int3: 3 rows of 2 * 48 + (11 + 6) bytes and 3 scales of 2 bytes."""
    assert predicted_bytes(parse("int3"), (3, 300)) == 3 * (96 + 17 + 6)
    assert predicted_bytes(parse("log2"), (3, 300)) == 3 * (64 + 11 + 12)
    assert predicted_bytes(parse("int4+2:row"), (3, 300)) == 3 * (150 + 75 + 2)
    assert predicted_bytes(parse("int8+32:tensor:fp32"), (3, 300)) == 900 * 5 + 4
    assert predicted_bytes(parse("bf16"), (3, 300)) == math.prod((3, 300)) * 2
