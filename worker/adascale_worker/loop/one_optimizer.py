"""The steps of a program with one optimizer.

A step in which members are lost is discarded before the optimizer changes anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import Accumulation, ZeroGrad
from adascale_worker.gradients.trained_models import TrainedModels
from adascale_worker.loop.checks import warn_of_parameters_outside
from adascale_worker.loop.held_state import ModelBuffers
from adascale_worker.loop.steps import StepParts, StepStrategy
from adascale_worker.membership.links import PeersLostError
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.program.patching import patch_step
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.state.state import State


class OneOptimizer(StepStrategy):
    """Makes steps with one optimizer."""

    def __init__(
        self,
        optimizer: ElasticAdaScale,
        models: TrainedModels,
        accumulation: Accumulation,
        buffers: ModelBuffers,
        model: torch.nn.Module,
        trained: TrainedParameters,
        state: State,
        parts: StepParts,
    ) -> None:
        super().__init__(optimizer, models, accumulation, buffers, parts)
        self._adascale = optimizer
        (self._part,) = accumulation.parts
        self._buffers = buffers
        self._model = model
        self._trained = trained
        self._state = state

    def patch(self, observe: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace `step` of the optimizer, and `zero_grad` of optimizer and model."""
        optimizer, model = self._adascale.optimizer, self._model
        patch_step(optimizer, observe(self.step))
        optimized = (parameter for group in optimizer.param_groups for parameter in group["params"])
        optimizer.zero_grad = ZeroGrad(optimizer.zero_grad, optimized, self.accumulation)  # type: ignore[method-assign]
        model.zero_grad = ZeroGrad(model.zero_grad, model.parameters(), self.accumulation)  # type: ignore[method-assign]

    @property
    def has_stepped(self) -> bool:
        """Whether `optimizer.step()` was called for the present batch."""
        return self._part.has_stepped

    def step(self) -> None:
        """Count a micro-batch, and after the last one of a step update the parameters."""
        self.counter.begin_call()
        if self.failure.is_discarded:
            self.discard()
            return
        part, accumulation = self._part, self.accumulation
        lacks_pass = self._loop.has_batch and not accumulation.passes
        part.check_step(accumulation.kept_micro_batches, is_inside=self._loop.has_batch)
        self._checks.stepped()
        if not accumulation.at_last_micro_batch:
            part.finish_micro_batch(accumulation.micro_weight)
            accumulation.advance()
            return
        accumulation.weights.check_step()
        if lacks_pass:
            self._agree_without_pass()
        flags = self.counter.agreement.flags()
        try:
            accumulation.complete(part)
            accumulation.advance()
            part.check_gradients(is_restored=self._state.was_restored)
            # The exchange must have succeeded before anything is changed. In this order, because other
            # replicas may have exchanged the statistics in backward() already.
            self._adascale.exchange_statistics()
            self._adascale.flags = flags
            accumulation.weights.exchange_later()
            self._group.commit()
            self._follow_trained()
            self._checkpointing.before_step()
            self._adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.failure.peers_lost(error):
                raise
            self.discard()
            return
        part.finish_step()
        self.counter.made_step = True
        # What this step has changed stays, also if members are lost before the next.
        self._buffers.begin_step()
        self._planner.finished_step()
        self.counter.count(flags)
        if not self._loop.has_batch:
            # A program with batches of its own.
            self._begin_own_step()

    def _follow_trained(self) -> None:
        """Train the parameters that require gradients now in the step that the optimizer makes next."""
        changed = self._trained.follow(self._progress.step)
        self._part.drop_frozen(changed)
        if changed:
            self._adascale.restart_statistics(changed)
            warn_of_parameters_outside(self._model, self._adascale)

    def _begin_own_step(self) -> None:
        try:
            self.begin_step()
        except PeersLostError:
            # The step is made. What follows it waits for the next generation.
            return

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the samples of a step whose gradients are not finite. See `StepStrategy`."""
        del optimizer
        self._part.check_step(self.accumulation.kept_micro_batches, is_inside=self._loop.has_batch)
        self._checks.stepped()
        self.accumulation.advance()
        self._part.finish_step()
        self._adascale.discard_step()
        self.counter.count_skipped()

    def begin_step(self) -> None:
        """Use the buffers of rank 0, and let the next forward pass copy them. A collective call."""
        self._buffers.begin_step()
        self.models.begin_step()
        self._copy_buffers(self._model.buffers())

    def end_batch(self) -> None:
        """Complete what the program has done for its last batch. See `StepStrategy`."""
        super().end_batch()
        self._part.has_stepped = False

    def _complete_batch(self) -> None:
        """Leave out a step that the program has left out, on all replicas."""
        if self.at_boundary or not self.accumulation.passes:
            return
        if self._group.replicas > 1 and not self.accumulation.at_last_micro_batch:
            raise WorkerError(
                "optimizer.step() was left out after backward() for one of several batches of a step, on one "
                "of several replicas, so the others would wait for it: decide after the last backward() of "
                "the step, from the gradients, which are the same on all replicas then, or let a step have "
                "one batch (local_bsz_bounds with a larger upper bound)"
            )
        # The program does not want the mean gradient, which is the same on all replicas, or a part of it.
        self.accumulation.restart_step()
        self._checks.stepped()
