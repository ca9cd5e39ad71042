"""The steps of a program with several optimizers, such as a GAN.

What the program does for one batch is one step: each optimizer makes at most one step of its own in it, the
first one exactly one. The optimizers change their parameters at once, as in a plain loop, so that the loss of
the second sees what the first has changed. If the step fails after that, because members are lost or a batch
does not fit, the state from the beginning of the step is put back, and the same samples are delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import Accumulation, ZeroGrad
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.trained_models import TrainedModels
from adascale_worker.loop.agreement import FinishRequest
from adascale_worker.loop.held_state import StepUndo
from adascale_worker.loop.steps import StepParts, StepStrategy
from adascale_worker.membership.links import PeersLostError
from adascale_worker.program.optimizers import OptimizerSet
from adascale_worker.program.parts import ProgramParts
from adascale_worker.program.patching import patch_step
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.state.state import State


class SeveralOptimizers(StepStrategy):
    """Makes steps with several optimizers. A step is counted when the first of them makes its own."""

    def __init__(
        self,
        optimizer: OptimizerSet,
        models: TrainedModels,
        accumulation: Accumulation,
        undo: StepUndo,
        program: ProgramParts,
        trained: TrainedParameters,
        finish_request: FinishRequest,
        state: State,
        parts: StepParts,
    ) -> None:
        super().__init__(optimizer, models, accumulation, undo, parts)
        self._lead = optimizer.lead
        self._step_undo = undo
        self._passed = program
        self._trained = trained
        self._finish_request = finish_request
        self._state = state
        self._finished_in: int | None = None
        """The number of the batch for which the program has called `finish`."""

    # -- steps ------------------------------------------------------------------------------------------

    def patch(self, observe: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace `step` and `zero_grad` of the program's optimizers, and `zero_grad` of its models."""
        optimizers = self._passed.optimizers.values()
        owners: list[tuple[Any, Iterable[Tensor]]] = [
            *((each, [p for group in each.param_groups for p in group["params"]]) for each in optimizers),
            *((model, model.parameters()) for model in self._passed.models),
        ]
        for owner, parameters in owners:
            owner.zero_grad = ZeroGrad(owner.zero_grad, parameters, self.accumulation)
        for part, optimizer in zip(self.accumulation.parts, optimizers, strict=True):
            patch_step(optimizer, partial(observe(self.step_of), part))

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has made a step for the present batch."""
        return any(part.has_stepped for part in self.accumulation.parts)

    @property
    def made_step(self) -> bool:
        """Whether the last `step()` has changed the weights, and its step is not discarded since."""
        return self.counter.made_step and not self.failure.is_discarded

    def step_of(self, part: OptimizerGradients) -> None:
        """Count a micro-batch of one optimizer, and in the last one of a step update its parameters."""
        self.counter.begin_call()
        if not self._loop.has_batch:
            raise WorkerError(
                f"step() of the optimizer {part.name!r} was called outside of the loop over "
                "trainer.dataloader(): with several optimizers, the steps for a batch are counted together, "
                "so make them inside that loop"
            )
        if self.failure.is_discarded:
            return
        lacks_pass = not self.accumulation.passes and not self.has_stepped
        part.check_step(self.accumulation.kept_micro_batches)
        leads = part.adascale is self._lead
        if leads:
            self._checks.stepped()
        if not self.accumulation.at_last_micro_batch:
            part.finish_micro_batch(self.accumulation.micro_weight)
            return
        if lacks_pass:
            self._agree_without_pass()
        flags = self.counter.agreement.flags()
        if leads:
            self._lead.flags = flags
        try:
            self.accumulation.complete(part)
            part.check_gradients(is_restored=self._state.was_restored)
            # The exchange must have succeeded before anything is changed.
            part.adascale.exchange_statistics()
            self._group.wait_for_device()
            part.adascale.restart_statistics(self._trained.follow(self._progress.step, part.parameters))
            self._checkpointing.before_step()
            part.adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.failure.peers_lost(error):
                raise
            return
        part.finish_step()
        self.counter.made_step = True
        if leads:
            self.counter.count(flags)
        if self._finished_in == self.accumulation.batch:
            self._save_end_again()

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer whose gradients are not finite. See `StepStrategy`."""
        for part in self.accumulation.parts:
            if part.adascale.optimizer is optimizer:
                part.check_step(self.accumulation.kept_micro_batches)
                part.finish_step()
                part.adascale.discard_step()
                if part.adascale is self._lead:
                    self.counter.count_skipped()

    def begin_step(self) -> None:
        """Copy the state, after the replicas have agreed on the trained parameters. A collective call."""
        # Gradients are averaged for the trained parameters, which have to be the same on all replicas.
        self._trained.agree(self._progress.step)
        # The buffers of rank 0, such as BatchNorm's statistics, count on all replicas.
        self._copy_buffers(self._passed.model.buffers())
        self._step_undo.record()

    def begin_batch(self) -> None:
        """Prepare for a batch, which the program gets next."""
        super().begin_batch()
        self.models.begin_step()

    def end_batch(self) -> None:
        """Complete the step if this was its last micro-batch. See `StepStrategy`."""
        super().end_batch()
        for part in self.accumulation.parts:
            part.has_stepped = False

    def _complete_batch(self) -> None:
        parts, accumulation = self.accumulation.parts, self.accumulation
        if parts[0].has_stepped:
            if accumulation.at_last_micro_batch:
                for part in parts:
                    if not part.has_stepped:
                        part.check_micro_batches(0)
            if accumulation.advance():
                self._step_undo.forget()
                self._planner.finished_step()
        elif stepped := [part.name for part in parts if part.has_stepped]:
            raise WorkerError(
                f"the optimizer {stepped[0]!r} made a step for a batch for which the first one, "
                f"{parts[0].name!r}, made none: a step is counted when the first optimizer makes its "
                "own, so it has to make one for each batch. Pass the optimizer that makes the most steps "
                "as the first"
            )
        elif accumulation.is_later_and_last and any(part.is_averaged for part in parts):
            # The program does not want the mean gradients, which are the same on all replicas.
            accumulation.restart_step()

    def discard(self) -> None:
        """Put the state from before the step back."""
        super().discard()
        self._is_open = self.counter.made_step = False

    # -- the end of a loop and of training ----------------------------------------------------------------

    def leave(self) -> None:
        """Put a failed step back: the loop, which would do so before its next batch, has ended."""
        if self.failure.is_discarded:
            self.discard()

    def mark_finish(self) -> None:
        """Save the end of training again if the present batch has other steps."""
        self._finished_in = self.accumulation.batch if self._is_open else None

    def end_epoch(self) -> None:
        """Keep the last step: one without its last micro-batch has changed no weights."""
        self._step_undo.forget()

    def _save_end_again(self) -> None:
        """Replace what `finish` has saved between the steps of two optimizers."""
        if self._group.replicas > 1:
            self._finish_request.save()
        else:
            self._state.save(final=True)
