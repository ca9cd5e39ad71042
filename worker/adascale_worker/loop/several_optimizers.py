"""The steps of a program with several optimizers, such as a GAN.

What the program does for one batch is one step: each optimizer makes at most one step of its own in it, the
first one exactly one. The optimizers change their parameters at once, as in a plain loop, so that the loss of
the second sees what the first has changed. If the step fails after that, because members are lost or a batch
does not fit, the state from the beginning of the step is put back, and the same samples are delivered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.accumulation import Accumulation
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.step_division import StepDivision, StepPlan
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.loop.agreement import FinishRequest
from adascale_worker.loop.checks import BatchChecks
from adascale_worker.loop.held_state import StepUndo
from adascale_worker.loop.program_loop import ProgramLoop
from adascale_worker.loop.steps import StepParts, StepStrategy
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizers import OptimizerSet
from adascale_worker.program.parts import ProgramParts
from adascale_worker.program.patching import MethodOverride, patch_step
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.state.state import State


class SeveralAccumulations(Accumulation):
    """Counts the micro-batches of a step, and has the gradients of each optimizer."""

    def __init__(
        self,
        optimizers: OptimizerSet,
        models: ModelSet,
        group: ReplicaGroup,
        failure: StepFailure,
        loop: ProgramLoop,
        division: StepDivision,
    ) -> None:
        super().__init__(MicroBatchWeights(group))
        self._division = division
        self._models = models
        self._group = group
        self._failure = failure
        self._loop = loop
        self.parts = [
            OptimizerGradients(name, adascale, group, models.average)
            for name, adascale in optimizers.parts.items()
        ]
        self.batch = 0
        """The number of the present batch."""
        self._is_inside_pass = False

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on."""
        self._accumulation = plan.accumulation
        self.weights.set_plan(plan)
        for part in self.parts:
            part.adascale.set_num_gradients_to_accumulate(plan.accumulation)
            part.adascale.update_scale(scale, plan.replicas)
        self.restart_step()

    def use_step(self, step: StepPlan) -> None:
        """Use the micro-batches of the next step. See `Accumulation`."""
        plan = step.plan
        compares_steps = self._division.compares_steps(plan)
        for part in self.parts:
            part.adascale.use_step(
                micro_batches=plan.accumulation, interval=step.interval, compares_steps=compares_steps
            )
        if plan.accumulation != self._accumulation:
            self._accumulation = plan.accumulation
            self.weights.set_plan(plan)

    def advance(self) -> bool:
        """Count a micro-batch, and return whether it was the last of its step."""
        is_complete = super().advance()
        if is_complete and self._accumulation == 1:
            # An optimizer that steps rarely may count batches, not steps.
            self._division.observe_step(is_divisible=all(part.has_stepped for part in self.parts))
        return is_complete

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self.micro_batch = 0
        self.weights.restart_step()
        for part in self.parts:
            try:
                part.discard()
            except RuntimeError as error:
                if not self._group.is_failure(error):
                    raise
                part.discard()

    def put_back(self) -> None:
        """Do nothing: no gradients are set aside."""

    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""
        self.weights.begin_generation()

    def check_exchange(self) -> None:
        """Do nothing: the gradients are taken out of `.grad` before they are averaged."""

    def begin_batch(self) -> None:
        """Count a batch that the program gets."""
        super().begin_batch()
        self.batch += 1

    # -- backward passes ----------------------------------------------------------------------------------

    def before_backward(self) -> None:
        """Let the gradients of the next pass come alone."""
        self._is_inside_pass = self._loop.trains
        if not self._is_inside_pass:
            return
        self.weights.begin_pass()
        try:
            for part in self.parts:
                part.before_backward(completes_step=self.at_last_micro_batch)
        except RuntimeError as error:
            if not self._failure.handles(error):
                raise

    def after_backward(self) -> None:
        """Add the gradients of a pass to the batch's, and average them in the last micro-batch.

        In the last micro-batch this is a collective call, also for a pass without gradients on this replica.
        """
        if not self._is_inside_pass:
            return
        self._is_inside_pass = False
        if self._group.has_failed:
            self._failure.discard()
        number, self.passes = self.passes, self.passes + 1
        try:
            for part in self.parts:
                if part.after_backward(self.batch, number):
                    self.weights.gradient_arrived()
            self.weights.end_pass()
            if self.at_last_micro_batch and not self._failure.is_discarded:
                self._average({part: part.awaits_average(number) for part in self.parts})
            else:
                for part in self.parts:
                    part.hide()
        except (RuntimeError, MemoryError, PeersLostError) as error:
            if not self._failure.handles(error):
                raise

    def complete(self, part: OptimizerGradients) -> None:
        """Average what an optimizer has of earlier micro-batches, if no pass of the last one has reached it.

        A collective call.
        """
        if not self.at_first_micro_batch and not part.is_averaged:
            self._average({part: part.lacks_earlier})

    def _average(self, awaits: Mapping[OptimizerGradients, bool]) -> None:
        """Average the gradients of each optimizer for which a replica awaits it. A collective call."""
        numbers = self._models.sum([*map(float, awaits.values()), *self.weights.sums()])
        self.weights.agree(numbers[len(awaits) :])
        for part, count in zip(awaits, numbers, strict=False):
            if count > 0.0:
                if self.weights.left_out:
                    part.adascale.leave_out_step()
                part.average(self._accumulation, self.weights.of_step, self.weights.factor)

    def zeroed(self, parameters: Sequence[Tensor]) -> None:
        """Record that the program has deleted the gradients of `parameters`."""
        try:
            for part in self.parts:
                part.zeroed(parameters)
        except RuntimeError as error:
            if not self._failure.handles(error):
                raise


