"""The demonstration models: shapes, causality, the mixture of experts against a naive loop."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import masterless as ml
from masterless.lab.models import GPT, GPTConfig, Llama, LlamaConfig, MixtureOfExperts, balance_loss
from masterless.lab.models.gpt import rotary_angles, rotate

TINY = GPTConfig(vocab_size=37, n_layer=2, n_head=2, d_model=16, seq_len=12)
TINY_MOE = dataclasses.replace(TINY, n_experts=4, d_ff=24)
both = pytest.mark.parametrize("config", [TINY, TINY_MOE], ids=["dense", "moe"])


def build(config: GPTConfig, seed: int = 0, **changes: object) -> GPT:
    return GPT(dataclasses.replace(config, **changes), torch.Generator().manual_seed(seed))


def tokens(config: GPTConfig, batch: int = 3, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (batch, config.seq_len), generator=generator)


def moe_layer(experts: int, per_token: int, std: float = 0.3) -> MixtureOfExperts:
    layer = MixtureOfExperts(GPTConfig(d_model=16, d_ff=24, n_experts=experts, experts_per_token=per_token))
    generator = torch.Generator().manual_seed(experts)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=std, generator=generator)
    return layer


@both
def test_shapes_and_initial_loss(config):
    model, idx = build(config).eval(), tokens(config)
    logits, none = model(idx)
    assert logits.shape == (3, 12, 37) and none is None
    _, loss = model(idx, idx)
    # Small initial weights mean a nearly uniform prediction: log(vocab), up to the noise of the logits.
    assert abs(loss.item() - math.log(37)) < 0.1
    assert model(idx[:, :5])[0].shape == (3, 5, 37)


@both
def test_every_parameter_gets_a_gradient(config):
    model, idx = build(config), tokens(config, batch=8)
    model(idx, idx)[1].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_names_are_readable():
    dense = dict(build(TINY).named_parameters())
    assert dense["blocks.0.attention.qkv.weight"].shape == (48, 16)
    assert dense["blocks.1.mlp.up.weight"].shape == (64, 16)
    assert {"embed.weight", "head.weight", "norm.weight", "blocks.0.mlp_norm.weight"} <= dense.keys()
    assert not any(name.endswith("bias") for name in dense)
    moe = dict(build(TINY_MOE).named_parameters())
    assert moe["blocks.0.mlp.up"].shape == (4, 24, 16) and moe["blocks.0.mlp.down"].shape == (4, 16, 24)


def test_parameter_count():
    # Per block 12 d^2 for the matrices and 2 d for the norms; two embeddings of vocab * d; the last norm.
    expected = 2 * (12 * 16**2 + 2 * 16) + 2 * 37 * 16 + 16
    assert build(TINY).num_parameters() == expected
    tied = build(TINY, tie_embeddings=True)
    assert tied.num_parameters() == expected - 37 * 16 and tied.head.weight is tied.embed.weight


def test_initialisation():
    config = GPTConfig(n_layer=8, n_experts=2, d_ff=128)
    model = build(config)
    block = model.blocks[3]
    # At least 16k samples each, so the standard error of a deviation is at most 0.55%: 2% is over three.
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.mlp.up.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert block.mlp.down.std().item() == pytest.approx(0.02 / 4, rel=0.02)
    again = build(config)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@both
def test_causal(config):
    model, idx = build(config, init_std=0.3).eval(), tokens(config)
    changed = idx.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % config.vocab_size
    before, after = model(idx)[0], model(changed)[0]
    # Not bitwise: other tokens change the padding of the expert buffers, and so the order of some sums.
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-4, atol=1e-5)
    assert (before[:, 7:] - after[:, 7:]).abs().max() > 0.1


def test_positions_matter():
    # One layer without positions would see (a, b) and (b, a) before the last token as the same set.
    model = build(TINY, init_std=0.3, n_layer=1).eval()
    one, other = model(torch.tensor([[1, 2, 3]]))[0], model(torch.tensor([[2, 1, 3]]))[0]
    assert (one[:, -1] - other[:, -1]).abs().max() > 1e-2


def test_rotation_encodes_the_distance_only():
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cos, sin = rotary_angles(10, 8, 100.0, like=q)
    scores = rotate(q.expand(10, 8), cos, sin) @ rotate(k.expand(10, 8), cos, sin).T
    for distance in range(-9, 10):
        along = scores.diagonal(distance)
        # The angles are fp32: up to 9 radians with a relative error of 6e-8.
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)
    assert scores.diagonal(0)[0].item() == pytest.approx((q @ k).item())


@both
def test_bfloat16_deepcopy_and_meta(config):
    model, idx = build(config), tokens(config)
    loss = model(idx, idx)[1]
    half = copy.deepcopy(model).bfloat16()
    # bf16 keeps 8 bits: relative errors of about 2**-8 in logits that are small to begin with.
    assert half(idx, idx)[1].item() == pytest.approx(loss.item(), rel=2**-7)
    with torch.device("meta"):
        empty = GPT(config)
    restored = empty.to_empty(device="cpu")
    restored.load_state_dict(model.state_dict())
    assert torch.equal(restored(idx)[0], model(idx)[0])  # no buffer outside the state dict


class _UsesOfWeights(TorchFunctionMode):
    """Records which functions are handed one of the given parameters."""

    def __init__(self, parameters):
        super().__init__()
        self.ids, self.seen = {id(parameter) for parameter in parameters}, set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if any(id(value) in self.ids for value in (*args, *(kwargs or {}).values())):
            self.seen.add(func.__name__)
        return func(*args, **(kwargs or {}))


def test_weights_are_used_whole():
    # What lets a quantized parameter work: matrices are only operands, never sliced, viewed or transposed.
    model, idx = build(TINY_MOE), tokens(TINY_MOE)
    with _UsesOfWeights(p for n, p in model.named_parameters() if p.dim() > 1 and n != "embed.weight") as uses:
        model(idx, idx)
    assert uses.seen == {"linear", "einsum"}


def naive_mixture(layer: MixtureOfExperts, x: torch.Tensor) -> torch.Tensor:
    """The definition: for each token, the weighted sum of its experts' outputs, one at a time."""
    rows = []
    for token in x.reshape(-1, x.shape[-1]):
        probability = (layer.router.weight @ token).softmax(0)
        best = probability.topk(layer.experts_per_token)
        weights = best.values / best.values.sum()
        output = torch.zeros_like(token)
        for weight, expert in zip(weights, best.indices.tolist(), strict=True):
            output = output + weight * (layer.down[expert] @ F.relu(layer.up[expert] @ token).square())
        rows.append(output)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize(("experts", "per_token"), [(1, 1), (4, 1), (4, 2), (5, 3), (8, 8)])
