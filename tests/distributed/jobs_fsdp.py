"""Jobs: whole models under fully_shard."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from zoo import SIZES, differences, inside, mesh_of

import masterless as ml
from masterless.distributed import checkpoint
from masterless.lab.models import GPT, GPTConfig
from masterless.optim.backward import step_in_backward
from masterless.sharding import place as sharding
from masterless.tensor.quantized import QuantizedTensor, local_bytes, local_of

CONFIG = GPTConfig(vocab_size=64, n_layer=2, n_head=2, d_model=64, seq_len=16, d_ff=96, tie_embeddings=True)
MOE = GPTConfig(vocab_size=64, n_layer=1, n_head=2, d_model=64, seq_len=16, d_ff=64, n_experts=3)
OPTIONS: dict[str, Any] = {"lr": 3e-3, "exp_avg": "int4", "exp_avg_sq": "log2", "betas": (0.5, 0.95)}


def _gpt(weights: str | None = "int4", config: GPTConfig = CONFIG, meta: bool = False) -> GPT:
    with torch.device("meta" if meta else "cpu"):
        model = GPT(config, None if meta else torch.Generator().manual_seed(0))
    if weights:
        ml.quantize_(model, weights)
    return model


def _shard(model: GPT, n: int, **options: Any) -> GPT:
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of(n), **options)
    fully_shard(model, mesh=mesh_of(n), **options)
    return model


def _batch(seed: int, config: GPTConfig = CONFIG) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(config.vocab_size, (2, config.seq_len + 1), generator=g)
    return ids[:, :-1], ids[:, 1:]


def _train(model: nn.Module, opt: Any, steps: int, config: GPTConfig = CONFIG, shift: int = 0) -> list[float]:
    losses = []
    for i in range(steps):
        opt.zero_grad()
        loss = model(*_batch(i + shift, config))[1]
        loss.backward()
        opt.step()
        losses.append(float(loss))
    return losses


def end_to_end(rank: int, world: int) -> list[str]:
    """All ranks see the same batches: a mean of 2 or 4 equal gradients is exact, so training is that of one process."""
    found = []
    for n in SIZES:
        mesh_of(n)
    for label, weights, config, options in (
        ("int4", "int4", CONFIG, OPTIONS),
        ("int4+4, factored", "int4+4", CONFIG, {"lr": 3e-3, "exp_avg": "int4", "exp_avg_sq": "factored"}),
        ("experts", "fp8", MOE, {"lr": 3e-3, "exp_avg": "int8", "exp_avg_sq": "factored"}),
    ):
        whole = _gpt(weights, config)
        whole_opt = ml.AdamW(whole.named_parameters(), **options)
        expected = _train(whole, whole_opt, 4, config)
        for n in (1, 2, 4):
            if inside(n):
                model = _shard(_gpt(weights, config), n)
                opt = ml.AdamW(model.named_parameters(), **options)
                losses = _train(model, opt, 4, config)
                if losses != expected:
                    found.append(f"{label}, {n} ranks: losses {losses} {expected}")
                found += [f"{label}, {n} ranks: {d}" for d in differences(model, opt, whole, whole_opt)]
    return found


def in_backward(rank: int, world: int) -> list[str]:
    """Steps inside the backward pass of a sharded model are the ordinary ones."""
    whole = _gpt()
    whole_opt = ml.AdamW(whole.named_parameters(), **OPTIONS)
    _train(whole, whole_opt, 3)
    model = _shard(_gpt(), 4)
    opt = ml.AdamW(model.named_parameters(), **OPTIONS)
    with step_in_backward(model, opt):
        _train(model, opt, 3)
        left = [name for name, p in model.named_parameters() if p.grad is not None]
    return left + list(differences(model, opt, whole, whole_opt))


def accumulation_and_clipping(rank: int, world: int) -> dict[str, Any]:
    """Two micro-batches with one reduction; and the global norm before clipping."""
    whole = _gpt()
    for seed in (1, 2):
        (whole(*_batch(seed))[1] / 2).backward()
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    model = _shard(_gpt(), 4)
    for seed in (1, 2):
        model.set_requires_gradient_sync(seed == 2)
        (model(*_batch(seed))[1] / 2).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()
    worst = 0.0
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        place = sharding.Place.of(p)
        mine = q.grad[place.start : place.start + place.slices]
        if mine.numel():
            worst = max(worst, float((local_of(p.grad) - mine).abs().max() / q.grad.abs().max()))
    opt = ml.AdamW(model.named_parameters(), **OPTIONS)
    opt.step()
    return {"norm": float(norm), "expected": float(expected), "worst": worst}


def mixed_precision(rank: int, world: int) -> dict[str, Any]:
    """bf16 compute, fp32 reduction: the gathered weight decodes to bf16, gradients arrive in fp32."""
    seen: list[torch.dtype] = []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = _shard(_gpt(), 4, mp_policy=policy)
    layer = next(
        m for m in model.modules() if isinstance(m, nn.Linear) and isinstance(local_of(m.weight), QuantizedTensor)
    )
    layer.register_forward_hook(lambda m, args, out: seen.extend((m.weight.dtype, out.dtype)))
    losses = _train(model, ml.AdamW(model.named_parameters(), **OPTIONS), 3)
    grads = {p.grad.dtype for p in model.parameters()}
    return {"seen": set(seen), "grads": grads, "losses": losses}


def meta_device(rank: int, world: int, directory: str) -> list[str]:
    """Built and sharded on the meta device, then filled: from a dense state dict, and from a checkpoint."""
    source = _gpt(None)
    dense = source.state_dict()
    found = []
    whole = _gpt()
    whole_opt = ml.AdamW(whole.named_parameters(), **OPTIONS)
    _train(whole, whole_opt, 2)
    for n in (1, 4):
        if not inside(n):
            continue
        model = _shard(_gpt(meta=True), n)
        assert all(p.is_meta for p in model.parameters())
        model.to_empty(device="cpu")
        checkpoint.load_whole_(model, dense)
        opt = ml.AdamW(model.named_parameters(), **OPTIONS)
        _train(model, opt, 2)
        found += [f"from dense, {n}: {d}" for d in differences(model, opt, whole, whole_opt)]
        saved = checkpoint.save(f"{directory}/{n}", 2, model, opt, process_group=mesh_of(n).get_group())
        model = _shard(_gpt(meta=True), n)
        model.to_empty(device="cpu")
        opt = ml.AdamW(model.named_parameters(), **OPTIONS)
        checkpoint.load(saved, model, opt, process_group=mesh_of(n).get_group())
        found += [f"from a checkpoint, {n}: {d}" for d in differences(model, opt, whole, whole_opt)]
    return found


class _Wire:
    """Counts the bytes that this rank hands to all-gathers."""

    def __init__(self) -> None:
        self.bytes = 0

    def __enter__(self) -> _Wire:
        self._original = dist.all_gather_single

        def counting(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.bytes += input.numel() * input.itemsize
            return self._original(output, input, *args, **kwargs)

        dist.all_gather_single = counting
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_gather_single = self._original


def bytes_on_the_wire(rank: int, world: int) -> dict[str, dict[str, int]]:
    """Bytes a rank sends to gather four square layers once, by format; even and uneven."""
    sent: dict[str, dict[str, int]] = {}
    for size in (256, 250):
        for format in ("bf16", "int4", "int4+4", "int8", "fp8"):
            model = nn.Sequential(*(nn.Linear(256, size, bias=False) for _ in range(4)))
            if format == "bf16":
                model.bfloat16()
            else:
                ml.quantize_(model, format)
            fully_shard(model, mesh=mesh_of(4))
            with _Wire() as wire:
                model.unshard()
            sent.setdefault(str(size), {})[format] = wire.bytes
    return sent


def memory(rank: int, world: int) -> dict[int, dict[str, float]]:
    """Bytes of weights and states that the largest rank holds, as a share of all."""
    model, opt = _gpt(), None
    opt = ml.AdamW(model.named_parameters(), **OPTIONS)
    _train(model, opt, 1)
    weights = local_bytes(*model.parameters())
    states = opt.state_bytes()
    shares = {}
    for n in SIZES:
        mesh_of(n)
    for n in SIZES:
        if inside(n):
            model = _shard(_gpt(), n)
            opt = ml.AdamW(model.named_parameters(), **OPTIONS)
            _train(model, opt, 1)
            held = local_bytes(*model.parameters())
            shares[n] = {"weights": held / weights, "states": opt.state_bytes() / states}
    return shares


def decode_cache(rank: int, world: int) -> dict[str, Any]:
    """Refused of a sharded model, gathered or not; and what was asked for before is given up with the parameters."""
    refusals = []
    model = _shard(_gpt(), 2) if inside(2) else None
    mesh_of(4)
    if model is not None:
        loss = model(*_batch(0))[1]
        for part in (model, model.blocks[0], model.blocks[0].attention.qkv):
            try:
                ml.cache_decoded_(part, "1MB")
            except ValueError as error:
                refusals.append(str(error))
        loss.backward()
        ml.cache_decoded_(model, 0)
    early, plain = _gpt(), _gpt()
    ml.cache_decoded_(early, "1MB")
    early(*_batch(0))
    results = []
    for whole in (early, plain):
        sharded = _shard(whole, 4)
        results.append(_train(sharded, ml.AdamW(sharded.named_parameters(), **OPTIONS), 3))
    return {"refusals": refusals, "same": results[0] == results[1]}
