"""Gradient accumulation: the micro-batches of a step, and the backward passes that belong to them.

The program's loop runs once for each micro-batch, and does with the gradients between `backward()` and
`optimizer.step()` what it does for a whole batch: it clips them, for example. So in the last micro-batch of a
step it finds the mean gradient of the step there, and in the others no gradients: `.grad` is None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.step_division import StepDivision, StepPlan
from adascale_worker.gradients.step_failure import StepFailure, forward_without_activations
from adascale_worker.gradients.step_times import StepTimes
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.patching import MethodOverride, is_traced
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.torch_private.modules import call_of, let_clipping_find_no_gradients, override_call


class Accumulation:
    """Counts the micro-batches of a step, and has the gradients of each optimizer."""

    def __init__(
        self,
        parts: Sequence[OptimizerGradients],
        group: ReplicaGroup,
        failure: StepFailure,
        division: StepDivision,
        loop: ProgramLoop,
        trained: TrainedParameters,
        times: StepTimes,
        steps: Callable[[], int],
    ) -> None:
        self.parts = list(parts)
        self.weights = MicroBatchWeights(group)
        self._group = group
        self._failure = failure
        self._division = division
        self._loop = loop
        self._trained = trained
        self._times = times
        self._steps = steps
        self.micro_batch = 0
        """Index of the present micro-batch in its step."""
        self.passes = 0
        """Backward passes for the present micro-batch."""
        self.batch = 0
        """The number of the present batch."""
        self.micro_weight = 1.0
        """By what the loss of the present micro-batch is multiplied."""
        self.plan = BatchPlan(1, 1)
        """Of the present step."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before gradients of the last step change."""
        self._is_inside_pass = False
        self._is_reentrant = False
        """Whether a backward pass has run inside another, so that gradients arrive in parts."""

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has made a step for the present batch."""
        return any(part.has_stepped for part in self.parts)

    # -- micro-batches ------------------------------------------------------------------------------------

    @property
    def at_first_micro_batch(self) -> bool:
        """Whether the present micro-batch is the first of a step."""
        return self.micro_batch == 0

    @property
    def at_last_micro_batch(self) -> bool:
        """Whether the present micro-batch is the last of a step."""
        return self.micro_batch == self.plan.accumulation - 1

    @property
    def kept_micro_batches(self) -> int:
        """The earlier micro-batches of this step that are not left out."""
        return self.micro_batch - self.weights.left_out

    def advance(self) -> bool:
        """Count a micro-batch, and return whether it was the last of its step."""
        passes = self.passes
        self.micro_batch = (self.micro_batch + 1) % self.plan.accumulation
        self.passes, self.micro_weight = 0, 1.0
        self.batch += 1
        self.weights.finish_micro_batch(completes_step=self.at_first_micro_batch)
        if self.plan.accumulation == 1:
            # One optimizer may need the gradients of the first of several passes; one of several optimizers
            # that steps rarely may count batches, not steps.
            is_single = len(self.parts) == 1
            is_divisible = passes <= 1 if is_single else all(part.has_stepped for part in self.parts)
            self._division.observe_step(is_divisible=is_divisible)
        return self.at_first_micro_batch

    def begin_batch(self) -> None:
        """Begin with a batch that the program gets."""
        self.passes, self.micro_weight = 0, 1.0
        self.batch += 1
        self.weights.begin_micro_batch()

    def leave_out_batch(self) -> None:
        """Leave the present micro-batch out of its step, or the step if it is the last of it."""
        is_last = self.at_last_micro_batch
        if is_last != self.at_first_micro_batch:
            # At the first one, the gradients of the step before may be there.
            self.restart_step()
        if not is_last:
            self.weights.left_out += 1  # It counts then, without a pass.
            self.advance()

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on."""
        self.plan = plan
        self.weights.set_plan(plan)
        for part in self.parts:
            part.statistics.change_options(
                world_size=plan.replicas, accumulation=plan.accumulation, scale=float(scale)
            )
            part.statistics.begin_step()
        self.restart_step()

    def use_step(self, step: StepPlan) -> None:
        """Use the micro-batches of the next step, which may be divided. Before its first backward pass."""
        plan = step.plan
        compares_steps = self._division.compares_steps(plan)
        for part in self.parts:
            part.statistics.change_options(
                accumulation=plan.accumulation, interval=step.interval, compares_steps=compares_steps
            )
        if plan.accumulation != self.plan.accumulation:
            self.weights.set_plan(plan)
        self.plan = plan

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self.micro_batch = self.passes = 0
        self.weights.restart_step()
        for part in self.parts:
            try:
                part.discard()
            except RuntimeError as error:
                if not self._group.is_failure(error):
                    raise
                part.discard()

    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""
        for part in self.parts:
            part.begin_generation(self._trained.agreed_of)
        self.weights.begin_generation()

    def prepare(self) -> None:
        """Map the memory of the exchange of gradients."""
        for part in self.parts:
            part.prepare()

    # -- backward passes ----------------------------------------------------------------------------------

    def note_trained(self) -> None:
        """Record which parameters are trained now, the same on all replicas."""
        if not self._loop.trains or self._failure.is_discarded or self._group.has_failed:
            return
        are_new = [part.note_trained() for part in self.parts]
        if are_new == [True]:
            self._trained.agree(self._steps())

    def before_backward(self) -> None:
        """Let the gradients of the next pass come alone."""
        self.before_change()
        self._is_inside_pass = self._loop.trains
        if not self._is_inside_pass:
            return
        self.weights.begin_pass()
        self.note_trained()
        # With several optimizers, only the end of a pass shows which of them it has reached.
        is_early = len(self.parts) == 1 and not (self._is_reentrant or self._failure.is_discarded)
        for part in self.parts:
            part.before_backward(completes_step=self.at_last_micro_batch, is_early=is_early)

    def before_inner_backward(self) -> None:
        """Begin no exchange in a pass, because a backward pass inside it may compute parts of gradients."""
        self._is_reentrant = True
        for part in self.parts:
            part.exchange.stop_early()

    def after_backward(self) -> None:
        """Add the gradients of a pass to the batch's, and average them in the last micro-batch.

        In the last micro-batch this is a collective call, with several optimizers also for a pass without
        gradients on this replica.
        """
        if not self._is_inside_pass:
            return
        self._is_inside_pass = False
        if self._group.has_failed:
            self._failure.discard()
        number, self.passes = self.passes, self.passes + 1
        reached = {part for part in self.parts if part.after_backward(self.batch, number)}
        is_weighted = self.weights.end_pass(has_gradients=bool(reached))
        if reached:
            self.micro_weight = self.weights.of_pass()
        awaited: Collection[OptimizerGradients] = ()
        if self.at_last_micro_batch and not self._failure.is_discarded:
            if len(self.parts) > 1:
                awaits = {part: part in reached or part.awaits_average(number) for part in self.parts}
                awaited, is_weighted = self._agree(awaits), False
            elif reached:
                self._times.end_backward()
                awaited = reached
        for part in self.parts:
            if part in awaited:
                self._average(part, is_weighted=is_weighted)
            elif part in reached:
                part.set_aside()
            else:
                part.restore()

    def complete(self, part: OptimizerGradients) -> None:
        """Average what an optimizer has of earlier micro-batches, or what the program has assigned.

        If no pass of the last micro-batch has reached it. A collective call.
        """
        if part.is_averaged:
            return
        is_awaited = self._group.replicas > 1 or part.has_more
        if len(self.parts) > 1:
            is_awaited = bool(self._agree({part: part.has_more}))
        if is_awaited:
            self.before_change()
            part.prepare_without_pass()
            self._average(part)

    def _agree(self, awaits: Mapping[OptimizerGradients, bool]) -> list[OptimizerGradients]:
        """Return the optimizers whose average a replica awaits. A collective call."""
        with self._times.measured_exchange():
            numbers = self._group.sum([*map(float, awaits.values()), *self.weights.sums()])
        self.weights.agree(numbers[len(awaits) :])
        return [part for part, count in zip(awaits, numbers, strict=False) if count > 0.0]

    def _average(self, part: OptimizerGradients, *, is_weighted: bool = False) -> None:
        """Average the gradients of an optimizer. A collective call."""
        part.begin_average()
        if is_weighted:
            self.weights.exchange()
        if self.weights.left_out:
            part.statistics.leave_out_step()
        with self._times.measured_exchange():
            part.exchange.wait()
        part.finish_average(self.plan.accumulation, self.weights.of_step, self.micro_weight)
        self._group.settle()

    def patch_zero_grad(self, owner: Any, parameters: Iterable[Tensor]) -> None:
        """Let `zero_grad` of a model or an optimizer also record which gradients it deletes."""
        given, original = list(parameters), owner.zero_grad
        deleted = {part: part.positions_of(given) for part in self.parts}

        def zero_grad(*args: Any, **kwargs: Any) -> None:
            if not (args[0] if args else kwargs.get("set_to_none", True)):
                self.before_change()
            original(*args, **kwargs)
            try:
                for part, (positions, is_whole) in deleted.items():
                    part.zeroed(positions, is_whole=is_whole)
            except RuntimeError as error:
                if not self._failure.handles(error):
                    raise

        owner.zero_grad = MethodOverride(original, zero_grad)


