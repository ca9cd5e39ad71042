"""The steps of a program with one optimizer, whose gradients `DistributedDataParallel` averages.

A step in which members are lost is discarded before the optimizer changes anything.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import GradientAccumulation
from adascale_worker.gradients.data_parallel import DataParallelModel
from adascale_worker.gradients.sharded import ShardedModel
from adascale_worker.loop.checks import LoopChecks
from adascale_worker.loop.held_state import ModelBuffers
from adascale_worker.loop.steps import StepParts, StepStrategy
from adascale_worker.membership.links import PeersLostError
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.program.patching import patch_optimizer


class OneOptimizer(StepStrategy):
    """Makes steps with one optimizer."""

    def __init__(
        self,
        optimizer: ElasticAdaScale,
        models: DataParallelModel | ShardedModel,
        accumulation: GradientAccumulation,
        checks: LoopChecks,
        buffers: ModelBuffers,
        model: torch.nn.Module,
        parts: StepParts,
    ) -> None:
        super().__init__(optimizer, models, accumulation, checks, buffers, parts)
        self._adascale = optimizer
        self._accumulation = accumulation
        self._loop_checks = checks
        self._buffers = buffers
        self._model = model

    def patch(self, observe: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace `step` of the optimizer, and `zero_grad` of optimizer and model."""
        patch_optimizer(
            self._adascale.optimizer,
            self._model,
            observe(self.step),
            lambda: self.at_boundary,
            self._zeroed_gradients,
            self._accumulation.zeroed_later,
        )

    def _zeroed_gradients(self) -> None:
        self._accumulation.discard_set_aside()
        self._loop_checks.zeroed_gradients()

    @property
    def has_stepped(self) -> bool:
        """Whether `optimizer.step()` was called for the present batch."""
        return self._loop_checks.has_stepped

    def step(self) -> None:
        """Count a micro-batch, and after the last one of a step update the parameters."""
        self.counter.begin_call()
        if self.failure.is_discarded:
            self.discard()
            return
        self.accumulation.put_back()
        self._checks.check_step(inside_epoch=self._loop.has_batch)
        lacks_pass = self._loop.has_batch and not self.accumulation.passes
        if not self.accumulation.advance():
            return
        if lacks_pass:
            self._agree_without_pass()
        flags = self.counter.agreement.flags()
        self._checks.count_passes(self._planner.step_plan.accumulation)
        try:
            # The exchange must have succeeded before anything is changed. In this order, because other
            # replicas may have exchanged the statistics in backward() already.
            self._adascale.exchange_statistics()
            self._adascale.flags = flags
            self.accumulation.check_exchange()
            self._group.commit()
            self.models.follow_trained()
            self._checkpointing.before_step()
            self._adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.failure.peers_lost(error):
                raise
            self.discard()
            return
        self.counter.made_step = True
        # What this step has changed stays, also if members are lost before the next.
        self.begin_step()
        self._planner.finished_step()
        self.counter.count(flags, self.passes_per_batch)

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the samples of a step whose gradients are not finite. See `StepStrategy`."""
        del optimizer
        self._checks.check_step(inside_epoch=self._loop.has_batch)
        self.accumulation.advance()
        self.counter.count_skipped()

    def begin_step(self) -> None:
        """Let the next forward pass copy the buffers."""
        self._buffers.begin_step()
        self.models.begin_step()

    def _complete_batch(self) -> None:
        """Leave out a step that the program has left out, on all replicas."""
        if self.at_boundary or not self._checks.left_out_step:
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
        self._checks.discarded_step()
