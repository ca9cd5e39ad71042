"""Gradient accumulation: the micro-batches of a step."""

from __future__ import annotations

from adascale_core.batch import BatchPlan
from adascale_worker.adascale import AdaScale
from adascale_worker.data_parallel import DataParallelModel


class GradientAccumulation:
    """Counts the micro-batches of a step; the replicas exchange gradients only in the last micro-batch.

    Args:
        optimizer: AdaScale around the program's optimizer.
        model: the program's model.
    """

    def __init__(self, optimizer: AdaScale, model: DataParallelModel) -> None:
        self._optimizer = optimizer
        self._model = model
        self._accumulation = 1
        self._micro_batch = 0

    @property
    def at_first_micro_batch(self) -> bool:
        """Whether the next micro-batch is the first of a step."""
        return self._micro_batch == 0

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on.

        Args:
            plan: the new batch plan.
            scale: its scale S.
        """
        self._accumulation = plan.accumulation
        self._optimizer.set_num_gradients_to_accumulate(plan.accumulation)
        self._optimizer.update_scale(scale, plan.replicas)
        self.restart_step()

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self._micro_batch = 0
        self._set_gradient_sync()
        self._optimizer.zero_grad()

    def advance(self) -> bool:
        """Count a micro-batch, and return whether it was the last of its step."""
        self._micro_batch = (self._micro_batch + 1) % self._accumulation
        self._set_gradient_sync()
        return self._micro_batch == 0

    def _set_gradient_sync(self) -> None:
        ddp = self._model.ddp
        if ddp is not None:
            ddp.require_backward_grad_sync = self._micro_batch == self._accumulation - 1
