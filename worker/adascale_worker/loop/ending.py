"""The ends of a loop, of training and of the process."""

from __future__ import annotations

import math
from typing import NoReturn

from adascale_core.errors import AdaScaleError
from adascale_core.failures.exit_codes import EXIT_REENTRY
from adascale_core.messages.channel import TrainingSaved
from adascale_worker.batches.planning import BatchPlanner
from adascale_worker.errors import NonFiniteWeightsError, ReplicationError, WorkerError
from adascale_worker.loop.departures import LoopDepartures
from adascale_worker.loop.evaluation_sequence import EvaluationSequence
from adascale_worker.loop.finish_request import FinishRequest
from adascale_worker.loop.generations import Generations
from adascale_worker.loop.job import Job
from adascale_worker.loop.program_loop import ProgramLoop
from adascale_worker.loop.steps import StepStrategy
from adascale_worker.membership.agent_channel import AgentChannel
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.process.user_code import calling_line
from adascale_worker.program.weight_checks import WeightComparison
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.reporting.telemetry import Telemetry
from adascale_worker.state.checkpoints.checkpointing import Checkpointing
from adascale_worker.state.saving import StateSaving


class Ending:
    """Ends loops of the program, its training and its process.

    Args:
        job: how far training is from its end.
        group: the replicas.
        channel: the connection with the agent. None without an agent.
        generations: entered if members are lost while the end is saved.
        steps: how the replicas make steps.
        loop: where the program is.
        departures, evaluations: announce that the program leaves a loop, or ends.
        finish_request: the program's request to end training.
        comparison: compares the weights before the end is saved.
        saving, checkpointing: save the end.
        progress, planner, telemetry: the last step is reported.
        shutdown_request: whether this replica was requested to save and exit.
    """

    def __init__(
        self,
        *,
        job: Job,
        group: ReplicaGroup,
        channel: AgentChannel | None,
        generations: Generations,
        steps: StepStrategy,
        loop: ProgramLoop,
        departures: LoopDepartures,
        evaluations: EvaluationSequence,
        finish_request: FinishRequest,
        comparison: WeightComparison,
        saving: StateSaving,
        checkpointing: Checkpointing,
        progress: TrainingProgress,
        planner: BatchPlanner,
        telemetry: Telemetry,
        shutdown_request: ShutdownRequest,
    ) -> None:
        self._job = job
        self._group = group
        self._channel = channel
        self._generations = generations
        self._steps = steps
        self._loop = loop
        self._departures = departures
        self._evaluations = evaluations
        self._finish_request = finish_request
        self._comparison = comparison
        self._saving = saving
        self._checkpointing = checkpointing
        self._progress = progress
        self._planner = planner
        self._telemetry = telemetry
        self._shutdown_request = shutdown_request

    # -- a loop -------------------------------------------------------------------------------------------

    def leave_loop(self, *, early: bool, by_program: bool = False) -> None:
        """Announce that the program has left its data loop, if it is in one.

        Args:
            early: whether it has left it before its end.
            by_program: whether the loop itself has ended, by `break` or an error.
        """
        self._steps.leave()
        if self._loop.goes_on:
            self._departures.leave(
                self._loop.epoch,
                self._progress.step,
                calling_line(),
                early=early,
                expected=self._finish_request.reason is not None or self._job.finished,
            )
        self._loop.leave(by_program=by_program)

    @property
    def current_epoch(self) -> int:
        """The number of the epoch that the program is in or begins next, from 0."""
        return self._progress.epoch - self._loop.epochs_behind

    def is_in_epoch(self, epoch: int) -> bool:
        """Whether the program has not ended `epoch` yet."""
        return epoch in (self.current_epoch, self._loop.overtaken_epoch)

    # -- training -----------------------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """End training: at once on one replica, else after the next step for which the replicas agree.

        Raises:
            CheckpointError: the end of training cannot be saved.
            NonFiniteWeightsError: weights are not finite.
        """
        self._steps.leave()
        if not self._job.finished:
            if self._group.replicas == 1:
                self._progress.finish_reason = reason
                self.save_final()
            else:
                self._finish_request.make(reason)
        self._steps.mark_finish()

    def finish_together(self) -> None:
        """Finish training, which the replicas have agreed on. A collective call.

        Raises:
            CheckpointError: the end of training cannot be saved.
        """
        self._finish_request.agree()
        self.save_final()

    def end_restored_training(self) -> None:
        """Save the end of training, if the state that was restored is finished, and the end is not saved.

        Members that were saving it when a replica was lost do so again, with the replica that replaces it.
        """
        if not self._checkpointing.has_final:
            self.save_final()
        elif self._channel is not None:
            self._channel.send(TrainingSaved())

    def save_final(self) -> None:
        """Save the end of training, once. If members are lost meanwhile, the others save it.

        Raises:
            CheckpointError: it cannot be saved.
        """
        if self._checkpointing.has_final:
            return
        self._generations.report()
        while True:
            try:
                self._comparison.compare(self._progress.step, self._steps.passes_per_batch)
                self._saving.save(final=True)
                break
            except PeersLostError:
                self._generations.recover()
        self._loop.overtaken_epoch = None
        if self._channel is not None:
            self._channel.send(TrainingSaved())
        if self._group.generation == 0:
            # The rest of the program, for example an evaluation, has no step at which it could exit.
            self._shutdown_request.uninstall()

    # -- the process --------------------------------------------------------------------------------------

    def end_of_program(self, left_epoch: int | None) -> AdaScaleError | None:
        """Report the last step, and return an error if training is not finished, else None.

        Args:
            left_epoch: the epoch of a loop over `trainer.epochs` that the program has left before its end.
        """
        self._telemetry.report_last(self._planner.plan, self._progress, self._steps.optimizer)
        if self._steps.counter.has_stepped and not self._checkpointing.has_final:
            try:
                self._saving.require_finite_weights()
            except NonFiniteWeightsError as error:
                return error
        try:
            self._end_left_epoch(left_epoch)
        except AdaScaleError as error:
            return error
        unfinished = self._job.unfinished
        self._evaluations.announce_passed([math.inf])
        if self._finish_request.reason is not None and not self._job.finished:
            return self._finish_request.end_alone()
        try:
            self.leave_loop(early=True)
            self._departures.wait(lambda: self._shutdown_request.is_made)
        except ReplicationError as error:
            return error
        if unfinished is None:
            return None
        return WorkerError(
            f"the program ended at {unfinished}. Train until trainer.finished is true, or call "
            "trainer.finish(reason) to end training earlier"
        )

    def _end_left_epoch(self, epoch: int | None) -> None:
        """End the last epoch of a program that has left it, and save the end of training if it is reached."""
        if epoch is None or not self.is_in_epoch(epoch) or self._checkpointing.has_final:
            return
        if epoch != self._loop.overtaken_epoch:
            self._progress.epoch += 1
        if self._job.finished:
            self.leave_loop(early=True)
            self._departures.wait()
            self.save_final()

    def save_and_exit(self) -> NoReturn:
        """Save, and end the program so that it can be started again. Without an agent."""
        self._generations.report()
        saved = True
        try:
            self._saving.save(durable=True)
        except NonFiniteWeightsError as error:
            saved = False
            if self._group.is_main:
                print(f"adascale: {error}", flush=True)
        received = self._shutdown_request.received
        if received is None:
            self._generations.exit(EXIT_REENTRY)
        if saved and self._group.is_main:
            print(
                f"adascale: saved a checkpoint at step {self._progress.step}; run the same command to resume",
                flush=True,
            )
        self._generations.exit(128 + received)
