"""Jobs: one optimizer step on shards."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from zoo import SIZES, configurations, differences, inside, mesh_of, quantized_zoo, set_gradients, shard

import masterless as ml


def parity(rank: int, world: int, names: list[str], steps: int = 3) -> list[str]:
    """Same gradients, 1 to 4 ranks: codes, scales and states against one process."""
    found = []
    table = configurations()
    for n in SIZES:
        mesh_of(n)
    for name in names:
        weights, dtype, build = table[name]
        whole = quantized_zoo(weights, dtype)
        whole_opt = build(whole.named_parameters())
        for i in range(steps):
            set_gradients(whole, whole.gradients(i))
            whole_opt.step()
        for n in SIZES:
            if not inside(n):
                continue
            model = shard(quantized_zoo(weights, dtype), n)
            opt = build(model.named_parameters())
            for i in range(steps):
                set_gradients(model, whole.gradients(i))
                opt.step()
            found += [f"{name}, {n} ranks: {d}" for d in differences(model, opt, whole, whole_opt)]
    return found


def bad_gradients(rank: int, world: int) -> list[str]:
    """NaN and infinity stop the same tiles on shards as in one process, and are counted alike on all ranks."""
    places = {
        "even": (7, 130),  # one tile of one row
        "uneven": (9, 0),
        "experts": (2, 3, 5),
        "narrow": (16, 1),
        "vector": (150,),  # its chunk, columns 128 to 255, lies on two ranks of two, three and four
    }
    found = []
    for name in ("2-byte-int4", "1-byte", "adafactor", "bf16 weights"):
        weights, dtype, build = configurations()[name]

        def run(n: int, weights: Any = weights, dtype: Any = dtype, build: Any = build) -> Any:
            model = quantized_zoo(weights, dtype)
            source = model.gradients
            if n:
                shard(model, n)
            opt = build(model.named_parameters())
            for group in opt.param_groups:
                group["nonfinite"] = "skip"
            for i in range(3):
                gradients = source(i)
                if i == 1:
                    for key, index in places.items():
                        gradients[key][index] = float("nan") if key != "uneven" else float("inf")
                set_gradients(model, gradients)
                opt.step()
            return model, opt

        whole, whole_opt = run(0)
        for n in SIZES:
            if inside(n):
                model, opt = run(n)
                found += [f"{name}, {n} ranks: {d}" for d in differences(model, opt, whole, whole_opt)]
                if opt.nonfinite_counts != whole_opt.nonfinite_counts:
                    found.append(f"{name}, {n} ranks: {opt.nonfinite_counts} {whole_opt.nonfinite_counts}")
    return found


def one_rank_has_a_bad_gradient(rank: int, world: int) -> str:
    """All ranks raise, so that none waits for the others for ever."""
    model = shard(quantized_zoo("int4"), 4)
    opt = ml.AdamW(model.named_parameters())
    gradients = quantized_zoo("int4").gradients(0)
    gradients["even"][11, 3] = float("nan")  # on the last rank
    set_gradients(model, gradients)
    try:
        opt.step()
    except ml.NonFiniteGradientError as error:
        return str(error)
    return "not raised"


def refusals(rank: int, world: int) -> dict[str, str]:
    """What cannot be honoured on shards is refused with a reason and a remedy."""
    messages = {}

    def note(label: str, action: Any) -> None:
        try:
            action()
            messages[label] = "not refused"
        except ValueError as error:
            messages[label] = str(error)

    note("one scale a tensor", lambda: shard(quantized_zoo("int4:tensor"), 4))
    model = shard(quantized_zoo("int4"), 4)
    note("vectors", lambda: ml.AdamW(model.named_parameters(), quantize_states="all"))
    note("adaptive resets", lambda: ml.AdamW(model.named_parameters(), exp_avg_sq="log2", reset="adaptive"))
    columns = DTensor.from_local(torch.zeros(4, 64), mesh_of(4), [Shard(1)], run_check=False)
    note("columns", lambda: ml.AdamW([torch.nn.Parameter(columns)]))
    state = ml.AdamW((whole := quantized_zoo("int4")).named_parameters(), exp_avg_sq="log2")
    set_gradients(whole, whole.gradients(0))
    state.step()
    factored = ml.AdamW(model.named_parameters(), exp_avg_sq="factored")
    note("factoring on shards", lambda: factored.load_state_dict(state.state_dict()))
    return messages


def on_the_kernel(rank: int, world: int) -> dict[str, Any]:
    """Which backend steps the shards of a preset with a factored second moment, and the bytes they take."""
    from masterless.insight import memory

    weights, dtype, build = configurations()["1-byte-int4"]
    model = shard(quantized_zoo(weights, dtype), world)
    opt = build(model.named_parameters())
    set_gradients(model, model.gradients(0))
    opt.step()
    backends = {
        e.task.name: type(e.backend).__name__ for e in opt.plan.entries.values() if len(e.task.weight.shape) > 1
    }
    measured = memory.measure(opt)
    return {"backends": backends, "measured": measured, "predicted": memory.predict_optimizer(opt)}
