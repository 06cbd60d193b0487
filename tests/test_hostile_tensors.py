"""Whatever is done to tensors behind the library's back ends in a Python exception or in the right result.

Each case crashed, wrote into foreign memory or misread states before storages were validated. The kernel runs here: a
failing test may end the process.
"""

import io

import pytest
import torch
from torch import nn

import masterless as ml
from masterless.formats import parse
from masterless.formats.storage import Storage, StorageError, tensor_specs
from masterless.tensor import quantized

SHAPE = (6, 256)


def trained(weight=None, **options):
    torch.manual_seed(0)
    dense = torch.randn(SHAPE) * 0.05
    p = nn.Parameter(ml.QuantizedTensor.from_dense(dense, weight) if weight else dense)
    optimizer = ml.AdamW([("w", p)], lr=1e-2, **{"exp_avg": "int4", "exp_avg_sq": "log2", **options})
    for step in range(2):
        p.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    p.grad = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
    return p, optimizer


# --- storages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "fp8:row", "log2", "int4+4", "int4+32", "factored", "bf16", "int4:tensor"])
def test_a_storage_that_does_not_fit_cannot_exist(name):
    fmt = parse(name)
    good = dict(Storage.zeros(fmt, SHAPE).tensors)
    Storage(fmt, SHAPE, good)
    with pytest.raises(StorageError, match="stores"):
        Storage(fmt, (20000, 20000), good)
    for part, tensor in good.items():
        wrong = [tensor.view(-1)[:1], tensor.to(torch.float64), torch.cat([tensor, tensor]), tensor.to("meta")[:0]]
        if tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1] > 1:
            wrong.append(tensor.t())
        resized = tensor.clone()
        resized.untyped_storage().resize_(0)
        wrong.append(resized)
        for bad in wrong:
            with pytest.raises(StorageError):
                Storage(fmt, SHAPE, {**good, part: bad})
        with pytest.raises(StorageError):
            Storage(fmt, SHAPE, {k: v for k, v in good.items() if k != part})
    with pytest.raises(StorageError):
        Storage(fmt, SHAPE, {**good, "more": torch.zeros(1)})
    with pytest.raises(TypeError):
        Storage(fmt, SHAPE, good).tensors["codes"] = torch.zeros(1)  # type: ignore[index]


def test_a_column_major_tensor_is_refused():
    specs = tensor_specs(parse("fp32"), SHAPE)
    values = torch.zeros(SHAPE[::-1]).t()
    assert values.shape == specs["values"][0]
    with pytest.raises(StorageError, match="not contiguous"):
        Storage(parse("fp32"), SHAPE, {"values": values})


def test_a_crafted_file_does_not_load():
    """528 bytes that say they are 20000 x 20000 weights: ``weights_only=True`` must not read foreign memory."""

    class Lie:
        def __reduce__(self):
            honest = ml.QuantizedTensor.from_dense(torch.randn(4, 256), "int4")
            function, (tensors, fmt, _, *rest) = honest.__reduce_ex__(2)
            return function, (tensors, fmt, (20000, 20000), *rest)

    file = io.BytesIO()
    torch.save({"w": Lie()}, file)
    file.seek(0)
    with pytest.raises(Exception, match=r"stores 'codes' as \(20000"):
        torch.load(file, weights_only=True)


def test_quantized_weights_whose_memory_is_gone_are_not_decoded():
    q = ml.QuantizedTensor.from_dense(torch.randn(SHAPE), "int4")
    q.stored.tensors["codes"].untyped_storage().resize_(0)
    with pytest.raises(StorageError, match="needs 768 bytes of memory and has 0"):
        q.dequantize()


def test_importing_masterless_first_is_enough_to_load():
    import subprocess
    import sys

    file = io.BytesIO()
    torch.save({"w": ml.QuantizedTensor.from_dense(torch.randn(4, 64), "int4")}, file)
    code = "import masterless, io, sys, torch; torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=True)"
    subprocess.run([sys.executable, "-c", code], input=file.getvalue(), check=True)


# --- a running optimizer ----------------------------------------------------------------------------------------