def test_mixture_equals_naive_loop(experts, per_token):
    layer = moe_layer(experts, per_token)
    x = torch.randn(2, 11, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    output, _ = layer(x)
    expected = naive_mixture(layer, x)
    # Same sums of at most 24 terms in another order: a few fp32 roundings (6e-8 each) of values of order one.
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    inputs = [x, *layer.parameters()]
    ours = torch.autograd.grad((output * direction).sum(), inputs)
    naive = torch.autograd.grad((expected * direction).sum(), inputs)
    for one, other in zip(ours, naive, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # sums over 22 tokens of values up to ten


def test_mixture_drops_no_token_when_all_choose_the_same_expert():
    layer = moe_layer(4, 2)
    x = torch.ones(1, 9, 16)
    torch.testing.assert_close(layer(x)[0], naive_mixture(layer, x), rtol=1e-5, atol=1e-5)


def test_balance_loss_values():
    uniform = torch.full((40, 8), 1 / 8)
    assert balance_loss(uniform, torch.full((8,), 10)).item() == pytest.approx(1.0)
    # All probability and all tokens on one expert: E * 1 * 1.
    collapsed = F.one_hot(torch.zeros(40, dtype=torch.long), 8).float()
    assert balance_loss(collapsed, torch.tensor([80] + [0] * 7)).item() == pytest.approx(8.0)
    # A router that knows nothing gives equal probabilities, whatever ties decide about the counts.
    layer = moe_layer(8, 2)
    torch.nn.init.zeros_(layer.router.weight)
    assert layer(torch.randn(3, 5, 16))[1].item() == pytest.approx(1.0)


def test_balance_loss_pushes_away_from_the_crowded_expert():
    logits = torch.zeros(10, 4, requires_grad=True)
    balance_loss(logits.softmax(-1), torch.tensor([14, 2, 2, 2])).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1:] < 0).all()


