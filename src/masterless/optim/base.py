"""What all optimizers share: validation, allocation, the step loop, checkpoints. A rule adds its mathematics.

Contract:
    * Every option sits in `defaults` and can be overridden per param group.
    * Which tensors get low-bit states is decided from the parameter's full shape (`layout.is_matrix_like`):
      with ``quantize_states="matrices"`` (the default) vectors and very narrow matrices keep fp32 states.
    * `.grad` is never written. State is plain tensors. Nothing is printed.
    * A parameter's random bits depend on its name if the optimizer was given names, else on its position.
"""

from __future__ import annotations

import difflib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from masterless.formats import Format, as_first_moment, as_second_moment, parse
from masterless.formats.layout import is_matrix_like
from masterless.formats.rounding import check_rounding, of_signed
from masterless.formats.scaling import POLICIES
from masterless.formats.storage import COUNTERS, Storage, predicted_bytes, refuse_leftovers, state_key, tensor_specs
from masterless.optim import compiled, resets, state_dict, units
from masterless.optim.errors import NonFiniteGradientError, require, warn_of_losses
from masterless.optim.options import COMMON_DEFAULTS, REFUSED, refuse
from masterless.optim.plan import PLAIN, Member, StepPlan
from masterless.optim.state_dict import prepare_for_load
from masterless.step import dispatch
from masterless.step.rules import Rule
from masterless.tensor.quantized import local_bytes, local_of, weight_storage