def refused(optimizer, p, match):
    """The step raises, and neither counters nor the weights have moved."""
    step = int(optimizer.state[p]["step"])
    for _ in range(2):  # a second time, too
        with pytest.raises((ValueError, RuntimeError), match=match):
            optimizer.step()
    assert int(optimizer.state[p]["step"]) == step


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(
    "option", [{"exp_avg": "int8"}, {"exp_avg_sq": "log8"}, {"exp_avg": "fp32"}, {"exp_avg_sq": "factored"}]
)
def test_another_format_after_the_first_step_is_refused(option, backend):
    p, optimizer = trained(backend=backend)
    optimizer.param_groups[0].update(option)
    refused(optimizer, p, "build another optimizer and load")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_larger_parameter_under_an_old_state_is_refused(backend):
    p, optimizer = trained(backend=backend)
    grad, p.grad = p.grad, None
    p.data = torch.randn(60, 256)
    p.grad = torch.randn(60, 256)
    refused(optimizer, p, r"parameter w: .*\(60, 256\)")
    p.data = torch.randn(SHAPE)
    p.grad = None
    p.grad = grad
    optimizer.step()


def cut(t):
    return t[:1]


def cast(t):
    return t.to(torch.float16 if t.is_floating_point() else torch.int64)


def freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("change", [cut, cast, freed])
@pytest.mark.parametrize("how", ["replaced", "data"])
@pytest.mark.parametrize("key", ["exp_avg.codes", "exp_avg.scale", "exp_avg_sq.codes", "exp_avg_sq.top"])
def test_a_state_that_was_cut_cast_or_freed_is_refused(key, how, change):
    p, optimizer = trained("int4")
    state = optimizer.state[p]
    if how == "replaced":
        state[key] = change(state[key])
    else:
        state[key].data = change(state[key].data)
    refused(optimizer, p, "parameter w: .*stores")


def test_a_shorter_state_does_not_overwrite_what_lies_behind_it():
    p, optimizer = trained()
    state = optimizer.state[p]
    for key in [key for key in state if key != "step"]:
        canary = torch.full((4 * state[key].nbytes,), 77, dtype=torch.uint8)
        canary[: state[key].nbytes] = state[key].view(-1).view(torch.uint8)
        honest, state[key] = state[key], canary.view(state[key].dtype)[:8]
        refused(optimizer, p, "stores")
        assert bool((canary[honest.nbytes :] == 77).all())
        state[key] = honest
    optimizer.step()


def test_a_state_seen_through_a_shorter_view_of_the_same_memory_is_refused():
    p, optimizer = trained()
    state = optimizer.state[p]
    state["exp_avg.codes"] = state["exp_avg.codes"][:2]  # the same address
    refused(optimizer, p, "stores 'codes'")


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_gradient_whose_data_was_replaced_is_refused(backend):
    p, optimizer = trained(backend=backend)
    whole = p.grad.data
    for bad in (torch.randn(8), torch.randn(SHAPE[::-1]).t().contiguous().view(SHAPE[::-1])):
        p.grad.data = bad
        refused(optimizer, p, "the gradient of w has shape")
    p.grad.data = whole.clone()
    p.grad.untyped_storage().resize_(0)
    refused(optimizer, p, "its memory was freed or resized")
    p.grad = whole
    optimizer.step()


def test_a_transposed_weight_is_stepped_as_what_it_is_now():
    torch.manual_seed(1)
    weights, optimizers = [], []
    for _ in range(2):
        p = nn.Parameter(torch.arange(64.0 * 64).view(64, 64) / 4096)
        optimizer = ml.SGD([("w", p)], lr=0.1)
        p.grad = torch.ones(64, 64)
        optimizer.step()
        weights.append(p)
        optimizers.append(optimizer)
    transposed, plain = weights
    transposed.data = transposed.data.t()
    plain.data = plain.data.t().contiguous()
    for p, optimizer in zip(weights, optimizers, strict=True):
        p.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
        optimizer.step()
    assert torch.equal(transposed, plain)


