"""The steps of a program: how they are made with one optimizer or several, counted, and agreed on.

A step in which members are lost is discarded, and its samples are delivered again. With one optimizer, that
happens before the optimizer changes anything. With several, what the program does for one batch is one step:
each optimizer makes at most one step of its own in it, the first one exactly one, and `StepUndo` puts back
what they have changed.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor

from adascale_core.messages.channel import Stepped, Terminated
from adascale_core.performance.slow_replica import SlowReplica, slow_replica
from adascale_worker.errors import NonFiniteWeightsError, WorkerError
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.step_failure import mapped
from adascale_worker.loop.agreement import REQUESTS, Requests
from adascale_worker.loop.context import Context
from adascale_worker.loop.loss_scaling import CHECKED_CALLS, require_registered_scaler
from adascale_worker.membership.links import PeersLostError
from adascale_worker.process.user_code import calling_line
from adascale_worker.program.patching import patch_step
from adascale_worker.program.program_loop import ProgramPlace
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.state.program import ProgramState, load_model
from adascale_worker.state.tree import Tree
from adascale_worker.torch_private.modules import Buffer, buffers_of

FINISH = "finish"
"""The event that a replica announces when it has called `finish`."""
FINISH_TIMEOUT = 30.0
"""Seconds that a replica which has called `finish` and ends waits for the others to call it."""
AGREEMENT_INTERVAL = 0.05
"""Seconds after which replicas exchange requests again, or after the next step if it takes longer."""
MAX_UNAGREED_STEPS = 16
"""Steps after which they exchange requests at least once."""
MAX_SKIPPED_STEPS = 100
"""Steps in a row whose gradients are not finite, after which training fails."""


class StepUndo:
    """Puts back what an unfinished step has changed.

    With one optimizer these are buffers of the model, such as BatchNorm's statistics. With several, the state
    of training is copied before each step, on the devices of its tensors, so it needs twice its memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        progress: TrainingProgress,
        program: ProgramState | None,  # of several optimizers
    ) -> None:
        self._model = model
        self._progress = progress
        self._program = program
        self.state: Tree | None = None
        """The copy of the state of several optimizers; None between two steps."""
        self._buffers: list[tuple[torch.nn.Module, str, Tensor, Tensor]] = []
        """Module, name, buffer and copy; empty between two steps."""

    def begin_step(self, buffers: Iterable[Buffer]) -> None:
        """Copy what the step may change. `buffers` are those of the model."""
        self.forget()  # That of a batch that was left out needs its memory no longer.
        program = self._program
        if program is not None:
            state = {
                "program": program.state_dict(),
                "progress": self._progress.state_dict(),
                "trained": program.trained.state_dict(),
            }
            self.state = mapped(state, _copied)
            return
        # A forward pass may assign another tensor to the name of a buffer. The version of a buffer does not
        # count what `.data` changes.
        self._buffers = [(module, name, buffer, buffer.detach().clone()) for module, name, buffer in buffers]

    def forget(self) -> None:
        """Keep the changes, because the step is complete."""
        self.state, self._buffers = None, []

    def revert_progress(self) -> None:
        """Put the progress back, which the program can read; `restore` puts the rest back later."""
        if self.state is not None:
            self._progress.load_state_dict(self.state["progress"])

    def restore(self) -> None:
        """Put back what was copied."""
        with torch.no_grad():
            for module, name, buffer, copied in self._buffers:
                buffer.copy_(copied)
                setattr(module, name, buffer)
        if self.state is not None and self._program is not None:
            load_model(self._model, self.state["program"]["model"])
            self._program.load_state_dict(self.state["program"])
            self.revert_progress()
            self._program.trained.undo(self.state["trained"])
        # Only now, so that it can be put back again after an error, such as a lack of memory.
        self.forget()