def patch_forward(
    model: torch.nn.Module,
    group: ReplicaGroup,
    failure: StepFailure,
    accumulation: Accumulation,
) -> None:
    """Replace the forward of a model while it trains: its first call prepares a step."""
    original = call_of(model)

    def prepare() -> None:
        if not group.has_mesh:
            accumulation.note_trained()

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not model.training or is_traced():
            return original(*args, **kwargs)
        # A model that is sharded over the processes of a replica makes collective calls, which an error ends.
        if group.has_mesh or not (failure.is_discarded or group.has_failed):
            try:
                prepare()
                return original(*args, **kwargs)
            except (RuntimeError, MemoryError, PeersLostError) as error:
                if group.has_mesh or not failure.handles(error):
                    raise
        # The step is discarded before an optimizer uses its gradients.
        failure.discard()
        prepare()
        if failure.lacks_memory:
            # The error is deleted: its traceback has kept the activations.
            size, parameters = accumulation.plan.local_bsz, model.parameters()
            return forward_without_activations(original, args, kwargs, size, parameters)
        return original(*args, **kwargs)

    override_call(model, MethodOverride(original, forward))


# Hooks cannot do this: autograd calls them inside a pass. An error of a node, of the exchange or of an
# allocation leaves the engine after the last hook, and `backward()` raises it in the user's loop. Only what
# calls the engine can catch it, and can leave a pass out. The tensor whose `backward()` the program calls is
# its own loss, so no method of one object is enough. A subclass of Tensor or a `TorchFunctionMode` would see
# that call, but also every other call of a function of torch, each of which it makes slower. A process group
# in Python could handle errors of the communication, but not a lack of memory, and costs time for each bucket
# of gradients.


def guard_backward(failure: StepFailure, gradients: Accumulation) -> Callable[[], None]:
    """Replace `torch.autograd.backward`, which `Tensor.backward` calls, and return what restores it.

    Its errors are handled, and `gradients` learns of each pass, but not of those of re-entrant checkpoints
    inside it as others. Clipping finds no gradients meanwhile without an error.
    """
    original = torch.autograd.backward
    is_inside = False

    @contextmanager
    def handled() -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError, PeersLostError) as error:
            if not failure.handles(error):
                raise

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> None:
        nonlocal is_inside
        if failure.lacks_memory:
            return
        if is_inside:
            gradients.before_inner_backward()
            with handled():
                original(*args, **kwargs)
            return
        with handled():
            gradients.before_backward()
        is_inside = True
        try:
            with handled():
                original(*args, **kwargs)
        finally:
            is_inside = False
        with handled():
            gradients.after_backward()

    def restore() -> None:
        # Unless it was replaced again since.
        if torch.autograd.backward is backward:
            torch.autograd.backward = original
            undo()

    torch.autograd.backward = backward
    undo = let_clipping_find_no_gradients()
    return restore
