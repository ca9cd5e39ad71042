"""The ends of a loop, of training and of the process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_REENTRY
from adascale_core.messages.channel import TrainingSaved
from adascale_worker.errors import NonFiniteWeightsError, ReplicationError, WorkerError
from adascale_worker.loop.context import Context
from adascale_worker.loop.generations import Generations
from adascale_worker.loop.steps import Steps
from adascale_worker.membership.links import PeersLostError
from adascale_worker.process.user_code import calling_line


@dataclass(eq=False, kw_only=True)
class Ending(Context):
    """Ends loops of the program, its training and its process."""

    steps: Steps
    generations: Generations

    # -- a loop -------------------------------------------------------------------------------------------

    def leave_loop(self, *, early: bool, by_program: bool = False) -> None:
        """Announce that the program has left its data loop, if it is in one.

        `early`: before its end; `by_program`: the loop itself has ended, by `break` or an error.
        """
        self.steps.leave()
        if self.loop.is_inside:
            self.departures.leave(
                self.loop.epoch,
                self.progress.step,
                calling_line(),
                early=early,
                expected=self.steps.agreement.finish_reason is not None or self.job.finished,
            )
        self.loop.leave(by_program=by_program)

    def is_in_epoch(self, epoch: int) -> bool:
        """Whether the program has not ended `epoch` yet."""
        return epoch in (self.progress.epoch, self.loop.overtaken_epoch)

    # -- training -----------------------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """End training: at once on one replica, else after the next step for which the replicas agree."""
        self.steps.leave()
        if not self.job.finished:
            if self.group.replicas == 1:
                self.progress.finish_reason = reason
                self.save_final()
            else:
                self.steps.agreement.request_finish(reason)
        self.steps.mark_finish()

    def finish_together(self) -> None:
        """Finish training, which the replicas have agreed on. A collective call."""
        self.steps.agreement.finish_together()
        self.save_final()

    def end_restored_training(self) -> None:
        """Save the end of training, if the state that was restored is finished, and the end is not saved.

        Members that were saving it when a replica was lost do so again, with the replica that replaces it.
        """
        if not self.checkpointing.has_final:
            self.save_final()
        elif self.channel is not None:
            self.channel.send(TrainingSaved())

    def save_final(self) -> None:
        """Save the end of training, once. If members are lost meanwhile, the others save it."""
        if self.checkpointing.has_final:
            return
        self.generations.report()
        while True:
            try:
                self.comparison.compare(self.progress.step)
                self.state.save(final=True)
                break
            except PeersLostError:
                self.generations.recover()
        self.loop.overtaken_epoch = None
        if self.channel is not None:
            self.channel.send(TrainingSaved())
        if self.group.generation == 0:
            # The rest of the program, for example an evaluation, has no step at which it could exit.
            self.shutdown_request.uninstall()

    # -- the process --------------------------------------------------------------------------------------

    def end_of_program(self, left_epoch: int | None) -> AdaScaleError | None:
        """Report the last step, and return an error if training is not finished, else None.

        `left_epoch` is that of a loop over `trainer.epochs` which the program has left before its end.
        """
        self.telemetry.report_last(self.planner.plan, self.progress, self.optimizer)
        if self.steps.has_stepped and not self.checkpointing.has_final:
            try:
                self.state.require_finite_weights()
            except NonFiniteWeightsError as error:
                return error
        try:
            self._end_left_epoch(left_epoch)
        except AdaScaleError as error:
            return error
        unfinished = self.job.unfinished
        self.evaluations.announce_passed([math.inf])
        if self.steps.agreement.finish_reason is not None and not self.job.finished:
            return self.steps.agreement.finish_alone()
        try:
            self.leave_loop(early=True)
            self.departures.wait(lambda: self.shutdown_request.is_made)
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
        if epoch is None or not self.is_in_epoch(epoch) or self.checkpointing.has_final:
            return
        if epoch != self.loop.overtaken_epoch:
            self.progress.epoch += 1
        if self.job.finished:
            self.leave_loop(early=True)
            self.departures.wait()
            self.save_final()

    def save_and_exit(self) -> NoReturn:
        """Save, and end the program so that it can be started again. Without an agent."""
        self.generations.report()
        saved = True
        try:
            self.state.save(durable=True)
        except NonFiniteWeightsError as error:
            saved = False
            if self.group.is_main:
                print(f"adascale: {error}", flush=True)
        received = self.shutdown_request.received
        if received is None:
            self.generations.exit(EXIT_REENTRY)
        if saved and self.group.is_main:
            print(
                f"adascale: saved a checkpoint at step {self.progress.step}; run the same command to resume",
                flush=True,
            )
        self.generations.exit(128 + received)