def _copied(value: Any) -> Any:
    """Return a copy of what may be changed in place."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    is_changed_in_place = isinstance(value, numpy.ndarray | set | bytearray) or hasattr(value, "maxlen")
    return copy.copy(value) if is_changed_in_place else value


class Steps(Context):
    """Makes the steps of the replicas together, counts them, and lets the replicas agree on what follows.

    With several optimizers, a step is counted when the first makes its own, and ends with the batch.
    """

    step_calls = 0  # calls of `optimizer.step()` so far
    slow: SlowReplica | None = None  # None if no replica is slower than the others
    finish_reason: str | None = None
    """The argument of `finish`, after the next step for which the replicas agree; None without a request."""
    _finish_line = ""
    _agrees_at = 0
    """The step after which the replicas exchange requests next."""
    _exchanged = 0, float("-inf")
    """The step after which they have exchanged requests, and when."""
    _has_changed = False  # whether the last call has changed the weights
    _skipped_steps = 0
    _finished_in: int | None = None
    """The number of the batch for which the program has called `finish`."""
    has_stepped = False  # whether this process has made a step
    _is_open = False
    """Whether the program works on a batch, or what it did for the last batch is not completed yet."""

    def __init__(self, known: Context) -> None:
        super().__init__(known)
        self.agreed = Requests()
        """What all replicas have agreed on."""

    @property
    def awaits_micro_batches(self) -> bool:
        """Whether the present micro-batch does not complete a step, or its step will be discarded."""
        return self.failure.is_discarded or not self.accumulation.at_last_micro_batch

    @property
    def made_step(self) -> bool:
        """Whether the last `optimizer.step()` has changed the weights.

        With several optimizers, its step may be discarded since.
        """
        return self._has_changed and not (self.parts.are_several and self.failure.is_discarded)

    # -- the program --------------------------------------------------------------------------------------

    def patch(self) -> None:
        """Replace `step` and `zero_grad` of the optimizers, and `zero_grad` of the models."""
        optimizers = self.parts.optimizers.values()
        owners: list[tuple[Any, Iterable[Tensor]]] = [
            *((each, [p for group in each.param_groups for p in group["params"]]) for each in optimizers),
            *((model, model.parameters()) for model in self.parts.models),
        ]
        for owner, parameters in owners:
            self.accumulation.patch_zero_grad(owner, parameters)
        for part, optimizer in zip(self.accumulation.parts, optimizers, strict=True):
            patch_step(optimizer, partial(self.step_of, part))

    def step_of(self, part: OptimizerGradients) -> None:
        """Count a micro-batch of an optimizer, and in the last one of a step update its parameters."""
        with self.program.rates.optimizer_step():
            self._step_of(part)

    def _step_of(self, part: OptimizerGradients) -> None:
        self.step_calls += 1
        self._has_changed = False
        self.loop.is_evaluating = False
        self.shutdown_request.reinstall()
        if self.step_calls <= CHECKED_CALLS:
            require_registered_scaler(self.program.registered.values())
        if self.failure.is_discarded:
            self._discard_in_step()
            return
        accumulation, are_several = self.accumulation, self.parts.are_several
        lacks_pass = not accumulation.passes and not accumulation.has_stepped
        part.check_step(accumulation.kept_micro_batches, is_inside=self.loop.has_batch)
        if not accumulation.at_last_micro_batch:
            part.finish_micro_batch(accumulation.micro_weight)
            self._end_micro_batch()
            return
        if not are_several:
            accumulation.weights.check_step()
        if lacks_pass:
            self._agree_without_pass()
        try:
            accumulation.complete(part)
            self._end_micro_batch()
            part.check_gradients(is_restored=self.state.was_restored)
            # The exchange must have succeeded before anything is changed. In this order, because other
            # replicas may have exchanged the statistics in backward() already.
            part.statistics.exchange()
            self._follow_trained(part)
            self.checkpointing.before_step()
            part.adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.failure.peers_lost(error):
                raise
            self._discard_in_step()
            return
        part.finish_step()
        self._has_changed = True
        if self._leads(part):
            if not are_several:
                # What this step has changed stays, also if members are lost before the next.
                self.undo.forget()
                self.planner.finished_step()
            self._count()
        if are_several and self._finished_in == accumulation.batch:
            # `finish` has saved the state between the steps of two optimizers.
            if self.group.replicas > 1:
                self.save_finish()
            else:
                self.state.save(final=True)

    def skip_step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the step of an optimizer whose gradients are not finite, without making it."""
        for part in self.accumulation.parts:
            if part.adascale.optimizer is optimizer:
                part.check_step(self.accumulation.kept_micro_batches, is_inside=self.loop.has_batch)
                self._end_micro_batch()
                part.finish_step()
                part.statistics.discard_step()
                if self._leads(part):
                    self._count_skipped()

    def _leads(self, part: OptimizerGradients) -> bool:
        """Whether an optimizer is the first, which makes a step for each batch."""
        return part is self.accumulation.parts[0]

    def _discard_in_step(self) -> None:
        """Make no step, because it is discarded; with several optimizers, `discard` follows the batch."""
        if not self.parts.are_several:
            self.discard()

    def _end_micro_batch(self) -> None:
        """Count a micro-batch for which an optimizer has made its part; with several, the batch ends it."""
        if not self.parts.are_several:
            self.accumulation.advance()

    def _follow_trained(self, part: OptimizerGradients) -> None:
        """Wait for what was exchanged, and train the parameters that require gradients now."""
        trained, step = self.program.trained, self.progress.step
        if self.parts.are_several:
            self.group.commit()
            part.statistics.restart_groups_of(trained.follow(step, part.parameters))
            return
        self.accumulation.weights.exchange_later()
        self.group.commit()
        changed = trained.follow(step)
        part.drop_frozen(changed)
        if changed:
            part.statistics.restart_groups_of(changed)

    def _count(self) -> None:
        """Count a step, and agree on what to do after it."""
        self._skipped_steps = 0
        planner, times = self.planner, self.times
        is_divided = planner.step_plan != planner.plan
        times.finish_step(
            (self.group.generation, planner.plan),
            counts=self.telemetry.step_timer.is_running and not is_divided,
        )
        gain = self.optimizer.slowest.gain()
        self.progress.advance(gain, planner.plan.global_bsz, planner.bounds.batch_size)
        self.spent.finish_step(self.progress.step, times.take_waited(), gain / planner.scale)
        self.telemetry.step(planner.plan, planner.bounds, is_divided=is_divided)
        self.generations.send_once(Stepped(self.group.generation))
        try:
            self._agree()
            self.has_stepped = True
            self.telemetry.compare(self.slow)
            times.begin_computation()
            self._check_weights()
        except PeersLostError:
            # The step is made. What follows it waits for the next generation.
            return

    def _count_skipped(self) -> None:
        """Count a step that a GradScaler has skipped."""
        self.telemetry.step_timer.pause()
        self._has_changed = False
        self._skipped_steps += 1
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise NonFiniteWeightsError(
                f"the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite, and the GradScaler "
                f"skipped them, after step {self.progress.step}: look for a division by zero or the "
                "logarithm of a number that is not positive in the loss, and try a smaller learning rate"
            )

    def _check_weights(self) -> None:
        step, agreed = self.progress.step, self.agreed
        self.weights.check_step(step, gradients_are_finite=self.optimizer.gradients_are_finite)
        if agreed.compare_weights:
            agreed.compare_weights = False
            self.comparison.compare(step)

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Use the buffers of rank 0, such as BatchNorm's statistics, and copy what the step may change.

        A collective call.
        """
        group = self.group
        if self.parts.are_several:
            # Gradients are averaged for the trained parameters, which have to be the same on all replicas.
            self.program.trained.agree(self.progress.step)
        else:
            self.times.begin_step()
        buffers = list(buffers_of(self.parts.model))
        if buffers and group.replicas > 1 and not group.has_mesh:
            self.times.suspend()
            group.copy_from_rank_0(list(dict.fromkeys(buffer for _, _, buffer in buffers)))
            self.times.resume()
        if group.is_elastic or group.replicas == 1:
            self.undo.begin_step(buffers)

    def begin_batch(self) -> None:
        """Prepare for a batch, which the program gets next."""
        self._is_open = True
        self.accumulation.begin_batch()
        if self.parts.are_several:
            self.times.begin_step()

    def end_batch(self) -> None:
        """Complete what the program has done for its last batch."""
        if not self._is_open:
            return
        self._is_open = False
        if not self.failure.is_discarded:
            self._end_open_batch()
        for part in self.accumulation.parts:
            part.has_stepped = False

    def _end_open_batch(self) -> None:
        requests_next = self.loop.place is ProgramPlace.BETWEEN
        if requests_next and not self.accumulation.passes and not self.accumulation.has_stepped:
            self._agree_without_pass()
            self.accumulation.leave_out_batch()
        else:
            self._complete_batch()

    def _agree_without_pass(self) -> None:
        """Wait until the other replicas have made no backward pass for the present batch either."""
        self.departures.leave_out(self.progress.step, calling_line())

    def _complete_batch(self) -> None:
        """End the step of several optimizers, or leave out one that the program has left out."""
        if self.parts.are_several:
            self._complete_batch_of_several()
            return
        if self.accumulation.at_first_micro_batch or not self.accumulation.passes:
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

    def _complete_batch_of_several(self) -> None:
        parts, accumulation = self.accumulation.parts, self.accumulation
        if parts[0].has_stepped:
            if accumulation.at_last_micro_batch:
                for part in parts:
                    if not part.has_stepped:
                        part.check_micro_batches(0)
            if accumulation.advance():
                self.undo.forget()
                self.planner.finished_step()
        elif stepped := [part.name for part in parts if part.has_stepped]:
            raise WorkerError(
                f"the optimizer {stepped[0]!r} made a step for a batch for which the first one, "
                f"{parts[0].name!r}, made none: a step is counted when the first optimizer makes its "
                "own, so it has to make one for each batch. Pass the optimizer that makes the most steps "
                "as the first"
            )
        elif (
            accumulation.micro_batch
            and accumulation.at_last_micro_batch
            and any(part.is_averaged for part in parts)
        ):
            # The program does not want the mean gradients, which are the same on all replicas.
            accumulation.restart_step()

    def discard(self) -> None:
        """Put back what an unfinished step has changed, so that its samples are delivered again."""
        self.accumulation.restart_step()
        self.undo.restore()
        self.progress.in_step = 0
        self._is_open = False
        if self.parts.are_several:
            self._has_changed = False

    def leave(self) -> None:
        """Put a failed step back: the loop, which would do so before its next batch, has ended."""
        if self.failure.is_discarded:
            self.discard()

    def mark_finish(self) -> None:
        """Record that the program has called `finish`, perhaps between the steps of two optimizers."""
        self._finished_in = self.accumulation.batch if self._is_open else None

    # -- what the replicas agree on -----------------------------------------------------------------------

    def _agree(self) -> None:
        """Exchange requests after a step, if it is due. A collective call.

        The requests are followed by the steps until the next exchange, from rank 0, and by two numbers of
        each replica: the time for which it computes in a step, and the error of that time. The others add 0.
        """
        group, step = self.group, self.progress.step
        if step < self._agrees_at:
            return
        now, interval = time.monotonic(), 0.0
        if group.is_main:
            # The mean of the steps since the last exchange, with evaluations and waits for data.
            seconds = (now - self._exchanged[1]) / max(step - self._exchanged[0], 1)
            interval = min(max(AGREEMENT_INTERVAL // max(seconds, 1e-6), 1.0), MAX_UNAGREED_STEPS)
        self._exchanged = step, now
        times, first = [0.0] * 2 * group.replicas, 2 * group.rank
        times[first : first + 2] = self.times.typical
        requested = self._requests().flags()
        sums = group.sum([*requested, interval, *times])
        self.agreed.add(sums[:REQUESTS], group.replicas)
        self._agrees_at = step + int(sums[REQUESTS] if group.replicas > 1 else 1)
        self.slow = slow_replica(sums[REQUESTS + 1 :: 2], sums[REQUESTS + 2 :: 2], self.slow)

    def _requests(self) -> Requests:
        """Return what this replica requests. What becomes due with time is requested by rank 0 only."""
        signaled = self.shutdown_request.is_made
        if signaled:
            self.generations.send_once(Terminated())
        requests = Requests(
            exit=signaled,
            finish=self.finish_reason is not None,
            change=self.generations.is_ready_for_change(),
        )
        if self.group.is_main:
            requests.save = self.checkpointing.is_due
            requests.replan = self.planner.is_due
            requests.compare_weights = self.comparison.is_due
        return requests

    # -- the end of training ------------------------------------------------------------------------------

    def request_finish(self, reason: str) -> None:
        """Request the end of training."""
        self.state.require_finite_weights()
        self.finish_reason, self._finish_line = reason, calling_line()
        self.group.announce(FINISH)
        self.save_finish()

    def save_finish(self) -> None:
        """Save the end of training on rank 0, because the program may end before the next step."""
        progress = self.progress
        progress.finish_reason = self.finish_reason
        self.state.save_on_rank_0()
        progress.finish_reason = None

    def finish_together(self) -> None:
        """Finish training on all replicas, for the reason of one of them. A collective call."""
        reasons = self.group.gather(self.finish_reason)
        self.progress.finish_reason = next(reason for reason in reasons if reason is not None)

    def finish_alone(self) -> WorkerError | None:
        """Return an error if another replica has not called `finish`, and still trains."""
        group = self.group
        if group.replicas == 1:
            return None
        missing = [rank for rank in range(group.replicas) if rank != group.rank]
        # Also of replicas that are lost, because their programs have ended.
        for (finished,) in group.poll(FINISH, timeout=FINISH_TIMEOUT, is_over=lambda: False):
            missing = [rank for rank in range(group.replicas) if rank not in finished]
            if not missing:
                return None
        if group.announced(FINISH) is None and not (group.processes > 1 and group.has_failed):
            # The process that serves the store ends after it has seen all the others. With several processes
            # a replica reads nothing any more once others are lost.
            return None
        # In place of the checkpoint of `finish`, which says that training is finished.
        self.state.save_on_rank_0()
        return WorkerError(
            f"rank {group.rank} called trainer.finish ({self._finish_line}) and left its loop, but rank "
            f"{', '.join(map(str, missing))} did not call it. After trainer.finish(reason) on some of the "
            "replicas, continue the loop: trainer.finished becomes true and trainer.dataloader ends on all "
            "of them after the same step. To leave the loop at once, call trainer.finish on all replicas"
        )

    # -- a generation -------------------------------------------------------------------------------------

    def begin_generation(self) -> None:
        """Begin with other replicas, which have agreed on nothing yet. A collective call."""
        self.agreed, self.slow, self._agrees_at = Requests(), None, 0
        self.accumulation.begin_generation()

    def use_plan(self) -> None:
        """Use the planner's batch plan from the next step on."""
        self.accumulation.set_plan(self.planner.plan, self.planner.scale)
        self.times.begin_timing()