def test_balance_loss_is_added_in_training_only():
    model, idx = build(TINY_MOE, balance_coefficient=0.5), tokens(TINY_MOE)
    plain = model.eval()(idx, idx)[1].item()
    trained = model.train()(idx, idx)[1].item()
    # Two nearly balanced layers of about 1 each, and never below it by much: 0.5 * 2.
    assert trained - plain == pytest.approx(1.0, abs=0.1)
    dense = build(TINY)
    assert dense.train()(idx, idx)[1].item() == dense.eval()(idx, idx)[1].item()


def test_generate():
    model = build(TINY, init_std=0.3)
    prompt = tokens(TINY, batch=2)[:, :3]
    sampled = [model.generate(prompt, 20, 0.9, torch.Generator().manual_seed(5)) for _ in range(2)]
    assert torch.equal(*sampled)
    assert sampled[0].shape == (2, 23) and torch.equal(sampled[0][:, :3], prompt)
    assert model.training  # the mode is given back
    greedy = model.generate(prompt, 1, temperature=0)
    assert torch.equal(greedy[:, -1], model.eval()(prompt)[0][:, -1].argmax(-1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 30, "n_head": 4}, "d_model=30.*multiple of 8"),
        ({"n_layer": 0}, "n_layer=0"),
        ({"d_ff": 0}, "d_ff=0"),
        ({"n_experts": -1}, "n_experts=-1"),
        ({"n_experts": 2, "experts_per_token": 3}, "experts_per_token=3.*n_experts=2"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes)


def test_model_errors():
    model = build(TINY)
    with pytest.raises(ValueError, match=r"13 tokens.*seq_len=12"):
        model(torch.zeros(1, 13, dtype=torch.long))
    with pytest.raises(ValueError, match="empty prompt"):
        model.generate(torch.zeros(1, 0, dtype=torch.long), 1)
    with pytest.raises(ValueError, match="temperature=-1"):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 1, temperature=-1)


@pytest.mark.parametrize("per_token", [1, 2])
def test_experts_of_a_llama_equal_a_loop_over_tokens(per_token):
    config = LlamaConfig(64, 32, 48, 1, 2, 2, 16, num_local_experts=4, num_experts_per_tok=per_token)
    layer = Llama(config, torch.Generator().manual_seed(0)).model.layers[0].mlp
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros_like(x)
    for at in [(i, j) for i in range(2) for j in range(5)]:
        chances = layer.gate(x[at]).softmax(-1)
        best = chances.topk(per_token).indices
        for expert in best:
            expected[at] += layer.experts[expert](x[at]) * chances[expert] / chances[best].sum()
    torch.testing.assert_close(layer(x), expected)


def test_quantized_experts_of_a_llama_train_and_those_that_nobody_visits_stay():
    config = LlamaConfig(64, 32, 48, 1, 2, 2, 16, num_local_experts=8, num_experts_per_tok=1)
    model, report = ml.build_quantized(lambda: Llama(config, torch.Generator().manual_seed(0)), "int4")
    assert len([d for d in report.decisions if "experts" in d.name and d.format == "int4"]) == 3 * 8
    optimizer = ml.prepare(model, "1-byte-int4", 1e-2)
    ml.step_in_backward(model, optimizer)
    ids = torch.randint(0, 64, (1, 6), generator=torch.Generator().manual_seed(2))
    experts = model.model.layers[0].mlp.experts
    before = [expert.up_proj.weight.dequantize() for expert in experts]
    losses = []
    for _ in range(12):
        loss = model(ids, ids)
        loss.backward()
        losses.append(loss.item())
    moved = [not torch.equal(w, e.up_proj.weight.dequantize()) for w, e in zip(before, experts, strict=True)]
    assert losses[-1] < losses[0] and any(moved) and not all(moved)