class SeveralOptimizers(StepStrategy):
    """Makes steps with several optimizers. A step is counted when the first of them makes its own."""

    def __init__(
        self,
        optimizer: OptimizerSet,
        models: ModelSet,
        accumulation: SeveralAccumulations,
        checks: BatchChecks,
        undo: StepUndo,
        program: ProgramParts,
        trained: TrainedParameters,
        finish_request: FinishRequest,
        state: State,
        parts: StepParts,
    ) -> None:
        super().__init__(optimizer, models, accumulation, checks, undo, parts)
        self._lead = optimizer.lead
        self._accumulation = accumulation
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
            owner.zero_grad = _ZeroGrad(owner.zero_grad, list(parameters), self._accumulation)
        for part, optimizer in zip(self._accumulation.parts, optimizers, strict=True):
            patch_step(optimizer, partial(observe(self.step_of), part))

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has made a step for the present batch."""
        return any(part.has_stepped for part in self._accumulation.parts)

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
            self._checks.check_step(inside_epoch=True)
        if not self.accumulation.at_last_micro_batch:
            part.finish_micro_batch(self.accumulation.weights.factor)
            return
        if lacks_pass:
            self._agree_without_pass()
        flags = self.counter.agreement.flags()
        if leads:
            self._lead.flags = flags
        try:
            self._accumulation.complete(part)
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
            self.counter.count(flags, self.passes_per_batch)
        if self._finished_in == self._accumulation.batch:
            self._save_end_again()

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer whose gradients are not finite. See `StepStrategy`."""
        for part in self._accumulation.parts:
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
        self._group.copy_from_rank_0(list(self._passed.model.buffers()))
        self._step_undo.record()

    def begin_batch(self) -> None:
        """Prepare for a batch, which the program gets next."""
        super().begin_batch()
        self.models.begin_step()

    def end_batch(self) -> None:
        """Complete the step if this was its last micro-batch. See `StepStrategy`."""
        super().end_batch()
        for part in self._accumulation.parts:
            part.has_stepped = False

    def _complete_batch(self) -> None:
        parts, accumulation = self._accumulation.parts, self.accumulation
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
        self._finished_in = self._accumulation.batch if self._is_open else None

    def end_epoch(self) -> None:
        """Keep the last step: one without its last micro-batch has changed no weights."""
        self._step_undo.forget()

    def _save_end_again(self) -> None:
        """Replace what `finish` has saved between the steps of two optimizers."""
        if self._group.replicas > 1:
            self._finish_request.save()
        else:
            self._state.save(final=True)


class _ZeroGrad(MethodOverride):
    """Zeroes gradients, and lets the trainer know which."""

    def __init__(
        self, original: Callable[..., Any], parameters: list[Tensor], gradients: SeveralAccumulations
    ) -> None:
        super().__init__(original)
        self._parameters = parameters
        self._gradients = gradients

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.original(*args, **kwargs)
        self._gradients.zeroed(self._parameters)