class LowBitOptimizer(compiled.StepOperator, Optimizer):
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
    plan: StepPlan

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self.nonfinite_counts = {}
        self.reset_counts = {}
        self.plan = self.new_plan()
        self.number, self.turns = compiled.enlist(self), torch.zeros((), dtype=torch.int64)
        defaults = {**COMMON_DEFAULTS, **defaults, "masterless_version": state_dict.VERSION}
        self._check_group(dict(defaults))  # a copy: what "auto" resolves to is each group's own affair
        super().__init__(params, defaults)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Writes the options that all optimizers share into the signature, where users look for them."""
        super().__init_subclass__(**kwargs)
        own = inspect.signature(cls.__init__)
        named = [p for p in own.parameters.values() if p.name != "self" and p.kind is not p.VAR_KEYWORD]
        shared = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
            for name, default in COMMON_DEFAULTS.items()
        ]
        cls.__signature__ = inspect.Signature([*named, *shared])  # type: ignore[attr-defined]

    # --- what a subclass says -----------------------------------------------------------------------------

    def rule(self, group: dict[str, Any], compensated: bool = False) -> Rule:
        """The rule that updates this group's parameters; `compensated` ones carry what rounding took from them."""
        raise NotImplementedError

    def momentum(self, group: dict[str, Any]) -> float:
        """The decay of the rule's first moment under the group's hyperparameters; 0 means it keeps none."""
        raise NotImplementedError

    def has_momentum(self, group: dict[str, Any]) -> bool:
        """Whether the rule keeps a first moment under the group's hyperparameters."""
        return self.momentum(group) > 0.0

    def new_plan(self) -> StepPlan:
        """How it steps its parameters: what it keeps between steps, which can be thrown away at any time."""
        return StepPlan()

    def check_hyperparameters(self, group: dict[str, Any]) -> None:
        """Raises a ValueError for a hyperparameter that cannot be."""
        raise NotImplementedError

    # --- param groups -------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters with options of its own; the rest is taken from the defaults."""
        refuse(**{key: value for key, value in param_group.items() if key in REFUSED})
        for key in param_group:  # as in torch a group may carry keys of its own, but not a misspelt option
            meant = [] if key in self.defaults else difflib.get_close_matches(key, self.defaults, n=1, cutoff=0.8)
            if meant:
                raise ValueError(
                    f"{type(self).__name__}: unknown option {key!r} in a param group; did you mean {meant[0]!r}?"
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
        rounding = group["weight_rounding"]
        require(rounding == of_signed(rounding), "weight_rounding", rounding, "not for weights; 'stochastic' is")
        policy = group["scale_policy"]
        require(policy in POLICIES, "scale_policy", policy, f"choose one of {', '.join(POLICIES)}")
        scope = group["quantize_states"]
        require(scope in ("matrices", "all"), "quantize_states", scope, "'matrices' or 'all'")
        compensation = group["error_compensation"]
        require(compensation in (None, True, False), "error_compensation", compensation, "None, True or False")
        known = ("raise", "raise-now", "skip")
        require(group["nonfinite"] in known, "nonfinite", group["nonfinite"], "'raise', 'raise-now' or 'skip'")
        seed = group["seed"]
        require(isinstance(seed, int) and 0 <= seed < 2**63, "seed", seed, "a non-negative 63-bit integer")
        dispatch.check_choice(group["backend"])
        resets.check_schedule(self, group)

    def _check_parameter(self, p: Tensor, group: dict[str, Any]) -> None:
        storage = weight_storage(p)
        if storage is None and p.dtype not in PLAIN:
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
        warn_of_losses(self, storage.format, group)
        # Asked for by name, units that cannot carry the error would switch compensation off without a word.
        named = group["error_compensation"] is None and group.get("moment_units") in ("gradient", "update")
        if group["error_compensation"] or (named and self.has_momentum(group)):
            self._require_compensation(storage.format, group)

    def compensates(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether what rounding takes from a parameter is injected into its momentum.

        ``error_compensation=None`` means: wherever the rule can. A sign step (Lion) and a rule without momentum cannot.
        """
        storage = weight_storage(p)
        if storage is None or storage.format.master or group["error_compensation"] is False:
            return False
        return self.rule(group, True).compensable and self.has_momentum(group)

    def _require_compensation(self, format: Format, group: dict[str, Any]) -> None:
        name = type(self).__name__
        rule = self.rule(group, True)
        if not rule.compensable:
            raise ValueError(
                f"{name} cannot compensate the rounding error of a parameter stored as '{format}': {rule.obstacle}"
            )
        if not self.has_momentum(group):
            raise ValueError(
                f"{name} without momentum has no buffer to carry the rounding error of a parameter stored as "
                f"'{format}'; pass error_compensation=False, or set a momentum (beta1) above zero"
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
        every = group["quantize_states"] == "all"

        def fallback(fmt: Format) -> Format:
            # A vector has no rows and columns to factor.
            keep = fmt.kind == "none" or (every and not (fmt.kind == "factored" and p.dim() < 2))
            return fmt if keep else parse("fp32")

        return {name: fallback(fmt) for name, fmt in wanted.items()}

    def state_storage(self, p: Tensor, group: dict[str, Any]) -> dict[str, Storage]:
        """A parameter's states as storages over the tensors in ``self.state[p]``; allocates them if need be."""
        state = self.state[p]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.int64)
            units.mark(self, group, p, state)
        if local_of(p) is not p:
            from masterless.sharding import place  # torch.distributed is large, and one process does without

            return place.state_storage(p, state, self.state_formats(p, group))
        storages = {}
        for name, fmt in self.state_formats(p, group).items():
            keys = {part: state_key(name, part) for part in tensor_specs(fmt, p.shape)}
            if any(key not in state for key in keys.values()):
                refuse_leftovers(name, fmt, state)
                fresh = Storage.zeros(fmt, p.shape, p.device)
                state.update({keys[part]: tensor for part, tensor in fresh.tensors.items()})
            storages[name] = Storage(fmt, tuple(p.shape), {part: state[key] for part, key in keys.items()})
        return storages

    def parameters(self) -> Iterator[Member]:
        """All parameters with their group and a name of their own (its position, written ``#i``, if it has none).

        Two models in one optimizer may have the same names: a later one of a name has ``name@2``, ``name@3``, ...
        """
        position = 0
        seen: dict[str, int] = {}
        for group in self.param_groups:
            names = group.get("param_names")
            for i, p in enumerate(group["params"]):
                name = names[i] if names else f"#{position}"
                seen[name] = seen.get(name, 0) + 1
                yield group, p, name if seen[name] == 1 else f"{name}@{seen[name]}"
                position += 1

    # --- the step -----------------------------------------------------------------------------------------

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Performs one optimization step.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            NonFiniteGradientError: if a gradient held NaN or infinity (unless ``nonfinite="skip"``). Nothing has
                changed then, and the step is not counted. Also if finite gradients would have made a weight or a state
                that is not finite: then all but those tiles has been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        members = self.plan.roster.members(self)
        with_gradient = [] if self.state else [member for member in members if member[1].grad is not None]
        if with_gradient and state_dict.is_rehearsal(self, with_gradient):
            for group, p, _ in with_gradient:
                self.state_storage(p, group)
        else:
            self.step_parameters(members)
        return loss

    @torch.no_grad()
    def step_parameters(self, parameters: Iterable[Member]) -> None:
        """Steps some of the parameters, given as `parameters` yields them; those without a gradient stay."""
        self.synchronize()
        self._report(self.plan.step(self, parameters if isinstance(parameters, tuple) else list(parameters)))

    def synchronize(self) -> None:
        """Waits for the last step on a device that runs behind, and raises or counts what was not finite in it."""
        self._report(self.plan.settle())

    def _report(self, bad: Iterable[tuple[Member, int]]) -> None:
        """Raises or counts what was not finite in a step."""
        fatal = [f"{name} ({count} elements)" for (group, _, name), count in bad if group["nonfinite"] != "skip"]
        if fatal:
            raise NonFiniteGradientError(self.plan.complaint(fatal))
        for (_, _, name), count in bad:
            self.nonfinite_counts[name] = self.nonfinite_counts.get(name, 0) + count

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
        self.synchronize()
        return resets.reset_state(self, params, states, mode)

    # --- checkpoints --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As torch's; waits for the last step first."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this optimizer, of the same with other formats, or of its torch.optim twin.

        Hyperparameters follow the checkpoint, as in torch; formats stay those of this optimizer, and states
        saved in another format are decoded and encoded anew. What cannot be loaded is refused, and the optimizer
        then stays as it was.
        """
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():  # they see the dict, not our sealed one
            state_dict = hook(self, state_dict) or state_dict
        prepared = prepare_for_load(self, state_dict)
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
        self.plan = self.new_plan()
        self.number, self.turns = compiled.enlist(self), torch.zeros((), dtype=torch.int64)
        state_dict.finish_load(self)

    def torch_state_dict(self) -> dict[str, Any]:
        """This optimizer's state as a state dict of its torch.optim twin, moments in fp32."""
        return state_dict.export_to_torch(self)

    # --- memory -------------------------------------------------------------------------------------------

    def predicted_state_bytes(self) -> int:
        """Bytes that all moments take (metadata included), from shapes and formats; nothing is allocated."""
        return sum(
            predicted_bytes(fmt, p.shape)
            for group, p, _ in self.parameters()
            for fmt in self.state_formats(p, group).values()
        )

    def state_bytes(self) -> int:
        """Bytes of the live moments (of this process's shards of them), metadata included."""
        return sum(map(self.state_bytes_of, self.state))

    def state_bytes_of(self, p: Tensor) -> int:
        """Bytes of one parameter's live moments; counters are single numbers and not counted."""
        state = self.state.get(p, {})
        return local_bytes(*(v for k, v in state.items() if k != "step" and not k.endswith(COUNTERS)))
