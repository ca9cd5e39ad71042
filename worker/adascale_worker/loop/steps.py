"""The steps of a program: how they are counted, and what each way of making them has to provide."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import NonFiniteWeightsError, WorkerError
from adascale_worker.gradients.loss_scaling import UnregisteredScaler
from adascale_worker.gradients.step_division import StepPlan
from adascale_worker.loop.agreement import StepAgreement
from adascale_worker.loop.context import Context
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.user_code import OneTimeWarnings, calling_line
from adascale_worker.program.program_loop import ProgramPlace

SLOW_STEP = 0.05
"""Seconds per step from which on the replicas exchange requests on every step."""

MAX_SKIPPED_STEPS = 100
"""Steps in a row whose gradients are not finite, after which training fails."""


MAX_BATCHES_WITHOUT_STEP = 1000
"""Batches without an optimizer step after which a warning is issued, because the epoch cannot end."""


class BatchChecks:
    """Finds a loop that makes no steps."""

    def __init__(self, group: ReplicaGroup) -> None:
        self._group = group
        self._batches = 0
        self._warnings = OneTimeWarnings()

    def stepped(self) -> None:
        """Record that a step was made or discarded, or a loop over batches begins."""
        self._batches = 0

    def delivered_batch(self) -> None:
        """Record that the program gets the next batch of `trainer.dataloader`."""
        self._batches += 1
        if self._batches == MAX_BATCHES_WITHOUT_STEP:
            found = (
                f"trainer.dataloader() has delivered {MAX_BATCHES_WITHOUT_STEP} batches since the last "
                "optimizer.step(): an epoch ends after its steps, so without steps it does not end. Call "
                "step() of the optimizer that was passed to program_reentry once per batch"
            )
            if self._group.replicas > 1:
                raise WorkerError(f"{found}, on all {self._group.replicas} replicas")
            self._warnings.warn("no step", found)


@dataclass(eq=False, kw_only=True)
class StepCounter(Context):
    """Counts steps, checks the weights, and lets the replicas agree on what to do after a step."""

    agreement: StepAgreement
    scaler: UnregisteredScaler
    made_step: bool = field(default=False, init=False)  # whether the last `optimizer.step()` changed weights
    calls: int = field(default=0, init=False)
    _skipped_steps: int = field(default=0, init=False)
    _stepped_at: float = field(default=float("-inf"), init=False)

    @property
    def has_stepped(self) -> bool:
        """Whether this process has made a step."""
        return self._stepped_at > float("-inf")

    def begin_call(self) -> None:
        """Check and record a call of `optimizer.step()`."""
        self.calls += 1
        self.made_step = False
        self.loop.is_evaluating = False
        self.shutdown_request.reinstall()
        self.scaler.check()
        self.planner.require_acknowledged()

    def count(self, flags: tuple[float, ...]) -> None:
        """Count a step, in which this replica has requested `flags`, and agree on what to do after it."""
        self._skipped_steps = 0
        planner, compute = self.planner, self.times.compute
        is_divided = planner.step_plan != planner.plan
        compute.finish_step(
            (self.group.generation, planner.plan),
            counts=self.telemetry.step_timer.is_running and not is_divided,
        )
        self.progress.advance(self.optimizer.gain(), planner.plan.global_bsz, planner.bounds.batch_size)
        self.telemetry.step(
            self.planner.plan,
            self.progress,
            self.optimizer,
            is_divided=is_divided,
        )
        if self.membership is not None:
            self.membership.report_step()
        try:
            self.agreement.exchange(flags)
            self.telemetry.compare(self.agreement.slow, self.progress.step)
            compute.begin_step()
            now = time.monotonic()
            self.agreement.steps_are_slow = now - self._stepped_at >= SLOW_STEP
            self._stepped_at = now
            self._check_weights()
        except PeersLostError:
            # The step is made. What follows it waits for the next generation.
            return

    def count_skipped(self) -> None:
        """Count a step that a GradScaler has skipped."""
        self.telemetry.step_timer.pause()
        self.made_step = False
        self._skipped_steps += 1
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise NonFiniteWeightsError(
                f"the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite, and the GradScaler "
                f"skipped them, after step {self.progress.step}: look for a division by zero or the "
                "logarithm of a number that is not positive in the loss, and try a smaller learning rate"
            )

    def _check_weights(self) -> None:
        step, agreed = self.progress.step, self.agreement.agreed
        self.weights.check_step(step, gradients_are_finite=self.optimizer.gradients_are_finite)
        if agreed.compare_weights:
            agreed.compare_weights = False
            self.comparison.compare(step)
            self.agreement.withdraw()


@dataclass(eq=False, kw_only=True)
class StepStrategy(Context, ABC):
    """How the replicas make a step together: with one optimizer, or with several.

    `begin_step` and `use_step` are called for each step; `begin_batch` and `end_batch` around what the
    program does for each batch. `discard` puts a failed step back. `leave` ends a loop, `end_epoch` an epoch.
    """

    counter: StepCounter
    _checks: BatchChecks = field(init=False)
    _is_open: bool = field(default=False, init=False)
    """Whether the program works on a batch, or what it did for the last batch is not completed yet."""

    def __post_init__(self) -> None:
        self._checks = BatchChecks(self.group)

    # -- the program --------------------------------------------------------------------------------------

    @abstractmethod
    def patch(self, observe: Callable[[Callable[..., None]], Callable[..., None]]) -> None:
        """Replace methods of the program's optimizers and models; `observe` puts checks around `step`."""

    @abstractmethod
    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer whose gradients are not finite, without making it."""

    @property
    def awaits_micro_batches(self) -> bool:
        """Whether the present micro-batch does not complete a step, or its step will be discarded."""
        return self.failure.is_discarded or not self.accumulation.at_last_micro_batch

    @property
    def made_step(self) -> bool:
        """Whether the last `optimizer.step()` has changed the weights."""
        return self.counter.made_step

    @property
    def step_calls(self) -> int:
        """Calls of `optimizer.step()` so far."""
        return self.counter.calls

    # -- a step -------------------------------------------------------------------------------------------

    @property
    def at_boundary(self) -> bool:
        """Whether the next batch is the first of a step."""
        return self.accumulation.at_first_micro_batch

    @abstractmethod
    def begin_step(self) -> None:
        """Prepare for the next step, and for putting the state back if it fails. A collective call."""

    def _copy_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Use the buffers of rank 0, such as BatchNorm's statistics, on all replicas."""
        tensors = list(buffers)
        if tensors and self.group.replicas > 1 and not self.group.has_mesh:
            self.times.compute.suspend()
            self.group.copy_from_rank_0(tensors)
            self.times.compute.resume()

    def use_step(self, step: StepPlan) -> None:
        """Use the micro-batches of the next step, which may be divided."""
        self.planner.step_plan = step.plan
        self.accumulation.use_step(step)

    def begin_batch(self) -> None:
        """Prepare for a batch, which the program gets next."""
        self._is_open = True
        self.accumulation.begin_batch()
        self._checks.delivered_batch()

    def end_batch(self) -> None:
        """Complete what the program has done for its last batch."""
        if not self._is_open:
            return
        self._is_open = False
        if self.failure.is_discarded:
            return
        requests_next = self.loop.place is ProgramPlace.BETWEEN
        if requests_next and not self.accumulation.passes and not self.accumulation.has_stepped:
            self._agree_without_pass()
            self.accumulation.leave_out_batch()
        else:
            self._complete_batch()

    def _agree_without_pass(self) -> None:
        """Wait until the other replicas have made no backward pass for the present batch either."""
        self.departures.leave_out(self.progress.step, calling_line())

    @abstractmethod
    def _complete_batch(self) -> None:
        """Complete what the program has done for a batch, except to leave it out."""

    def begin_loop(self) -> None:
        """Begin with the first batch of a step, in another loop of the program."""
        self.accumulation.restart_step()
        self._checks.stepped()

    def discard(self) -> None:
        """Put back what an unfinished step has changed, so that its samples are delivered again."""
        self.accumulation.restart_step()
        self.undo.restore()
        self._checks.stepped()
        self.progress.in_step = 0

    # Where a failed step has changed nothing, and a step has no later part, these three do nothing.

    def leave(self) -> None:
        """Complete or put back the last step of a loop. The program requests no other batch."""

    def mark_finish(self) -> None:
        """Record that the program has called `finish`, perhaps between the steps of two optimizers."""

    def end_epoch(self) -> None:
        """Keep the last step of an epoch."""

    # -- a generation -------------------------------------------------------------------------------------

    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""
        self.accumulation.begin_generation()

    def use_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use a batch plan, whose scale is S, from the next step on."""
        self.accumulation.set_plan(plan, scale)
        self.times.begin_timing()
