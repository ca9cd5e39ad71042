"""The trainer's part of the program's training loop: optimizer steps, step boundaries, epochs.

The program iterates over `epoch`, calls `optimizer.step()`, which `optimizer_step` replaces, and calls
`end_epoch`. Between two steps all replicas do what they have agreed on: save, or save and exit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sized
from typing import Any, NoReturn

from adascale_core.exit_codes import EXIT_REENTRY
from adascale_worker.accumulation import GradientAccumulation
from adascale_worker.agreement import Agreement, Requests
from adascale_worker.components import TrainerComponents
from adascale_worker.errors import WorkerError
from adascale_worker.loop_checks import LoopChecks
from adascale_worker.program_state import ProgramState
from adascale_worker.shutdown import FastExit, ShutdownSignal
from adascale_worker.stream import SampleStream
from adascale_worker.training_state import TrainingState
from adascale_worker.user_code import calling_line
from adascale_worker.weight_checks import (
    FiniteWeights,
    NonFiniteWeightsError,
    WeightComparison,
    nonfinite_message,
)

SLOW_STEP = 0.05
"""Seconds per step from which on the replicas exchange requests on every step."""


FINISH = "finish"
"""The event that a replica announces when it has called `finish`."""
FINISH_TIMEOUT = 30.0
"""Seconds that a replica which has called `finish` and ends waits for the others to call it."""


class TrainingLoop:
    """What happens in optimizer steps, between them, and at the end of an epoch.

    Args:
        trainer: the parts of the trainer.
        program: the parts of the program.
        accumulation: counts the micro-batches of a step.
        checks: checks the steps of the program's loop.
        shutdown_signal: requests the exit of all replicas.
        fast_exit: ends the process.
    """

    def __init__(
        self,
        trainer: TrainerComponents,
        program: ProgramState,
        accumulation: GradientAccumulation,
        checks: LoopChecks,
        shutdown_signal: ShutdownSignal,
        fast_exit: FastExit,
    ) -> None:
        self.adascale = program.optimizer
        self._trainer = trainer
        self._accumulation = accumulation
        self._checks = checks
        self._weights = FiniteWeights(
            program.optimizer, trainer.settings.max_nonfinite_steps, is_main=trainer.group.is_main
        )
        self._comparison = WeightComparison(program.model, trainer.group)
        self._state = TrainingState(trainer, program)
        self._shutdown_signal = shutdown_signal
        self._fast_exit = fast_exit
        self._agreement = Agreement()
        self._stepped_at = float("-inf")
        self._delivered = 0
        self._inside_epoch = False
        self._current_epoch: object = None
        self._finish_request: str | None = None
        self._finish_line = ""
        self._ended_epoch: int | None = None

    @property
    def inside_epoch(self) -> bool:
        """Whether the program is inside its data loop."""
        return self._inside_epoch

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state, except the model's. A collective call.

        Raises:
            CheckpointError: see `TrainingState.load_state_dict`.
        """
        self._state.load_state_dict(state)

    def apply_plan(self) -> None:
        """Use the planner's batch plan from the next step on."""
        planner = self._trainer.planner
        self._accumulation.set_plan(planner.plan, planner.scale)

    # -- optimizer steps --------------------------------------------------------------------------------

    def optimizer_step(self, closure: None = None) -> None:
        """Count a micro-batch, and after the last one of a step update the parameters.

        Raises:
            StaleBatchSizeError: the program has not read the current local batch size.
            WorkerError: a closure was passed, the loop does not make its steps as the trainer requires, or
                the weights of the replicas differ or are not finite.
        """
        if closure is not None:
            raise WorkerError(
                "optimizer.step(closure) is not supported: compute the gradients before optimizer.step()"
            )
        trainer = self._trainer
        trainer.planner.require_acknowledged()
        self._checks.check_step(inside_epoch=self._inside_epoch)
        if not self._accumulation.advance():
            return
        flags = self._requests().flags()
        self.adascale.flags = flags
        self.adascale.step()
        sums = self.adascale.flags_sum
        if sums is None and self._agreement.agree_each_step:
            # AdaScale does not measure every step, and the next measured one may be a minute away.
            sums = trainer.group.sum(flags)
        self._agreement.update(sums)
        self._stepped_at = time.monotonic()
        trainer.progress.advance(self.adascale.gain(), self._delivered)
        trainer.telemetry.step(trainer.planner.plan, trainer.progress, self.adascale)
        self._check_weights()

    def _check_weights(self) -> None:
        step = self._trainer.progress.step
        self._weights.check_step(step, gradients_are_finite=self.adascale.gradients_are_finite)
        if self._agreement.compare_weights:
            self._agreement.compare_weights = False
            self._comparison.compare(step)
            self._withdraw_requests()

    def _requests(self) -> Requests:
        """What this replica requests. Ranks other than 0 request only their exit or the end of training."""
        trainer = self._trainer
        signaled = self._shutdown_signal.received is not None
        finish = self._finish_request is not None
        if not trainer.group.is_main:
            return Requests(exit=signaled, finish=finish)
        return Requests(
            exit=signaled or trainer.telemetry.generation_is_over,
            save=trainer.checkpointing.is_due,
            replan=trainer.planner.is_due,
            agree_each_step=time.monotonic() - self._stepped_at >= SLOW_STEP,
            finish=finish,
            compare_weights=self._comparison.is_due,
        )

    def _at_step_boundary(self) -> None:
        """Finish training, save or exit if the replicas have agreed to."""
        if self._agreement.finish and not self._trainer.finished:
            self._finish_together()
            return
        if self._agreement.exit:
            self._save_and_exit()
        if self._agreement.save and not self.adascale.awaits_comparison:
            self._agreement.save = False
            self._save()
            self._withdraw_requests()
            self._trainer.telemetry.step_timer.pause()

    def _withdraw_requests(self) -> None:
        """Replace requests that are fulfilled, so that the next all-reduce does not sum them again."""
        self.adascale.flags = self._requests().flags()

    # -- epochs -----------------------------------------------------------------------------------------

    def require_epoch(self) -> None:
        """Check that the current epoch has not ended.

        Raises:
            WorkerError: all batches of the epoch were delivered, and `end_epoch` was not called.
        """
        epoch = self._trainer.progress.epoch
        if self._ended_epoch == epoch and not self._trainer.checkpointing.has_final:
            raise WorkerError(
                f"trainer.dataloader() was called again after all batches of epoch {epoch}: call "
                f"trainer.step({epoch}), with the number of the epoch, after the loop over its batches"
            )

    def epoch(self, dataset: Sized, stream: SampleStream, options: dict[str, Any]) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the current epoch.

        Args:
            dataset: the data set.
            stream: its sample stream.
            options: arguments for DataLoader.

        Raises:
            WorkerError: another epoch was begun before this one ended.
        """
        trainer, planner, progress = self._trainer, self._trainer.planner, self._trainer.progress
        end = (progress.epoch + 1) * stream.length / planner.bounds.batch_size
        batches: Iterator[Any] | None = None
        self._current_epoch = this_epoch = object()
        self._accumulation.restart_step()
        self._checks.begin_epoch()
        self._delivered = progress.consumed
        trainer.telemetry.step_timer.pause()
        try:
            while True:
                if self._current_epoch is not this_epoch:
                    raise WorkerError(
                        "another loop over trainer.dataloader() began before this one ended: iterate over "
                        "one at a time, and use a DataLoader of your own for other data"
                    )
                if self._accumulation.at_first_micro_batch:
                    # Includes batches for which the program made no step.
                    progress.consumed = self._delivered
                    self._at_step_boundary()
                    if trainer.finished or progress.progress >= end:
                        trainer.rng.apply()
                        self._ended_epoch = progress.epoch
                        return
                if batches is None:
                    batches = trainer.feed.micro_batches(
                        dataset, stream, progress.consumed, planner.plan, options
                    )
                trainer.rng.apply()
                batch = next(batches)
                self._delivered += trainer.group.replicas * planner.plan.local_bsz
                self._inside_epoch = True
                self._checks.delivered_batch()
                yield batch
                self._inside_epoch = False
        finally:
            self._inside_epoch = False
            trainer.telemetry.step_timer.pause()

    def end_epoch(self, epoch: int) -> None:
        """End the current epoch: replan if the replicas have agreed to, or save the end of training.

        Args:
            epoch: number of the current epoch, from 0.

        Raises:
            WorkerError: `epoch` is not the current epoch.
            CheckpointError: the state at the end of training cannot be saved.
        """
        trainer = self._trainer
        if epoch != trainer.progress.epoch:
            raise WorkerError(
                f"trainer.step({epoch}) was called, but the current epoch is {trainer.progress.epoch}: start "
                "with the epoch that program_reentry returns, and call trainer.step(epoch) once per epoch"
            )
        self._accumulation.restart_step()
        trainer.progress.epoch += 1
        if trainer.finished:
            self._save_final()
            return
        if self._agreement.replan:
            self._agreement.replan = False
            trainer.planner.replan(self.adascale, trainer.telemetry.step_timer)
            self.apply_plan()
            self._withdraw_requests()
        self._at_step_boundary()

    # -- the end of training ----------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """End training: at once on one replica, else after the next step for which the replicas agree."""
        trainer = self._trainer
        if trainer.finished:
            return
        if trainer.group.replicas == 1:
            trainer.progress.finish_reason = reason
            self._save_final()
            return
        self._require_finite_weights()
        self._finish_request = reason
        self._finish_line = calling_line()
        trainer.group.announce(FINISH)
        # The program may end before the next step.
        trainer.progress.finish_reason = reason
        trainer.checkpointing.save_on_rank_0(
            self._state.info(), trainer.rng.current(), self._state.state_dict
        )
        trainer.progress.finish_reason = None

    def _finish_together(self) -> None:
        reasons = self._trainer.group.gather(self._finish_request)
        self._trainer.progress.finish_reason = next(reason for reason in reasons if reason is not None)
        self._save_final()

    def end_of_program(self) -> str | None:
        """Report the last step, and return an error message if training is not finished, else None."""
        trainer = self._trainer
        trainer.telemetry.report_last(trainer.planner.plan, trainer.progress, self.adascale)
        if self._stepped_at > float("-inf") and not trainer.checkpointing.has_final:
            try:
                self._require_finite_weights()
            except NonFiniteWeightsError as error:
                return str(error)
        unfinished = trainer.unfinished
        if self._finish_request is not None and not trainer.finished:
            return self._finished_alone()
        if unfinished is None:
            return None
        return (
            f"the program ended at {unfinished}. Train until trainer.finished is true, or call "
            "trainer.finish(reason) to end training earlier"
        )

    def _finished_alone(self) -> str | None:
        """Return an error message if another replica has not called `finish`, and still trains."""
        trainer, group = self._trainer, self._trainer.group
        missing = group.missing(FINISH, FINISH_TIMEOUT)
        if not missing:
            return None
        # In place of the checkpoint of `finish`, which says that training is finished.
        trainer.checkpointing.save_on_rank_0(
            self._state.info(), trainer.rng.current(), self._state.state_dict
        )
        return (
            f"rank {group.rank} called trainer.finish ({self._finish_line}) and left its loop, but rank "
            f"{', '.join(map(str, missing))} did not call it. After trainer.finish(reason) on some of the "
            "replicas, continue the loop: trainer.finished becomes true and trainer.dataloader ends on all "
            "of them after the same step. To leave the loop at once, call trainer.finish on all replicas"
        )

    def _save_final(self) -> None:
        """Save the end of training, once."""
        if self._trainer.checkpointing.has_final:
            return
        self._report()
        self._save(final=True)
        if self._trainer.generation == 0:
            # The rest of the program, for example an evaluation, has no step at which it could exit.
            self._shutdown_signal.uninstall()

    # -- saving and exiting -----------------------------------------------------------------------------

    def _save(self, *, final: bool = False, durable: bool = False) -> None:
        """Save a checkpoint; if `final` or `durable`, before this returns. A collective call.

        Raises:
            NonFiniteWeightsError: weights are not finite; the previous checkpoint is kept.
            CheckpointError: see `Checkpointing.save`.
        """
        trainer = self._trainer
        if final or (durable and trainer.checkpointing.enabled):
            self._require_finite_weights()
        trainer.checkpointing.save(
            self._state.info(),
            trainer.rng.current(),
            self._state.state_dict,
            final=final,
            durable=durable,
            weights=self._weights.weights(),
        )

    def _require_finite_weights(self) -> None:
        trainer = self._trainer
        if not self._weights.are_finite():
            trainer.checkpointing.postpone()
            raise NonFiniteWeightsError(nonfinite_message(trainer.progress.step))

    def _report(self) -> None:
        self._trainer.telemetry.report(self._trainer.planner.plan, self._trainer.progress, self.adascale)

    def _save_and_exit(self) -> NoReturn:
        """Save, and end the program so that it can be started again."""
        trainer = self._trainer
        self._report()
        saved = True
        try:
            self._save(durable=True)
        except NonFiniteWeightsError as error:
            saved = False
            if trainer.group.is_main:
                print(f"adascale: {error}", flush=True)
        trainer.telemetry.close()
        trainer.group.destroy()
        received = self._shutdown_signal.received
        if trainer.generation > 0 or received is None:
            self._fast_exit.exit(EXIT_REENTRY)
        if saved and trainer.group.is_main:
            step = trainer.progress.step
            print(f"adascale: saved a checkpoint at step {step}; run the same command to resume", flush=True)
        self._fast_exit.exit(128 + received)
