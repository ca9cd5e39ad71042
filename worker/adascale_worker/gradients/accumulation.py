"""Gradient accumulation: the micro-batches of a step, and the backward passes that belong to them.

The program's loop runs once for each micro-batch, and does with the gradients between `backward()` and
`optimizer.step()` what it does for a whole batch: it clips them, for example. So in the last micro-batch of a
step it finds the mean gradient of the step there, and in the others no gradients: `.grad` is None.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from adascale_core.batch.plans import BatchPlan
from adascale_worker.errors import WorkerError
from adascale_worker.gradients.data_parallel import DataParallelModel
from adascale_worker.gradients.exchange import ExchangeCheck
from adascale_worker.gradients.micro_batch_weights import MicroBatchWeights
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.step_division import StepDivision, StepPlan
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.program.optimizers import ElasticAdaScale
from adascale_worker.torch_private.optim import let_clipping_find_no_gradients


class Accumulation(ABC):
    """Counts the micro-batches of a step, and keeps the gradients of those before the last."""

    def __init__(self, weights: MicroBatchWeights) -> None:
        self.weights = weights
        self.micro_batch = 0
        """Index of the present micro-batch in its step."""
        self.passes = 0
        """Backward passes for the present micro-batch."""
        self._accumulation = 1

    @property
    def at_first_micro_batch(self) -> bool:
        """Whether the present micro-batch is the first of a step."""
        return self.micro_batch == 0

    @property
    def at_last_micro_batch(self) -> bool:
        """Whether the present micro-batch is the last of a step."""
        return self.micro_batch == self._accumulation - 1

    @property
    def is_later_and_last(self) -> bool:
        """Whether the present micro-batch is the last of a step, and others came before."""
        return self.at_last_micro_batch and not self.at_first_micro_batch

    def advance(self) -> bool:
        """Count a micro-batch, and return whether it was the last of its step."""
        self.micro_batch = (self.micro_batch + 1) % self._accumulation
        self.passes = 0
        self.weights.finish_micro_batch(completes_step=self.at_first_micro_batch)
        return self.at_first_micro_batch

    def begin_batch(self) -> None:
        """Begin with a batch that the program gets."""
        self.passes = 0
        self.weights.begin_micro_batch()

    def leave_out_batch(self) -> None:
        """Leave the present micro-batch out of its step, or the step if it is the last of it."""
        is_last = self.at_last_micro_batch
        if is_last != self.at_first_micro_batch:
            # At the first one, the gradients of the step before may be there.
            self.restart_step()
        if not is_last:
            self.weights.leave_out()
            self.advance()

    @property
    def kept_micro_batches(self) -> int:
        """The earlier micro-batches of this step that are not left out."""
        return self.micro_batch - self.weights.left_out

    @abstractmethod
    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on."""

    @abstractmethod
    def use_step(self, step: StepPlan) -> None:
        """Use the micro-batches of the next step, which may be divided. Before its first backward pass."""

    @abstractmethod
    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""

    @abstractmethod
    def before_backward(self) -> None:
        """Prepare for the gradients of the next backward pass."""

    @abstractmethod
    def after_backward(self) -> None:
        """Add the gradients of a backward pass to the gradients of its step."""

    @abstractmethod
    def put_back(self) -> None:
        """Put the gradients back that are set aside, for the optimizer's step."""

    @abstractmethod
    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""

    @abstractmethod
    def check_exchange(self) -> None:
        """Check that the gradients of a complete step are the means over the replicas. A collective call."""


