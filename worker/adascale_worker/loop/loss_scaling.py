"""The program's `GradScaler`, in a loop whose steps can have several micro-batches or be discarded.

The program calls `unscale_`, `step` and `update` for each micro-batch. They act once per step: after its last
micro-batch, and not at all if the step is discarded, so that the loss scale stays equal on all replicas.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp import GradScaler

from adascale_worker.errors import WorkerError
from adascale_worker.program.patching import MethodOverride
from adascale_worker.torch_private.modules import skipping_outside_kernel

if TYPE_CHECKING:
    from adascale_worker.loop.steps import Steps

CHECKED_CALLS = 100
"""Calls of `optimizer.step()` for which a GradScaler is searched that was not registered."""
_CALLERS = 6
"""Functions above `optimizer.step()` that are searched; a scheduler wraps it once or twice."""


def scaler_of(registered: Iterable[object]) -> GradScaler | None:
    """Return the GradScaler among the registered objects."""
    scalers = [each for each in registered if isinstance(each, GradScaler)]
    if len(scalers) > 1:
        raise WorkerError(
            f"register has {len(scalers)} GradScalers: use one, for all optimizers, and call its update() "
            "after the last of their steps"
        )
    return scalers[0] if scalers else None


def patch_scaler(scaler: GradScaler, optimizers: Collection[torch.optim.Optimizer], steps: Steps) -> None:
    """Make `unscale_`, `step` and `update` of `scaler` act once per step of `optimizers`."""
    if not scaler.is_enabled():
        return
    parts = _Scaler(scaler, optimizers, steps)
    scaler.unscale_ = MethodOverride(scaler.unscale_, parts.unscale)  # type: ignore[method-assign]
    scaler.step = MethodOverride(scaler.step, parts.step)  # type: ignore[method-assign]
    scaler.update = MethodOverride(scaler.update, parts.update)  # type: ignore[method-assign]


class _Scaler:
    def __init__(
        self, scaler: GradScaler, optimizers: Collection[torch.optim.Optimizer], steps: Steps
    ) -> None:
        self._scaler = scaler
        self._optimizers = optimizers
        self._steps = steps
        self._unscale: Callable[..., None] = scaler.unscale_
        self._step: Callable[..., Any] = scaler.step
        self._update: Callable[..., None] = scaler.update
        self._is_incomplete = False
        self._is_discarded = False
        self._has_stepped = False
        """Whether an optimizer has made or skipped a step since the last update."""
        self._has_unscaled = False
        """Whether the gradients of a complete step were unscaled since the last update."""

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of a complete step by the loss scale."""
        if not self._is_known(optimizer):
            self._unscale(optimizer)
        elif not self._steps.awaits_micro_batches:
            self._unscale(optimizer)
            self._has_unscaled = True

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Make a step if it is complete and its gradients are finite."""
        if not self._is_known(optimizer):
            return self._step(optimizer, *args, **kwargs)
        steps = self._steps
        self._is_incomplete = steps.awaits_micro_batches
        if self._is_incomplete:
            return optimizer.step(*args, **kwargs)
        calls, self._has_stepped = steps.step_calls, True
        # A fused optimizer skips a step in its kernel, so that nobody knows whether it was made.
        with skipping_outside_kernel(optimizer):
            result = self._step(optimizer, *args, **kwargs)
        if steps.step_calls == calls:
            steps.skip_step_of(optimizer)
        elif not steps.made_step:
            self._is_discarded = True
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Change the loss scale after a step that was made, skipped because of its gradients, or left out.

        As of a plain GradScaler, the scale also follows gradients that were unscaled for a step which the
        program has left out.
        """
        if not (self._has_stepped or self._has_unscaled):
            return
        # With several optimizers, the step can be discarded after one of them has made its part.
        is_incomplete = self._is_incomplete if self._has_stepped else self._steps.awaits_micro_batches
        is_discarded = self._is_discarded or is_incomplete
        self._has_stepped = self._has_unscaled = self._is_discarded = False
        state = self._scaler.state_dict() if is_discarded else None
        self._update(new_scale)
        if state is not None:
            self._scaler.load_state_dict(state)

    def _is_known(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(optimizer is known for known in self._optimizers)


def require_registered_scaler(registered: Collection[object]) -> None:
    """Check that no GradScaler calls `optimizer.step()` that is not registered."""
    frame = inspect.currentframe()
    for _ in range(_CALLERS):
        frame = None if frame is None else frame.f_back
        if frame is None or frame.f_globals.get("__name__") != GradScaler.__module__:
            continue
        scaler = frame.f_locals.get("self")
        if isinstance(scaler, GradScaler) and scaler.is_enabled() and scaler not in registered:
            raise WorkerError(
                "optimizer.step() was called by a GradScaler that the trainer does not know, so its loss "
                "scale would not be saved, and could differ between replicas: call "
                'program_reentry(..., register={"scaler": scaler})'
            )