def test_codes_of_another_dtype_are_refused():
    p, optimizer = trained("int4")
    p.stored.tensors["codes"].data = p.stored.tensors["codes"].data.to(torch.int64)
    refused(optimizer, p, r"stores 'codes' as .*torch.uint8, not .*torch.int64")


def test_a_lying_tensor_is_not_assigned():
    honest = ml.QuantizedTensor.from_dense(torch.randn(6, 256), "int4")
    function, (tensors, fmt, shape, *rest) = honest.__reduce_ex__(2)
    assert function is quantized._rebuild
    with pytest.raises(StorageError):
        function({**tensors, "codes": tensors["codes"].view(-1)[:1]}, fmt, shape, *rest)


# --- counters and other surroundings ----------------------------------------------------------------------------


@pytest.fixture
def bf16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_the_default_dtype_does_not_show(backend):
    def run():
        torch.manual_seed(5)
        p = nn.Parameter(torch.randn(4, 256, dtype=torch.float32))
        optimizer = ml.AdamW([p], exp_avg="int4", exp_avg_sq="log2", backend=backend)
        for step in range(4):
            p.grad = torch.randn(4, 256, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
            optimizer.step()
        return p.detach().clone()

    expected = run()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(run(), expected)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("count", [255, 2**24, 2**32 - 1, 2**40])
def test_counters_are_exact_for_a_very_long_time(count, backend):
    """Every step has random bits of its own, also where an fp32 or bf16 counter would stand still."""
    p, optimizer = trained("int4", backend=backend, exp_avg="fp32", exp_avg_sq="fp32", error_compensation=False)
    optimizer.state[p]["step"].fill_(count)
    seen = set()
    for step in range(1, 4):
        p.grad = torch.full(SHAPE, 1e-3)
        optimizer.step()
        assert int(optimizer.state[p]["step"]) == count + step
        seen.add(p.stored.tensors["codes"].numpy().tobytes())
    assert len(seen) == 3


def test_two_models_with_the_same_names_have_counts_of_their_own():
    a, b = (nn.Parameter(torch.ones(2, 40)) for _ in range(2))
    optimizer = ml.AdamW([{"params": [("w", a)], "nonfinite": "skip"}, {"params": [("w", b)]}])
    a.grad, b.grad = torch.full((2, 40), float("nan")), torch.ones(2, 40)
    optimizer.step()
    assert optimizer.nonfinite_counts == {"w": 80} and not torch.equal(b, torch.ones(2, 40))
    a.grad, b.grad = b.grad, a.grad
    with pytest.raises(ml.NonFiniteGradientError, match=r"w@2 \(80 elements\)"):
        optimizer.step()


def test_removed_parameters_are_let_go():
    import gc
    import weakref

    params = [nn.Parameter(torch.randn(4, 64)) for _ in range(3)]
    optimizer = ml.AdamW(params)
    for p in params:
        p.grad = torch.randn(4, 64)
    optimizer.step()
    memory = weakref.ref(params[0]), weakref.ref(optimizer.state[params[0]]["exp_avg.codes"])
    del optimizer.state[params[0]], optimizer.param_groups[0]["params"][0], p, params[0]
    optimizer.step()
    gc.collect()
    assert [m() for m in memory] == [None, None]


def test_weights_that_are_not_contiguous_do_not_accumulate_descriptions():
    p = nn.Parameter(torch.randn(64, 8).t())
    optimizer = ml.SGD([p], lr=0.1)
    for _ in range(5):
        p.grad = torch.randn(8, 64)
        optimizer.step()
    assert len(optimizer.plan.entries) == 1


def test_a_compiled_function_may_step():
    layer = nn.Linear(64, 64)
    twin = nn.Linear(64, 64)
    twin.load_state_dict(layer.state_dict())
    optimizers = [ml.AdamW(m.parameters(), exp_avg="int4", exp_avg_sq="log2") for m in (layer, twin)]

    def train(model, optimizer, x):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = torch.compile(train, backend="eager")
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        compiled(layer, optimizers[0], x)
        train(twin, optimizers[1], x)
    assert torch.equal(layer.weight, twin.weight)
