"""The operators of torch that compiled graphs are made of: they pass torch's own checks, and equal eager to the bit."""

import gc

import pytest
import torch
from torch import Tensor, nn

import masterless as ml


def make(bias: bool = True, **options) -> tuple[nn.Module, ml.AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias), nn.ReLU(), nn.Linear(64, 64, bias), nn.Linear(64, 32, bias))
    ml.quantize_(model, "int4")
    options = {"lr": 1e-2, "exp_avg": "int4", "exp_avg_sq": "log2", **options}
    return model, ml.AdamW(model.named_parameters(), **options)


def training_step(model: nn.Module, opt: ml.AdamW):
    parameters = list(model.parameters())

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        opt.step_on(torch.autograd.grad(loss, parameters))
        return loss.detach()

    return step


def everything(model: nn.Module, opt: ml.AdamW) -> dict[str, Tensor]:
    tensors = {name: value for name, value in model.state_dict().items()}
    tensors |= {f"{i}.{k}": t for i, state in opt.state_dict()["state"].items() for k, t in state.items()}
    return {k: t.dequantize() if hasattr(t, "stored") else t for k, t in tensors.items()}


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [k for k in left if not torch.equal(left[k], right[k])] == []


BATCHES = [torch.randn(8, 64, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def test_a_compiled_training_step_equals_the_eager_one_to_the_bit():
    torch.compiler.reset()
    eager, compiled = make(), make()
    step = training_step(*eager)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        fast = torch.compile(training_step(*compiled), backend="aot_eager", fullgraph=True)
        for i, x in enumerate(BATCHES):
            for _, opt in (eager, compiled):
                opt.param_groups[0]["lr"] = 0.01 / (i + 1)  # a schedule, which the graph must follow
            assert torch.equal(step(x), fast(x))
    assert_equal(everything(*eager), everything(*compiled))
    assert int(compiled[1].turns) == len(BATCHES)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # Inductor's own
def test_inductor_steps_to_the_bit_what_it_does_not_add_up_itself():
    """Its own sums (the loss, gradients of biases) have another order; products are torch's, the step is ours."""
    torch.compiler.reset()
    eager, compiled = make(bias=False), make(bias=False)
    step = training_step(*eager)
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        fast = torch.compile(training_step(*compiled), fullgraph=True)
        for x in BATCHES[:3]:
            torch.testing.assert_close(step(x), fast(x), rtol=1e-6, atol=0.0)  # sums of 256 squares
    assert_equal(everything(*eager), everything(*compiled))


def test_step_on_equals_step_and_leaves_grad_alone():
    (model, opt), (twin, other) = make(), make()
    training_step(model, opt)(BATCHES[0])
    assert all(p.grad is None for p in model.parameters())
    twin(BATCHES[0]).square().mean().backward()
    other.step()
    assert_equal(everything(model, opt), everything(twin, other))


def test_opcheck():
    model, opt = make()
    grads = [torch.randn(64, 64), torch.randn(64)]
    torch.library.opcheck(torch.ops.masterless.step, (grads, [0, 1], opt.turns, opt.number))
    for weight, dtype in ((model[0].weight, torch.float32), (model[2].weight, torch.bfloat16)):
        stored = weight.stored
        arguments = (list(stored.tensors.values()), str(stored.format), list(stored.shape), dtype)
        torch.library.opcheck(torch.ops.masterless.dequantize, arguments)
        assert torch.equal(torch.ops.masterless.dequantize(*arguments), weight.dequantize(dtype))


def test_an_optimizer_that_is_gone_is_an_error():
    model, opt = make()
    number, turns = opt.number, opt.turns
    del model, opt
    gc.collect()
    with pytest.raises(RuntimeError, match="no longer exists; compile the training step again"):
        torch.ops.masterless.step([torch.ones(64, 64)], [0], turns, number)
    assert int(turns) == 0


def test_a_bad_gradient_raises_and_changes_nothing():
    model, opt = make()
    before = everything(model, opt)
    grads = [torch.ones(p.shape) for p in model.parameters()]
    grads[0][3, 5] = float("nan")
    with pytest.raises(ml.NonFiniteGradientError, match="No weight and no state has changed"):
        opt.step_on(grads)
    after = everything(model, opt)
    assert_equal(before, {k: after[k] for k in before})
    assert int(opt.turns) == 0


def test_a_step_for_the_device_alone_needs_the_gpu_kernels():
    model, opt = make(lr=torch.tensor(1e-2))
    with pytest.raises(RuntimeError, match="run a backward pass first"):
        opt.device_step()
    model(BATCHES[0]).square().mean().backward()
    with pytest.raises(ValueError, match="not all parameters are stepped by the Triton kernels"):
        opt.device_step()