class GradientAccumulation(Accumulation):
    """Counts the micro-batches of a step; the replicas exchange gradients only in the last micro-batch."""

    def __init__(
        self,
        optimizer: ElasticAdaScale,
        model: DataParallelModel | ModelSet,
        program_model: torch.nn.Module,
        group: ReplicaGroup,
        failure: StepFailure,
        division: StepDivision,
    ) -> None:
        super().__init__(MicroBatchWeights(group, optimizer.weigh_pass))
        self._optimizer = optimizer
        self._model = model
        self._failure = failure
        self._division = division
        optimized = (parameter for group in optimizer.param_groups for parameter in group["params"])
        both = [*program_model.parameters(), *optimized]
        self._parameters = list({id(parameter): parameter for parameter in both}.values())
        self._exchange = ExchangeCheck(program_model, group)
        self._set_aside: list[tuple[Tensor, Tensor]] = []
        self._has_pass = self._has_lost_pass = False
        """Whether there was a backward pass for the present micro-batch, and the program has deleted it."""

    @property
    def has_set_aside(self) -> bool:
        """Whether gradients of this step are set aside, so that `.grad` is None."""
        return bool(self._set_aside)

    def set_plan(self, plan: BatchPlan, scale: float) -> None:
        """Use the accumulation of `plan` from the next step on."""
        self._accumulation = plan.accumulation
        self.weights.set_plan(plan)
        self._optimizer.set_num_gradients_to_accumulate(plan.accumulation)
        self._optimizer.update_scale(scale, plan.replicas)
        self.restart_step()

    def use_step(self, step: StepPlan) -> None:
        """Use the micro-batches of the next step. See `Accumulation`."""
        plan = step.plan
        self._optimizer.use_step(
            micro_batches=plan.accumulation,
            interval=step.interval,
            compares_steps=self._division.compares_steps(plan),
        )
        if plan.accumulation != self._accumulation:
            self._accumulation = plan.accumulation
            self.weights.set_plan(plan)
            self.set_gradient_sync()

    def restart_step(self) -> None:
        """Begin with the first micro-batch of a step; discard the gradients of an unfinished step."""
        self.micro_batch = self.passes = 0
        self._has_pass = self._has_lost_pass = False
        self.set_gradient_sync()
        self.weights.restart_step()
        self.discard_set_aside()
        self._exchange.discard()
        self._optimizer.zero_grad()

    def before_backward(self) -> None:
        """Let the next backward pass add its gradients to the gradients of earlier micro-batches."""
        self.require_passes()
        self._optimizer.sum_gradients_again()
        self.put_back()
        self.weights.begin_pass()
        if self.at_last_micro_batch and not self._failure.is_discarded:
            self._exchange.begin_pass()

    def require_passes(self) -> None:
        """Check that the gradients of the passes of this micro-batch are there."""
        if self._has_lost_pass:
            raise WorkerError(
                "zero_grad() was called between two backward passes for a batch, but the gradients of the "
                "first are added to those of earlier micro-batches of the step already: compute them with "
                "torch.autograd.grad, or let a step have one micro-batch (local_bsz_bounds with a larger "
                "upper bound, or a max_batch_size up to which the replicas need no accumulation; and "
                'single_replica_gain="consecutive", with which no step of one replica is divided)'
            )

    def after_backward(self) -> None:
        """Let the program see the mean gradient of the step in its last micro-batch, else none."""
        self.passes += 1
        self._model.end_backward()
        self._exchange.end_pass()
        is_weighted = self.weights.end_pass()
        self.weights.check_pass()
        if self.at_last_micro_batch and not self._failure.is_discarded:
            self.weigh_step(is_weighted=is_weighted)
        if self._accumulation == 1 and self.weights.of_step is None:
            return
        self._has_pass = True
        if self.at_last_micro_batch:
            self._optimizer.scale_grad_by_num_grads_to_accum()
        else:
            self._set_gradients_aside()

    def weigh_step(self, *, is_weighted: bool) -> None:
        """Use the weights of a step after a pass of its last micro-batch. A collective call with weights."""
        if is_weighted:
            self.weights.exchange()
        if self.weights.of_step is not None:
            self._optimizer.weigh_step(self.weights.of_step)
        if self.weights.left_out:
            self._optimizer.leave_out_step()

    def put_back(self) -> None:
        """Put back the gradients that were set aside, and add what the program has assigned since."""
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._set_aside.clear()

    def begin_generation(self) -> None:
        """Begin with other replicas. A collective call."""
        self._exchange.begin_generation()
        self.weights.begin_generation()

    def check_exchange(self) -> None:
        """Check that the gradients of a complete step are the means over the replicas.

        A collective call in the first steps of a generation.
        """
        self.weights.exchange_later()
        self._exchange.compare()

    def zeroed_later(self) -> None:
        """Record that the program calls `zero_grad` in a micro-batch that is not the first of its step."""
        self._has_lost_pass = self._has_pass

    def discard_set_aside(self) -> None:
        """Discard the gradients that were set aside, because the program deletes this step's gradients."""
        self._set_aside.clear()
        self.weights.begin_micro_batch()

    def advance(self) -> bool:
        """Count a micro-batch, and return whether it was the last of its step."""
        passes = self.passes
        is_complete = super().advance()
        if is_complete:
            self.weights.check_complete_step()
            if self._accumulation == 1:
                # A second pass may come after zero_grad(), which is an error between two micro-batches.
                self._division.observe_step(is_divisible=passes <= 1)
        self._has_pass = self._has_lost_pass = False
        self.set_gradient_sync()
        if not is_complete:
            self._set_gradients_aside()
        return is_complete

    def _set_gradients_aside(self) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._set_aside.append((parameter, parameter.grad))
                parameter.grad = None

    def set_gradient_sync(self) -> None:
        """Let DDP exchange gradients in the last micro-batch only."""
        ddp = self._model.ddp
        if ddp is not None:
            ddp.require_backward_grad_sync = self.at_last_micro_batch


