"""For transformers' Trainer and what is built on it: steps inside the backward pass, and what rounding does in a run.

    Trainer(model, args, ..., callbacks=[MasterlessCallback(step_in_backward=True, monitor={"every": 50})])

All else the stock Trainer does by itself (`integrations.transformers`); resets are an option of the optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerCallback

from masterless.insight.monitor import Monitor
from masterless.integrations.transformers import adopt
from masterless.optim.adam import Adam
from masterless.optim.backward import BackwardStepper, step_in_backward
from masterless.optim.trade import trade_momentum_


class MasterlessCallback(TrainerCallback):
    """Adds to a stock Trainer what it cannot do by itself.

    Args:
        step_in_backward: apply every parameter's update as soon as its gradient is ready, and free the gradient; the
            result is that of ordinary steps, to the bit. Trainer's own clipping (``max_grad_norm``), accumulation and
            several processes need all gradients together and are refused.
        clip_value: with `step_in_backward`, clips every gradient element to ``[-clip_value, clip_value]``.
        clip_norm: with `step_in_backward`, scales each parameter's gradient down to at most this norm.
        clip_previous_norm: with `step_in_backward`, clips by the global norm of the previous step's gradients.
        monitor: arguments of `masterless.Monitor`: samples steps and puts the totals into ``state.log_history``.
        trade_last: the share of the steps, at the end, for which the momentum's bits are the weights'
            (`masterless.trade_momentum_`), as presets "1-byte-int8" and "1-byte-int4" want it. A checkpoint from there
            on is resumed with the model that was saved in it: ``from_pretrained(checkpoint)``.
        trade_for: the weights' format then, as `trade_momentum_` takes it.

    Attributes:
        watching: the `Monitor` of the running or last training, with its samples.
    """

    def __init__(
        self,
        *,
        step_in_backward: bool = False,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        clip_previous_norm: float | None = None,
        monitor: Mapping[str, Any] | None = None,
        trade_last: float = 0.0,
        trade_for: str | None = None,
    ) -> None:
        if not 0 <= trade_last < 1:
            raise ValueError(f"trade_last={trade_last!r}: a share of the steps; must be at least 0 and below 1")
        if trade_for is not None and not trade_last:
            raise ValueError(
                f"trade_for={trade_for!r}: means nothing without a share of the steps; pass trade_last=0.15"
            )
        limits = {"clip_value": clip_value, "clip_norm": clip_norm, "clip_previous_norm": clip_previous_norm}
        given = {name: value for name, value in limits.items() if value is not None}
        if given and not step_in_backward:
            raise ValueError(
                f"{given} belong to step_in_backward=True; without it Trainer clips by "
                f"TrainingArguments(max_grad_norm=...)"
            )
        if step_in_backward and monitor is not None:
            raise ValueError(
                "monitor= compares a parameter before and after optimizer.step(), and with step_in_backward=True the "
                "steps happen elsewhere; monitor a short run with ordinary steps, which are the same to the bit"
            )
        self.step_in_backward = step_in_backward
        self.limits: dict[str, Any] = given
        self.monitor = None if monitor is None else dict(monitor)
        self.trade_last, self.trade_for = trade_last, trade_for
        self.watching: Monitor | None = None
        self._stepper: BackwardStepper | None = None
        self._logged = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attaches to the model and the optimizer of this training."""
        self._detach()
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])  # accelerate wraps it
        if self.trade_last and not isinstance(optimizer, Adam):
            raise ValueError(
                f"trade_last={self.trade_last!r}: {type(optimizer).__name__} is not masterless' AdamW or Adam"
            )
        if self.step_in_backward:
            _refuse(args)
            self._stepper = step_in_backward(kwargs["model"], optimizer, **self.limits)
        if self.monitor is not None:
            self.watching, self._logged = Monitor(optimizer, **self.monitor), 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Trades the momentum before the first step of the last share."""
        optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
        due = self.trade_last and state.global_step >= (1 - self.trade_last) * state.max_steps
        if due and any(optimizer.compensates(p, group) for group, p, _ in optimizer.parameters()):
            trade_momentum_(optimizer, self.trade_for)
            adopt(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Logs the samples of this step."""
        for sample in [] if self.watching is None else self.watching.samples[self._logged :]:
            figures = {
                f"masterless/{part}/{name}": value
                for part, found in sample["total"].items()
                for name, value in found.items()
                if isinstance(value, float)
            }
            state.log_history.append({**figures, "step": state.global_step})
            self._logged += 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detaches; the samples stay."""
        self._detach()

    def _detach(self) -> None:
        if self._stepper is not None:
            self._stepper.remove()
            self._stepper = None
        if self.watching is not None:
            self.watching.remove()


def _refuse(args: Any) -> None:
    """What needs all gradients at once would silently not happen."""
    if args.max_grad_norm:
        raise ValueError(
            f"max_grad_norm={args.max_grad_norm!r} clips by the norm of all gradients, which never exist at once with "
            f"step_in_backward=True; set TrainingArguments(max_grad_norm=0.0), and clip_previous_norm= or clip_norm= "
            f"(per parameter) here"
        )
    if args.gradient_accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: with step_in_backward=True each backward "
            f"pass is a step; set it to 1 and raise per_device_train_batch_size"
        )
    if args.world_size > 1:
        raise ValueError(
            f"a Trainer of {args.world_size} processes wraps the model after this callback sees it; wrap it yourself "
            f"and call masterless.step_in_backward(ddp_model, optimizer)"
        )
