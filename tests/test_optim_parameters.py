"""Parameters of every kind: strides, sizes, dtypes, with and without gradients."""

import pytest
import torch
from backends import every_backend  # noqa: F401
from test_optim_behaviour import LOW, OPTIMIZERS, build, each_optimizer, same, small_model, train
from torch import nn

import masterless as ml

pytestmark = pytest.mark.usefixtures("every_backend")


def step_once(values: torch.Tensor, grad: torch.Tensor, name: str = "AdamW", steps: int = 3, **options):
    p = nn.Parameter(values)
    optimizer = build(name, [("p", p)], quantize_states="all", **options)
    for _ in range(steps):
        p.grad = grad.clone(memory_format=torch.preserve_format)
        optimizer.step()
    return p, optimizer


@each_optimizer
def test_strides_do_not_matter(name):
    """Transposed, strided and channels_last parameters and gradients step as their contiguous copies do."""
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(6, 4, 5, 7, generator=generator) for _ in range(2))
    expected = step_once(x.clone(), g, name)[0].detach()
    wide = torch.zeros(6, 4, 5, 14)
    wide[..., ::2] = x
    for values, grad in (
        (x.clone().to(memory_format=torch.channels_last), g),
        (x.clone().to(memory_format=torch.channels_last), g.to(memory_format=torch.channels_last)),
        (x.clone(), g.to(memory_format=torch.channels_last)),
        (x.transpose(1, 3).contiguous().transpose(1, 3), g),
        (wide[..., ::2], g),
    ):
        strides = values.stride()
        p, _ = step_once(values, grad, name)
        assert torch.equal(p.detach(), expected)
        assert p.stride() == strides
    assert (wide[..., 1::2] == 0).all()  # the gaps between strided elements are nobody's


@each_optimizer
@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 40), (3, 0), (1, 1), (129,)], ids=str)
def test_scalars_and_empty_parameters(name, shape):
    x = torch.ones(shape)
    for quantize in ("matrices", "all"):
        p = nn.Parameter(x.clone())
        optimizer = build(name, [p], quantize_states=quantize)
        p.grad = torch.ones(shape)
        optimizer.step()
        assert p.shape == x.shape and p.isfinite().all()
        assert p.numel() == 0 or (p < 1).all()
        assert optimizer.state_bytes() == optimizer.predicted_state_bytes()


def test_parameters_without_gradient_have_no_state_and_do_not_move():
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = ml.AdamW(model.parameters(), **LOW)
    before = [p.detach().clone() for p in model[0].parameters()]
    train(model, optimizer)
    assert same(model[0].parameters(), before)
    assert [len(optimizer.state.get(p, {})) > 0 for p in model.parameters()] == [False, False, True, True]
    optimizer.zero_grad()
    end = [p.detach().clone() for p in model.parameters()]
    optimizer.step()  # no gradient at all
    assert same(model.parameters(), end)


@each_optimizer
def test_bf16_parameters(name):
    """They stay bf16 and, rounded stochastically, move with updates far below their own resolution."""
    torch.manual_seed(0)
    x, g = torch.ones(64, 128).bfloat16(), torch.ones(64, 128).bfloat16()
    cls, formats = OPTIMIZERS[name]
    lr = 1e-4  # the gap below 1 is 2^-8 = 0.004
    for rounding in ("stochastic", "nearest"):
        p = nn.Parameter(x.clone())
        optimizer = cls([p], lr=lr, **formats, weight_rounding=rounding)
        p.grad = g
        optimizer.step()
        assert p.dtype == torch.bfloat16
        moved = (1 - p.detach().float()).mean().item()
        if rounding == "nearest":
            assert moved == 0
        else:  # 8192 coordinates, each moving by 2^-8 with the right probability: five standard errors
            ruler = nn.Parameter(torch.ones(64, 128))
            exact = cls([ruler], lr=lr, **formats)
            ruler.grad = torch.ones(64, 128)
            exact.step()
            expected = (1 - ruler.detach()).mean().item()
            assert abs(moved - expected) < 5 * (2.0**-8 * expected / 8192) ** 0.5