class BackwardGuard:
    """Replaces `torch.autograd.backward`, which `Tensor.backward` calls, to handle its errors.

    It also calls `Accumulation` before and after a pass, except for the passes of re-entrant checkpoints
    inside it.
    """

    # Hooks cannot do this: autograd calls them inside a pass. An error of a node, of DDP's communication or
    # of an allocation leaves the engine after the last hook, and `backward()` raises it in the user's loop.
    # Only what calls the engine can catch it, and can leave a pass out. The tensor whose `backward()` the
    # program calls is its own loss, so no method of one object is enough. A subclass of Tensor or a
    # `TorchFunctionMode` would see that call, but also every other call of a function of torch, each of which
    # it makes slower. A communication hook or a process group in Python could handle errors of the
    # communication, but not a lack of memory, and costs time for each bucket of gradients.

    def __init__(self, failure: StepFailure, gradients: Accumulation) -> None:
        self._failure = failure
        self._gradients = gradients
        self._is_inside = False
        self._original: Callable[..., None] | None = None
        self._replacement: Callable[..., None] | None = None
        self._undo: Callable[[], None] | None = None

    def install(self) -> None:
        """Replace `torch.autograd.backward`, and let clipping find no gradients."""
        if self._original is None:
            self._original = torch.autograd.backward

            @functools.wraps(self._original)
            def backward(*args: Any, **kwargs: Any) -> None:
                self._backward(*args, **kwargs)

            torch.autograd.backward = self._replacement = backward
            self._undo = let_clipping_find_no_gradients()

    def uninstall(self) -> None:
        """Restore `torch.autograd.backward`, unless it was replaced again since."""
        if self._undo is not None and torch.autograd.backward is self._replacement:
            assert self._original is not None
            torch.autograd.backward, self._original = self._original, None
            self._undo()

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        if self._failure.lacks_memory:
            return
        if self._is_inside:
            self._run(*args, **kwargs)
            return
        self._gradients.before_backward()
        self._is_inside = True
        try:
            self._run(*args, **kwargs)
        finally:
            self._is_inside = False
        with self._handled():
            self._gradients.after_backward()

    def _run(self, *args: Any, **kwargs: Any) -> None:
        assert self._original is not None
        with self._handled():
            self._original(*args, **kwargs)

    @contextmanager
    def _handled(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError, PeersLostError) as error:
            if not self._failure.handles(error):
                raise
