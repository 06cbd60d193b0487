"""What all optimizers share: validation, allocation, the step loop, checkpoints. A rule adds its mathematics.

Contract:
    * Every option sits in `defaults` and can be overridden per param group.
    * Which tensors get low-bit states is decided from the parameter's full shape (`layout.is_matrix_like`):
      with ``quantize="matrices"`` (the default) vectors and very narrow matrices keep fp32 states.
    * `.grad` is never written. State is plain tensors. Nothing is printed.
    * A parameter's random bits depend on its name if the optimizer was given names, else on its position.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from masterless.formats import Format, as_first_moment, as_second_moment, parse
from masterless.formats.layout import is_matrix_like
from masterless.formats.rounding import check_rounding
from masterless.formats.scaling import POLICIES
from masterless.formats.storage import Storage, tensor_specs
from masterless.optim import resets, stepping, units
from masterless.optim import state_dict as checkpoint
from masterless.step import dispatch as ops
from masterless.step.rules import Rule
from masterless.tensor.quantized import local_of, weight_storage

COMMON_DEFAULTS: dict[str, Any] = {
    "maximize": False,
    "rounding": "stochastic",
    "weight_rounding": "stochastic",
    "error_compensation": True,
    "scale_policy": "held",
    "quantize": "matrices",
    "nonfinite": "raise",
    "reset": None,
    "seed": 0,
    "backend": "auto",
}


class LossyUpdateWarning(UserWarning):
    """A combination of format, rounding and momentum that is known to lose much of the training."""


class NonFiniteGradientError(RuntimeError):
    """A gradient held NaN or infinity; what it touched was left exactly as it was."""


def require(condition: bool, name: str, value: Any, reason: str) -> None:
    """Raises a ValueError that names the option, its value and what is allowed."""
    if not condition:
        raise ValueError(f"{name}={value!r}: {reason}")


class LowBitOptimizer(Optimizer):
    """Base of the optimizers: a subclass declares its rule and its defaults.

    Attributes:
        nonfinite_counts: with ``nonfinite="skip"``: elements of each parameter's gradients, by name, that were
            not finite and were skipped.
        reset_counts: elements that the schedule ``reset=`` has cleared so far, by the parameter's name.
    """

    torch_twin: ClassVar[Any] = None  # the torch.optim class whose checkpoints are ours too
    first_name: ClassVar[str | None] = None
    second_name: ClassVar[str | None] = None

    nonfinite_counts: dict[str, int]
    reset_counts: dict[str, int]
    prepared: dict[int, stepping.Prepared]  # by the parameter's id
    batch: stepping.Batch | None
    roster: tuple[list[Any], list[stepping.Member]] | None  # what the groups were like, and their members

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.nonfinite_counts = {}
        self.reset_counts = {}
        self.prepared, self.batch, self.roster = {}, None, None
        defaults = {**COMMON_DEFAULTS, **defaults, "masterless_version": checkpoint.VERSION}
        self._check_group(dict(defaults))  # a copy: what "auto" resolves to is each group's own affair
        super().__init__(params, defaults)

    # --- what a subclass says -----------------------------------------------------------------------------

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """The rule that updates the group's parameters: those with error compensation, or the others."""
        raise NotImplementedError

    def momentum(self, group: dict[str, Any]) -> float:
        """The decay of the rule's first moment under the group's hyperparameters; 0 means it keeps none."""
        raise NotImplementedError

    def has_momentum(self, group: dict[str, Any]) -> bool:
        """Whether the rule keeps a first moment under the group's hyperparameters."""
        return self.momentum(group) > 0.0

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Raises a ValueError for a hyperparameter that cannot be."""
        raise NotImplementedError

    # --- param groups -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with options of its own; the rest is taken from the defaults."""
        unknown = [k for k in param_group if k not in self.defaults and k not in ("params", "param_names")]
        if unknown:
            raise ValueError(
                f"{type(self).__name__}: unknown options {unknown} in a param group; "
                f"known: {', '.join(sorted(self.defaults))}"
            )
        merged = {**self.defaults, **{k: v for k, v in param_group.items() if k in self.defaults}}
        self._check_group(merged)
        param_group = {**param_group, **{k: merged[k] for k in merged}}
        super().add_param_group(param_group)
        try:
            for p in self.param_groups[-1]["params"]:
                self._check_parameter(p, self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()  # a refused group leaves the optimizer as it was
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        """Checks a group's options and replaces format names by their canonical spelling."""
        lr = group["lr"]
        if isinstance(lr, Tensor):
            require(lr.numel() == 1, "lr", lr, "a tensor learning rate must have one element")
        require(float(lr) >= 0.0, "lr", lr, "the learning rate must not be negative")
        require(group["weight_decay"] >= 0.0, "weight_decay", group["weight_decay"], "must not be negative")
        self.check_hyperparameters(group)
        if self.first_name:
            group[self.first_name] = str(as_first_moment(group[self.first_name]))
            none = parse(group[self.first_name]).kind == "none"
            require(
                not (none and self.has_momentum(group)),
                self.first_name,
                "none",
                "a momentum above zero needs a buffer; set it to 0 or choose a format",
            )
        if self.second_name:
            group[self.second_name] = str(as_second_moment(group[self.second_name]))
        check_rounding(group["rounding"])
        check_rounding(group["weight_rounding"])
        require(
            group["weight_rounding"] != "stochastic-log",
            "weight_rounding",
            "stochastic-log",
            "not for weights",
        )
        policy = group["scale_policy"]
        require(policy in POLICIES, "scale_policy", policy, f"choose one of {', '.join(POLICIES)}")
        require(group["quantize"] in ("matrices", "all"), "quantize", group["quantize"], "'matrices' or 'all'")
        require(group["nonfinite"] in ("raise", "skip"), "nonfinite", group["nonfinite"], "'raise' or 'skip'")
        seed = group["seed"]
        require(isinstance(seed, int) and 0 <= seed < 2**63, "seed", seed, "a non-negative 63-bit integer")
        ops.check_backend(group["backend"])
        resets.check_schedule(self, group)

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        storage = weight_storage(p)
        if storage is None and p.dtype not in stepping.PLAIN:
            raise ValueError(
                f"parameter of shape {tuple(p.shape)} is {p.dtype}: steps are computed in fp32 and stored in the "
                f"parameter's own format, which must be float32, bfloat16 or quantized; convert it with .float() "
                f"or .bfloat16()"
            )
        if local_of(p) is not p:
            from masterless.sharding import place as sharding

            sharding.check(p, group, self.state_formats(p, group))
        if storage is None or storage.format.master:
            return
        self._warn_of_losses(storage.format, group)
        if not group["error_compensation"]:
            return
        name, rule = type(self).__name__, self.rule(group, compensated=True)
        if not rule.compensable:
            raise ValueError(
                f"{name} cannot compensate the rounding error of a parameter stored as '{storage.format}': "
                f"{rule.obstacle}"
            )
        if not self.has_momentum(group):
            raise ValueError(
                f"{name} without momentum has no buffer to carry the rounding error of a parameter stored as "
                f"'{storage.format}'; pass error_compensation=False, or set a momentum (beta1) above zero"
            )

    def _warn_of_losses(self, format: Format, group: dict[str, Any]) -> None:
        if group["weight_rounding"] != "nearest" or format.fine_bits >= 4:
            return
        if not group["error_compensation"]:
            warnings.warn(
                f"weights stored as '{format}' with weight_rounding='nearest' and no error compensation lose every "
                f"update below half a quantum, which is most of them; use weight_rounding='stochastic'",
                LossyUpdateWarning,
                stacklevel=5,
            )
        elif format.bits <= 4 and self.momentum(group) > 0.7:
            lag = 1 / (2 * (1 - self.momentum(group)))
            warnings.warn(
                f"with weight_rounding='nearest' and a momentum of {self.momentum(group)} the stored weight can lag "
                f"{lag:.1f} quanta behind, and a quantum of '{format}' is large; use weight_rounding='stochastic', "
                f"or a momentum of about 0.35",
                LossyUpdateWarning,
                stacklevel=5,
            )

    # --- state --------------------------------------------------------------------------------------------

    def state_formats(self, p: Tensor, group: dict[str, Any]) -> dict[str, Format]:
        """The format of each of a parameter's states, by the state's name."""
        wanted: dict[str, Format] = {}
        if self.first_name and self.has_momentum(group):
            wanted[self.first_name] = parse(group[self.first_name])
        if self.second_name:
            wanted[self.second_name] = parse(group[self.second_name])
        if is_matrix_like(p.shape):
            return wanted
        every = group["quantize"] == "all"

        def fallback(fmt: Format) -> Format:
            # A vector has no rows and columns to factor.
            keep = fmt.kind == "none" or (every and not (fmt.kind == "factored" and p.dim() < 2))
            return fmt if keep else parse("fp32")

        return {name: fallback(fmt) for name, fmt in wanted.items()}

    def state_storage(self, p: Tensor, group: dict[str, Any]) -> dict[str, Storage]:
        """A parameter's states as storages over the tensors in ``self.state[p]``; allocates them if need be."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            units.mark(self, group, p, state)
        if local_of(p) is not p:
            from masterless.sharding import place as sharding

            return sharding.state_storage(p, state, self.state_formats(p, group))
        storages = {}
        for name, fmt in self.state_formats(p, group).items():
            keys = {part: checkpoint.state_key(name, part) for part in tensor_specs(fmt, p.shape)}
            if any(key not in state for key in keys.values()):
                fresh = Storage.zeros(fmt, p.shape, p.device)
                state.update({keys[part]: tensor for part, tensor in fresh.tensors.items()})
            storages[name] = Storage(fmt, tuple(p.shape), {part: state[key] for part, key in keys.items()})
        return storages

    def parameters(self) -> Iterator[tuple[dict[str, Any], Tensor, str]]:
        """All parameters with their group and their name (its position, written ``#i``, if it has none)."""
        position = 0
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                yield group, p, names[i] if names else f"#{position}"
                position += 1

    # --- the step -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Performs one optimization step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            NonFiniteGradientError: if a gradient held NaN or infinity (unless ``nonfinite="skip"``). The tiles it
                lies in were left exactly as they were, everything else has been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = self._members()
        with_gradient = [] if self.state else [member for member in members if member[1].grad is not None]
        if with_gradient and checkpoint.is_rehearsal(self, with_gradient):
            for group, p, _ in with_gradient:
                self.state_storage(p, group)
        else:
            self.step_parameters(members)
        return loss

    def _members(self) -> list[stepping.Member]:
        """What `parameters` yields, from the last step if the groups have not changed since."""
        ids = [*map(id, chain.from_iterable([group["params"] for group in self.param_groups]))]
        names = [[*group.get("param_names", ())] for group in self.param_groups]
        seen = [*map(id, self.param_groups), ids, names]
        if self.roster is None or self.roster[0] != seen:
            self.roster = seen, list(self.parameters())
        return self.roster[1]

    @torch.no_grad()
    def step_parameters(self, parameters: Iterable[tuple[dict[str, Any], Tensor, str]]) -> None:
        """Steps some of the parameters, given as `parameters` yields them; those without a gradient stay."""
        parameters = list(parameters)
        bad = stepping.step(self, parameters)
        if not bad:
            return
        for name, count in bad.items():
            self.nonfinite_counts[name] = self.nonfinite_counts.get(name, 0) + count
        fatal = {name: bad[name] for group, _, name in parameters if name in bad and group["nonfinite"] != "skip"}
        if fatal:
            listing = ", ".join(f"{name} ({count} elements)" for name, count in list(fatal.items())[:8])
            more = f" and {len(fatal) - 8} more" if len(fatal) > 8 else ""
            raise NonFiniteGradientError(
                f"gradients are not finite (or their squares overflow) in {listing}{more}. The affected tiles of "
                f"weights and states were left as they were. Check the loss and the learning rate, clip "
                f"gradients, or pass nonfinite='skip' to go on and only count them"
            )

    def _local_steps(self, state: dict[str, Any]) -> tuple[int, int]:
        """Updates each moment has seen since it was last zero: what its bias correction must count."""
        return resets.local_step(state, self.first_name), resets.local_step(state, self.second_name)

    @torch.no_grad()
    def reset_state(
        self, params: Any = None, states: str | Iterable[str] | None = None, mode: str = "hard"
    ) -> resets.ResetReport:
        """Restarts moving averages that no longer move, each with its own bias correction.

        Args:
            params: a parameter, a name, or several of either; None is all.
            states: names of states. None is the second moment; "all" is both, except a first moment that holds the
                residue of a rounded weight (error compensation), which is reset only if it is named.
            mode: "hard" (back to zero) or "soft" (the estimate stays, with the weight of a few samples); see
                `masterless.optim.resets`.

        Returns:
            How many elements were really cleared (not zero before), by parameter and in total. ``print`` it.
        """
        return resets.reset_state(self, params, states, mode)

    # --- checkpoints --------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer, of the same with other formats, or of its torch.optim twin.

        Hyperparameters follow the checkpoint, as in torch; formats stay those of this optimizer, and states
        saved in another format are decoded and encoded anew. What cannot be loaded is refused, and the optimizer
        then stays as it was.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():  # they see the dict, not our sealed one
            state_dict = hook(self, state_dict) or state_dict
        prepared = checkpoint.prepare_for_load(self, state_dict)
        hooks, before = self._optimizer_load_state_dict_pre_hooks, (self.state, self.param_groups)
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        try:
            super().load_state_dict(prepared)
        except Exception:
            self.state, self.param_groups = before
            raise
        finally:
            self._optimizer_load_state_dict_pre_hooks = hooks

    def __getstate__(self) -> dict[str, Any]:
        counts = {"nonfinite_counts": self.nonfinite_counts, "reset_counts": self.reset_counts}
        return {**super().__getstate__(), **counts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("nonfinite_counts", {})
        self.__dict__.setdefault("reset_counts", {})
        self.prepared, self.batch, self.roster = {}, None, None
        checkpoint.finish_load(self)

    def torch_state_dict(self) -> dict[str, Any]:
        """This optimizer's state as a state dict of its torch.optim twin, moments in fp32."""
        return checkpoint.export_to_torch(self)

    # --- memory -------------------------------------------------------------------------------------------

    def predicted_state_bytes(self) -> int:
        """Bytes that all moments take (metadata included), from shapes and formats; nothing is allocated."""
        from masterless.formats.storage import predicted_bytes

        return sum(
            predicted_bytes(fmt, p.shape)
            for group, p, _ in self.parameters()
            for fmt in self.state_formats(p, group).values()
        )

    def state_bytes(self) -> int:
        """Bytes of the live moments (of this process's shards of them), metadata included."""
        return sum(
            local_of(value).numel() * value.itemsize
            for state in self.state.values()
            for key, value in state.items()
            if isinstance(value, Tensor) and key != "step" and not key.endswith(checkpoint.COUNTERS)
        )
