"""The plan: bytes of everything, system by system, and what fits.

Contract:
    * Weights, states and gradients are exact: sums over the real shapes, metadata included, of what `storage` would
      allocate. Which matrices are quantized is decided by `quantize.why_left`, as `quantize_` does.
    * With N shards the numbers are those of the largest rank: FSDP2 splits dimension 0 into chunks of
      ``ceil(rows / N)`` and pads the last ones to that, so it is the first rank.
    * Activations (`activations`) and workspace are models. Workspace is what is dense for a moment: the decoded copy of
      the largest quantized matrix; bf16 copies that autocast makes of fp32 matrices; with shards the gathered root,
      two gathered layers (one is prefetched) and the unsharded gradient of the largest of these units.
    * Step counters, the CUDA context and the allocator's fragmentation are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from masterless.lab.plan.activations import CHECKPOINTING, activation_bytes
from masterless.lab.plan.parameters import ROOT, Model, Parameter, PlanError
from masterless.lab.plan.systems import ITEMSIZE, PEERS, System, preset_system, state_bytes, weight_bytes
from masterless.optim.presets import PRESETS, get_preset
from masterless.tensor.rows import rows_per_slice
from masterless.tensor.selection import VOCABULARY, too_small, too_thin, why_left

MOST_SHARDS = 65_536
SPARE = 0.05  # of the memory; the device's context and fragmentation take about as much


@dataclass(frozen=True)
class Settings:
    """What the plan is for.

    Attributes:
        batch: sequences per rank and step.
        seq_len: tokens of a sequence.
        checkpointing: of activations: "none" or "full".
        shards: ranks that share the parameters.
        dtype: of what stays dense beside quantized matrices, and of its gradients.
        include: patterns of names that are quantized though the default would not, as in `quantize_`.
        whole_model: our presets also quantize embeddings and heads and compute the loss in slices of the vocabulary, as
            ``prepare(whole_model=True)`` and `linear_cross_entropy` do. Other systems stay what they are.
        fused: whether norms and the like are fused kernels, as on a GPU; torch on a CPU keeps more (`activations`).
    """

    batch: int = 1
    seq_len: int = 2048
    checkpointing: str = "none"
    shards: int = 1
    dtype: str = "bf16"
    include: tuple[str, ...] = ()
    whole_model: bool = False
    fused: bool = True

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "shards"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)}: must be at least 1; pass a positive number")
            if getattr(self, name) > 10**9:
                raise PlanError(f"{name}={getattr(self, name)}: absurdly large; pass a smaller number")
        if self.shards > MOST_SHARDS:
            raise PlanError(f"shards={self.shards}: more than {MOST_SHARDS:,} ranks are not planned for")
        for name, choices in (("checkpointing", CHECKPOINTING), ("dtype", tuple(ITEMSIZE))):
            if getattr(self, name) not in choices:
                raise PlanError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")


@dataclass(frozen=True)
class Row:
    """Bytes of one system, on the largest rank.

    Attributes:
        system: which.
        weights: as stored, hidden bits included.
        master: fp32 copies of weights.
        states: both moments.
        gradients: all of them.
        gradients_in_backward: the most that exist at once when every step is taken inside the backward pass.
        activations: see `activations`; None if the model's widths are not known.
        workspace: dense copies that exist for a moment.
        gathered: bytes this rank receives for weights in a step (forward and backward pass).
        reduced: bytes this rank sends for gradients in a step.
        bytes_per_parameter: weights, master copies and states of the whole model.
    """

    system: System
    weights: int
    master: int
    states: int
    gradients: int
    gradients_in_backward: int
    activations: int | None
    workspace: int
    gathered: int
    reduced: int
    bytes_per_parameter: float

    @property
    def total(self) -> int:
        """Everything, with ordinary steps."""
        fixed = self.weights + self.master + self.states + self.workspace + (self.activations or 0)
        return fixed + self.gradients

    @property
    def total_in_backward(self) -> int:
        """Everything, with steps taken inside the backward pass."""
        return self.total - self.gradients + self.gradients_in_backward

    def fits(self, memory: int) -> str:
        """Whether it fits: "yes", "in backward" (only with steps in the backward pass) or "no"."""
        return "yes" if self.total <= memory else "in backward" if self.total_in_backward <= memory else "no"


@dataclass(frozen=True)
class Plan:
    """All rows, and what the rules of `quantize_` leave alone (elements, by reason)."""

    model: Model
    settings: Settings
    rows: tuple[Row, ...]
    quantized: int
    left: dict[str, int] = field(default_factory=dict)


def make_plan(model: Model, settings: Settings | None = None, presets: Sequence[str] = ()) -> Plan:
    """Plans a model under every peer and our presets (all, or the named ones)."""
    settings = settings or Settings()
    systems = (*PEERS, *(preset_system(get_preset(name).name, settings.dtype) for name in presets or PRESETS))
    reasons = [why_dense(p, settings.include) for p in model.parameters]
    left: dict[str, int] = {}
    for p, reason in zip(model.parameters, reasons, strict=True):
        if reason and not (settings.whole_model and reason in VOCABULARY):
            left[reason] = left.get(reason, 0) + p.numel
    tokens = settings.batch * settings.seq_len
    geometry = model.geometry

    def row(system: System) -> Row:
        activations, whole = None, settings.whole_model and system.vocabulary is not None
        if geometry is not None:
            activations = activation_bytes(
                geometry, tokens, settings.checkpointing, fused=settings.fused, sliced_head=whole
            )
        return _row(system, model, reasons, settings.shards, activations, whole)

    return Plan(model, settings, tuple(map(row, systems)), model.numel - sum(left.values()), left)


def why_dense(parameter: Parameter, include: Iterable[str] = ()) -> str:
    """Why `quantize_` would leave a parameter alone; empty if it would not."""
    included = any(fnmatchcase(parameter.name, pattern) for pattern in include)
    default = why_left(parameter.name, len(parameter.shape), parameter.layer) or too_thin(parameter.shape)
    return ("" if included else default) or too_small(parameter.shape)


def shard_shape(shape: tuple[int, ...], shards: int, rank: int = 0) -> tuple[int, ...]:
    """The shape of a rank's shard: whole slices of dimension 0, in chunks as `torch.chunk` makes them."""
    if shards == 1 or not shape:
        return shape
    chunk = -(-shape[0] // shards)
    return (max(0, min(chunk, shape[0] - rank * chunk)), *shape[1:])


def _row(
    system: System, model: Model, reasons: Sequence[str], shards: int, activations: int | None, whole_model: bool
) -> Row:
    weights = master = states = whole = 0
    shard_gradients: dict[int, int] = {}
    gathered: dict[int, int] = {}
    gradients: dict[int, int] = {}
    largest = tied = decoded = casts = 0
    experts = any("experts" in p.name for p in model.parameters)
    itemsize = ITEMSIZE[system.gradients]
    for p, reason in zip(model.parameters, reasons, strict=True):
        vocabulary = whole_model and reason in VOCABULARY and not too_small(p.shape)
        quantized = not reason and not (system.experts_only and experts and "expert" not in p.name)
        stored = system.stored(p, quantized or vocabulary, vocabulary)
        local = shard_shape(p.shape, shards)
        weight, hidden_master, visible = weight_bytes(stored.weight, local)
        elements = math.prod(p.shape)
        weights += p.count * weight
        master += p.count * (4 * math.prod(local) if system.master else hidden_master)
        states += p.count * sum(state_bytes(state, local) for state in stored.states)
        full = sum(state_bytes(state, p.shape) for state in stored.states)
        full += sum(weight_bytes(stored.weight, p.shape)[:2]) + (4 * elements if system.master else 0)
        whole += p.count * full
        gradients[p.unit] = gradients.get(p.unit, 0) + itemsize * p.numel
        shard_gradients[p.unit] = shard_gradients.get(p.unit, 0) + itemsize * p.count * math.prod(local)
        gathered[p.unit] = gathered.get(p.unit, 0) + p.count * visible  # one rank's part
        slices = vocabulary and shards == 1  # decoded, and stepped, in slices; a slice of a gradient is fp32
        at_once = min(elements, rows_per_slice(p.shape[-1]) * p.shape[-1]) if slices else elements
        if p.tied and not slices:
            tied = max(tied, itemsize * elements)
        else:
            largest = max(largest, (4 if slices else itemsize) * at_once)
        if stored.weight.scaled:
            decoded = max(decoded, 2 * at_once)
        elif stored.weight.kind == "float32" and len(p.shape) >= 2 and (p.layer != "embedding" or p.tied):
            casts += 2 * p.numel
    if shards == 1:
        # A tied matrix gets its gradient in two parts, the head's first: it waits until the embedding's is there.
        in_backward, workspace, received, sent = max(largest + tied, 2 * tied), decoded + casts, 0, 0
    else:
        layers = [size for unit, size in gathered.items() if unit != ROOT]
        in_backward = max(shard_gradients.values())
        workspace = decoded + max(gradients.values())
        workspace += shards * (gathered.get(ROOT, 0) + sum(sorted(layers)[-2:]))
        received = (shards - 1) * (gathered.get(ROOT, 0) + 2 * sum(layers))
        sent = (shards - 1) * sum(shard_gradients.values())
    return Row(
        system,
        weights,
        master,
        states,
        sum(shard_gradients.values()),
        in_backward,
        activations,
        workspace,
        received,
        sent,
        whole / model.numel,
    )


# --- advice -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """Which preset to take, or why none; `text` says it in a sentence."""

    preset: str | None
    step_in_backward: bool
    settings: Settings
    text: str


def advise(plan: Plan, memory: int) -> Advice:
    """The preset with the most bytes per parameter that fits, and if none does, what would make one fit."""
    names = [row.system.name for row in plan.rows if row.system.ours]
    found = _best(plan, memory)
    tries = [plan.settings]
    if plan.settings.checkpointing == "none" and plan.model.geometry:
        tries.append(replace(plan.settings, checkpointing="full"))
    if found:
        best = _advice(plan, found, memory, "take")
        other = _best(make_plan(plan.model, tries[-1], names), memory)
        if other and other.bytes_per_parameter > found.bytes_per_parameter:
            how = " and step_in_backward" if other.fits(memory) == "in backward" else ""
            return replace(
                best, text=f"{best.text}; with --checkpointing full{how} preset {other.system.name} fits too"
            )
        return best
    while tries[-1].shards < 4096:
        tries.append(replace(tries[-1], shards=2 * tries[-1].shards))
    for settings in tries[1:]:
        other_plan = make_plan(plan.model, settings, names)
        found = _best(other_plan, memory)
        if found:
            changed = [f for f in ("checkpointing", "shards") if getattr(settings, f) != getattr(plan.settings, f)]
            options = " ".join(f"--{name} {getattr(settings, name)}" for name in changed)
            return _advice(other_plan, found, memory, f"nothing fits as it is; with {options} take")
    least = min((row for row in plan.rows if row.system.ours), key=lambda row: row.total_in_backward)
    text = (
        f"no preset fits in {gigabytes(memory)} GB, not even sharded: the least, {least.system.name}, needs "
        f"{gigabytes(least.total_in_backward)} GB; use a smaller model, batch or sequence"
    )
    return Advice(None, False, plan.settings, text)


def _best(plan: Plan, memory: int) -> Row | None:
    """What fits and keeps the most bytes; a forward pass in INT4 is for who serves INT4, and else a last resort."""
    fitting = [row for row in plan.rows if row.system.ours and row.fits(memory) != "no"]
    return max(fitting, key=lambda row: ("int4" not in row.system.name, row.bytes_per_parameter), default=None)


def _advice(plan: Plan, row: Row, memory: int, lead: str) -> Advice:
    in_backward = row.fits(memory) == "in backward"
    total = row.total_in_backward if in_backward else row.total
    how = (
        f" and step_in_backward (gradients {gigabytes(row.gradients_in_backward)} GB at once instead of "
        f"{gigabytes(row.gradients)} GB)"
        if in_backward
        else ""
    )
    text = (
        f"{lead} preset {row.system.name}{how}: {row.system.summary}; of the presets that fit it keeps the most bytes "
        f"per parameter ({row.bytes_per_parameter:.2f}), {gigabytes(total)} of {gigabytes(memory)} GB"
    )
    if total > (1 - SPARE) * memory:
        text += f", which leaves only {gigabytes(memory - total)} GB for what is not counted"
        roomier = _best(plan, round((1 - SPARE) * memory))
        if roomier:
            same = "step_in_backward" if roomier.system == row.system else f"preset {roomier.system.name}"
            text += f" ({same} leaves {SPARE:.0%} and more)"
    return Advice(row.system.name, in_backward, plan.settings, text)


def gigabytes(count: int) -> str:
    """A number of bytes in units of 10^9, three digits or two decimals."""
    return f"{count / 1e9:,.2f}" if count < 99.995e9 else f"{count / 1e9:,.0f}"
