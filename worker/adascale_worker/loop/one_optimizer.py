"""The steps of a program with one optimizer.

A step in which members are lost is discarded before the optimizer changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import ZeroGrad
from adascale_worker.gradients.trained_models import ModelBuffers
from adascale_worker.loop.steps import StepStrategy
from adascale_worker.membership.links import PeersLostError
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.program.parts import warn_of_parameters_outside
from adascale_worker.program.patching import patch_step


@dataclass(eq=False, kw_only=True)
class OneOptimizer(StepStrategy):
    """Makes steps with one optimizer."""

    optimizer: ElasticAdaScale
    undo: ModelBuffers

    def __post_init__(self) -> None:
        super().__post_init__()
        (self._part,) = self.accumulation.parts

    def patch(self, observe: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace `step` of the optimizer, and `zero_grad` of optimizer and model."""
        optimizer, model = self.optimizer.optimizer, self.parts.model
        patch_step(optimizer, observe(self.step))
        optimized = (parameter for group in optimizer.param_groups for parameter in group["params"])
        optimizer.zero_grad = ZeroGrad(optimizer.zero_grad, optimized, self.accumulation)  # type: ignore[method-assign]
        model.zero_grad = ZeroGrad(model.zero_grad, model.parameters(), self.accumulation)  # type: ignore[method-assign]

    def step(self) -> None:
        """Count a micro-batch, and after the last one of a step update the parameters."""
        self.counter.begin_call()
        if self.failure.is_discarded:
            self.discard()
            return
        part, accumulation = self._part, self.accumulation
        lacks_pass = self.loop.has_batch and not accumulation.passes
        part.check_step(accumulation.kept_micro_batches, is_inside=self.loop.has_batch)
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
            part.check_gradients(is_restored=self.state.was_restored)
            # The exchange must have succeeded before anything is changed. In this order, because other
            # replicas may have exchanged the statistics in backward() already.
            self.optimizer.exchange_statistics()
            self.optimizer.flags = flags
            accumulation.weights.exchange_later()
            self.group.commit()
            self._follow_trained()
            self.checkpointing.before_step()
            self.optimizer.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.failure.peers_lost(error):
                raise
            self.discard()
            return
        part.finish_step()
        self.counter.made_step = True
        # What this step has changed stays, also if members are lost before the next.
        self.undo.begin_step()
        self.planner.finished_step()
        self.counter.count(flags)
        if not self.loop.has_batch:
            # A program with batches of its own.
            self._begin_own_step()

    def _follow_trained(self) -> None:
        """Train the parameters that require gradients now in the step that the optimizer makes next."""
        changed = self.program.trained.follow(self.progress.step)
        self._part.drop_frozen(changed)
        if changed:
            self.optimizer.restart_statistics(changed)
            warn_of_parameters_outside(self.parts.model, self.optimizer)

    def _begin_own_step(self) -> None:
        try:
            self.begin_step()
        except PeersLostError:
            # The step is made. What follows it waits for the next generation.
            return

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the samples of a step whose gradients are not finite. See `StepStrategy`."""
        del optimizer
        self._part.check_step(self.accumulation.kept_micro_batches, is_inside=self.loop.has_batch)
        self._checks.stepped()
        self.accumulation.advance()
        self._part.finish_step()
        self.optimizer.discard_step()
        self.counter.count_skipped()

    def begin_step(self) -> None:
        """Use the buffers of rank 0, and let the next forward pass copy them. A collective call."""
        self.undo.begin_step()
        self.times.begin_step()
        self._copy_buffers(self.parts.model.buffers())

    def end_batch(self) -> None:
        """Complete what the program has done for its last batch. See `StepStrategy`."""
        super().end_batch()
        self._part.has_stepped = False

    def _complete_batch(self) -> None:
        """Leave out a step that the program has left out, on all replicas."""
        if self.at_boundary or not self.accumulation.passes:
            return
        if self.group.replicas > 1 and not self.accumulation.at_last_micro_batch:
            raise WorkerError(
                "optimizer.step() was left out after backward() for one of several batches of a step, on one "
                "of several replicas, so the others would wait for it: decide after the last backward() of "
                "the step, from the gradients, which are the same on all replicas then, or let a step have "
                "one batch (local_bsz_bounds with a larger upper bound)"
            )
        # The program does not want the mean gradient, which is the same on all replicas, or a part of it.
        self.accumulation.restart_step()
        self._checks.stepped()
