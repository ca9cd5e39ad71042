"""The training of a program: the parts of a trainer are made here, each with the parts that it uses.

The program iterates over `batches`, calls `optimizer.step()`, which `Steps` replaces, and calls `end_epoch`.
Between two steps all replicas do what they have agreed on: save, enter another generation, or save and exit.
If members were lost, the remaining ones enter another generation, where the samples of the failed step are
delivered again. So do all members if a batch does not fit into the memory of one, with a lower limit of the
local batch size.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

import torch
from torch import nn

from adascale_core.batch.plans import BatchPlan
from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_REENTRY
from adascale_core.messages.channel import TrainingSaved
from adascale_core.messages.replica_seconds import Cause
from adascale_worker.adascale import AdaScale
from adascale_worker.batches.feed import DataFeed, LoadedBatches
from adascale_worker.batches.order import seed_generators
from adascale_worker.errors import NonFiniteWeightsError, ReplicaCheckError, ReplicationError, WorkerError
from adascale_worker.gradients.accumulation import Accumulation, guard_backward, patch_forward
from adascale_worker.gradients.optimizer_gradients import OptimizerGradients
from adascale_worker.gradients.step_division import StepDivision
from adascale_worker.gradients.step_failure import StepFailure
from adascale_worker.gradients.step_times import StepTimes
from adascale_worker.loop.agreement import LoopDepartures
from adascale_worker.loop.context import Context, Replica, make_reporter
from adascale_worker.loop.evaluation import EvaluationSequence
from adascale_worker.loop.failures import Failures
from adascale_worker.loop.generations import Generations
from adascale_worker.loop.loss_scaling import patch_scaler, scaler_of
from adascale_worker.loop.steps import Steps, StepUndo
from adascale_worker.membership.links import PeersLostError
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.device import DeviceClock, find_fault
from adascale_worker.process.user_code import calling_line, warn_user
from adascale_worker.program.hyperparameters import Choice, Hyperparameters
from adascale_worker.program.parts import Optimizers, ProgramParts, refuse_other_training, require_sharded
from adascale_worker.program.patching import LearningRates, patch_scheduler, restoring_methods
from adascale_worker.program.program_loop import ProgramLoop
from adascale_worker.program.trained_parameters import TrainedParameters
from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
from adascale_worker.reporting.reports import Telemetry
from adascale_worker.state.program import ModuleAttributes, ProgramState, Stateful
from adascale_worker.state.state import State

_BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


COMPARISON_STEPS = 1024
"""Steps after which the replicas of a long generation compare again what they read of a stream."""


class DataLoop(Iterator[Any]):
    """What `trainer.dataloader` returns: each iteration over it is one over the rest of the current epoch.

    A `for` loop that is left ends its iteration, also if a variable refers to this object: only the loop has
    the iterator.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._batches: Iterator[Any] | None = None  # for `next(trainer.dataloader(dataset))`

    def __iter__(self) -> Iterator[Any]:
        return self._begin() if self._batches is None else self._batches

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        return next(self._batches)

    def __len__(self) -> NoReturn:
        raise TypeError(
            "trainer.dataloader() has no length, because the number of batches of an epoch changes with the "
            "batch size. An epoch is len(dataset) / batch_size scale-invariant steps, which trainer.progress "
            "and a scheduler count: for example, T_max=epochs * len(dataset) // batch_size"
        )


class Training(Context):
    """The training of a program: makes its models data-parallel and its optimizers elastic, delivers batches,
    does between two steps and two epochs what the replicas have agreed on, and ends loops of the program, its
    training and its process.
    """

    has_grown = False  # whether it has trained with other replicas
    _epoch: int | None = None  # of a loop over `epochs`, until that epoch has ended
    _is_inside_epoch = False
    _is_complete = False  # whether the body of that loop has come to its end

    def __init__(
        self,
        replica: Replica,
        parts: ProgramParts,
        registered: dict[str, Stateful],  # objects whose state is saved, by name
        hyperparameters: Choice,  # which are used after a checkpoint was restored
    ) -> None:
        super().__init__(replica)
        group, settings, progress = self.group, self.job.settings, self.progress
        scaler = scaler_of(registered.values())
        if group.has_mesh:
            _require_sharded(group, parts, scaler)
        self.parts, self.loop = parts, ProgramLoop()
        self._undo = ExitStack()
        """Undoes what affects the whole process, and the program's objects."""
        owners = [*parts.models, *parts.optimizers.values(), *parts.schedulers.values()]
        self._undo.callback(restoring_methods([*owners, *([] if scaler is None else [scaler])]))
        self._make_program(registered, hyperparameters, scaler)
        self._make_gradients()
        is_saved = self.checkpointing.enabled or group.is_elastic
        self.feed = DataFeed(settings.bounds, group, self.seed, progress, self.division, is_saved=is_saved)
        self.telemetry = Telemetry(
            group,
            progress,
            self.optimizer,
            make_reporter,
            self.accelerator,
            self.times.sync_time,
            self.tracker,
            self.run,
        )
        self.weights = FiniteWeights(self.optimizer, settings.max_nonfinite_steps, group)
        self.comparison = WeightComparison(parts.model, self.optimizer, group)
        self.state = self._make_state()
        self.accumulation.before_change = self.state.followers.wait_for_copies
        self.departures = LoopDepartures(group)
        self.evaluations = EvaluationSequence(self)
        self.generations = Generations(self)
        self.steps = Steps(self)
        for module in (self.failures, self.generations, self.evaluations):
            module.complete(self)

    def _make_program(
        self,
        registered: dict[str, Stateful],
        hyperparameters: Choice,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        """Put AdaScale around each optimizer, and make the state of the program's objects."""
        parts, group = self.parts, self.group
        # A scaler that is not registered is refused. So without one, any change of gradients is clipping.
        scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
        elastic = {
            name: AdaScale(
                each,
                world_size=group.replicas,
                is_scaled_loss=False,
                grad_scaler=scaler,
                disjoint_pairs=True,
                observes_backward=False,
                shards=group if group.has_mesh else None,
                max_gain=self.job.settings.max_gain,
            )
            for name, each in parts.optimizers.items()
        }
        self.optimizer = Optimizers(elastic)
        self.program = ProgramState(
            parts.model,
            self.optimizer,
            parts.scheduler,
            registered,
            LearningRates(parts.optimizers, parts.schedulers, registered.values()),
            TrainedParameters(parts.model, group),
            Hyperparameters.read(parts, parts.scheduler),
            hyperparameters,
        )
        if self.checkpointing.enabled or group.is_elastic:
            self.program.require_loadable()

    def _make_gradients(self) -> None:
        """Let the models and backward passes average gradients."""
        parts, group, planner = self.parts, self.group, self.planner
        self.undo = StepUndo(parts.model, self.progress, self.program if parts.are_several else None)
        self.failures = Failures(self)
        self.failure = StepFailure(group, self.failures.limits_batches_after, self.undo.revert_progress)
        self.division = StepDivision(
            lambda: planner.bounds,
            is_allowed=self.job.settings.single_replica_gain == "divided" and not group.has_mesh,
            has_batch_norm=any(isinstance(each, _BATCH_NORMS) for each in parts.model.modules()),
        )
        # The program may clip all gradients of the model together.
        clipped = [] if parts.are_several else list(parts.model.parameters())
        gradients = [
            OptimizerGradients(name, each, clipped, group, has_several_passes=parts.are_several)
            for name, each in self.optimizer.parts.items()
        ]
        self.times = StepTimes(group, DeviceClock(self.device))
        self.accumulation = Accumulation(
            gradients,
            group,
            self.failure,
            self.division,
            self.loop,
            self.program.trained,
            self.times,
            lambda: self.progress.step,
        )
        for model in parts.models:
            patch_forward(model, group, self.failure, self.accumulation)

    def _make_state(self) -> State:
        saved: dict[str, Stateful] = {
            "plan": self.planner,
            "progress": self.progress,
            "data": self.feed,
            "step_times": self.telemetry.step_timer,
            "division": self.division,
            "run": self.telemetry,
            "attributes": ModuleAttributes(self.program.model),
        }
        return State(
            self.program,
            saved,
            self.job.checkpoint_info,
            self.weights,
            self.undo,
            self.progress,
            self.checkpointing,
            self.snapshot_memory,
        )

    # -- the program --------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Restore the state of training, in the first generation of this trainer."""
        self._undo.callback(guard_backward(self.failure, self.accumulation))
        self.failures.start()
        if self.group.is_elastic:
            self._require_sound_devices()
        self.generations.begin()

    def _require_sound_devices(self) -> None:
        """Check the device of each process of this replica before the agent registers it."""
        group = self.group
        with self.spent.checking():
            fault = find_fault(self.device)
        fault = next(filter(None, group.own.exchange(fault)), None)
        if fault is not None:
            raise ReplicaCheckError(fault)

    def install(self) -> None:
        """Replace methods of the program's objects, and install the handlers of the process.

        Not earlier: nothing can be saved before, and an NCCL error during the first collective calls means a
        wrong configuration rather than a lost peer.
        """
        rates, steps, progress = self.program.rates, self.steps, self.progress
        steps.patch()
        scaler = scaler_of(self.program.registered.values())
        if scaler is not None:
            patch_scaler(scaler, self.parts.optimizers.values(), steps)
        for scheduler in self.parts.schedulers.values():
            patch_scheduler(
                scheduler,
                rates,
                self.loop,
                lambda: progress.schedule_position,
                lambda: steps.made_step,
            )
        self._undo.callback(
            refuse_other_training(self.parts, self.group, self.loop, lambda: self.accumulation.has_stepped)
        )
        self.failures.watches_steps = True
        shutdown_request = self.shutdown_request
        if self.group.is_elastic:
            shutdown_request.install(signal.SIGTERM)
        elif self.checkpointing.enabled:
            if threading.current_thread() is not threading.main_thread():
                warn_user(
                    "the program trains in a thread, where Python handles no signals: SIGTERM and Ctrl-C end "
                    "it without a checkpoint. Call program_reentry and train in the main thread"
                )
            # Of a terminal that is closed, unless the program was started by nohup.
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            shutdown_request.install(signal.SIGTERM, signal.SIGINT, *hangup)
        self.process_exit.install(self.failures.end_after, self.departures.fail)

    def leave(self) -> None:
        """Post outstanding reports, and leave the other members."""
        self.telemetry.close()
        self.generations.close()

    def close(self) -> None:
        """Undo what affects the whole process, and the program's objects."""
        self.feed.close()
        self.failures.stop()
        self._undo.close()
        with suppress(RuntimeError):  # of an exchange that a lost replica has left
            for part in self.accumulation.parts:
                part.exchange.forget()
            for adascale in self.optimizer.parts.values():
                adascale.unhook()

    # -- batches ------------------------------------------------------------------------------------------

    def require_epoch(self) -> None:
        """Check that the current epoch has not ended."""
        if not self.checkpointing.has_final:
            self.loop.require_batches(self.progress.epoch)

    def batches(self, load: Callable[[int, BatchPlan], LoadedBatches]) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the current epoch."""
        self.require_epoch()
        planner, progress, loop = self.planner, self.progress, self.loop
        loaded: LoadedBatches | None = None
        place: object = None
        number = self._begin_loop()
        try:
            while self._prepare_batch(number):
                present = (self.group.generation, planner.plan, self.feed.exchanges)
                if loaded is None or place != present:
                    try:
                        assert progress.in_step == 0, "a step begins where the one before has ended"
                        loaded, place = load(progress.consumed, planner.plan), present
                        with loop.waiting():
                            self.feed.compare()
                    except PeersLostError:
                        loaded = None
                        continue
                batch = next(loaded)
                if self.accumulation.at_first_micro_batch:
                    while loaded.index > 0:
                        # The program has left out the step at an earlier part of it.
                        progress.consumed += loaded.step.plan.local_bsz
                        batch = next(loaded)
                    planner.step_plan = loaded.step.plan
                    self.accumulation.use_step(loaded.step)
                progress.in_step += self.group.replicas * loaded.step.plan.local_bsz
                loop.deliver()
                self.steps.begin_batch()
                epoch = progress.epoch
                yield batch
                self.program.rates.check()
                self.program.rates.begin_batch()
                loop.request()
                if progress.epoch != epoch:
                    raise WorkerError(
                        f"trainer.step({epoch}) was called inside the loop over trainer.dataloader(), which "
                        f"ends epoch {epoch}: call it once, after the loop"
                    )
        except GeneratorExit:
            if loop.number == number:
                self._leave_loop(early=True, by_program=True)
            raise
        finally:
            loop.request()
            self.program.rates.begin_epoch()
            self.telemetry.step_timer.pause()

    def _begin_loop(self) -> int:
        """Begin a loop of the program, and return its number."""
        self.program.rates.begin_epoch()
        self.steps.end_batch()
        self._leave_loop(early=True)
        self.departures.wait()
        self.evaluations.announce_training()
        if self.loop.overtaken_states is not None:
            self.program.load_registered(self.loop.overtaken_states)
            self.loop.overtaken_states = None
        self.progress.in_step = 0
        number = self.loop.begin(self.progress.epoch)
        self.accumulation.restart_step()
        self.telemetry.step_timer.pause()
        self.spent.leave_step()
        return number

    def _prepare_batch(self, number: int) -> bool:
        """Do what comes before the next batch, and return whether there is one in this epoch."""
        steps, progress = self.steps, self.progress
        while True:
            self.loop.require_last(number)
            steps.end_batch()
            if self.accumulation.at_first_micro_batch and not self.failure.is_discarded:
                # Includes batches for which the program made no step.
                progress.end_step()
            try:
                if self.failures.limit is not None:
                    self.generations.retry_in_smaller_batches()
                elif self.group.has_failed:
                    self.generations.recover()
                elif self.accumulation.at_first_micro_batch:
                    self._at_step_boundary()
                if self.loop.overtaken_epoch is not None:
                    self._leave_loop(early=False)
                    return False
                if self.accumulation.at_first_micro_batch:
                    if seconds := self.state.keep_copy():
                        self.telemetry.step_timer.leave_out(seconds)
                        self.spent.add(Cause.CHECKPOINT, seconds)
                    seed_generators(self.feed.seed, progress.consumed, self.feed.rank)
                    if self.feed.is_stream:
                        self._follow_stream()
                    if self.job.finished or progress.progress >= self.feed.progress_at(self.loop.epoch + 1):
                        self.loop.end_of_epoch(progress.epoch)
                        self._leave_loop(early=False)
                        return False
                    steps.begin_step()
            except PeersLostError:
                continue
            return True

    def _at_step_boundary(self) -> None:
        """Finish training, save, change the generation or exit if the replicas have agreed to."""
        agreed = self.steps.agreed
        self.program.trained.record()
        self.has_grown = self.has_grown or self.group.replicas > 1
        if agreed.finish and not self.job.finished:
            self.steps.finish_together()
            self._save_final()
            return
        if agreed.exit and not self.group.is_elastic:
            self._save_and_exit()
        if agreed.exit or agreed.change:
            if agreed.change and not self.has_grown:
                # What the program does may fail on several replicas, which then costs no steps.
                self._save()
            self.generations.change()
            return
        if agreed.save and not self.optimizer.awaits_comparison:
            agreed.save = False
            self._save()
            self.telemetry.step_timer.pause()
        if agreed.replan and self.feed.is_stream and self.loop.is_inside:
            # Its epochs may be long, or have no end.
            self._replan()
            self.planner.postpone()
            self.telemetry.step_timer.pause()

    def _save(self, *, final: bool = False) -> None:
        with self.spent.measured(Cause.CHECKPOINT):
            self.state.save(final=final)

    def _follow_stream(self) -> None:
        """Learn the length of a stream when its first pass has ended, and compare what the replicas read.

        They compare after each of the first three steps of a generation, and then more and more rarely.
        """
        self.feed.finished_step(ends_by_epochs=self.job.settings.scale_invariant_steps is None)
        self.progress.target = self.job.target(self.feed)
        steps = self.progress.step - self.loop.step_at_begin
        if steps == 3 or steps.bit_count() == 1 or (steps and steps % COMPARISON_STEPS == 0):
            self.feed.compare_records()

    # -- epochs -------------------------------------------------------------------------------------------

    # The end of an epoch is an exchange among the replicas. An iterator that is left, by `break` or an error,
    # cannot make it: it is only deleted. So that epoch ends when the program next uses the trainer, or ends.

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs until training ends, and end each before the next."""
        self._require_outside_epoch()
        self.end_left_epoch()
        while not self.job.finished:
            self._require_outside_epoch()
            self._epoch, self._is_inside_epoch, self._is_complete = self.progress.epoch, True, False
            try:
                yield self._epoch
                self._is_complete = True
            finally:
                self._is_inside_epoch = False
            self.end_left_epoch()

    def _require_outside_epoch(self) -> None:
        if self._is_inside_epoch:
            raise WorkerError(
                f"a loop over trainer.epochs() began inside epoch {self._epoch} of another one: use one loop "
                "over epochs, and inside it one loop over trainer.dataloader(dataset)"
            )

    @property
    def left_epoch(self) -> int | None:
        """The epoch whose body the program has left, and which has not ended; else None."""
        return None if self._is_inside_epoch else self._epoch

    def end_left_epoch(self) -> None:
        """End the epoch whose body the program has left, if `trainer.step` has not ended it already.

        An epoch that was left before its first batch has not begun, so it does not end.
        """
        epoch = self.left_epoch
        if epoch is None:
            return
        self._epoch = None
        has_begun = self.loop.has_begun(epoch, self.progress.step)
        if self._is_in_epoch(epoch) and (self._is_complete or has_begun):
            self.end_epoch(epoch)

    def end_epoch(self, epoch: int) -> None:
        """End the current epoch: replan if the replicas have agreed to, or save the end of training."""
        loop, progress = self.loop, self.progress
        self.program.rates.begin_epoch()
        self.steps.end_batch()
        self._leave_loop(early=True)
        # Of several optimizers, a step without its last micro-batch has changed no weights.
        self.undo.forget()
        self.departures.wait()
        if epoch == loop.overtaken_epoch:
            # The state is already that of the end of this epoch.
            loop.overtaken_epoch = None
            if self.job.finished:
                self._save_final()
            return
        if epoch != progress.epoch:
            raise WorkerError(
                f"trainer.step({epoch}) was called, but the current epoch is {progress.epoch}: use `for "
                "epoch in trainer.epochs(...)`, which ends each epoch itself; or start with the epoch that "
                "program_reentry returns, and call trainer.step(epoch) once per epoch"
            )
        loop.require_loop_in(epoch, progress.step, is_finished=self.job.finished)
        progress.epoch += 1
        try:
            self._begin_next_epoch()
        except PeersLostError:
            # The members enter another generation at the beginning of the next epoch.
            return

    def _begin_next_epoch(self) -> None:
        """Do what the replicas have agreed on, between an epoch and the next one."""
        self.evaluations.announce_passed([self.progress.epoch - 1, math.inf])
        self.accumulation.restart_step()
        self.program.trained.record()
        if self.job.finished:
            self._save_final()
            return
        if self.steps.agreed.replan:
            self._replan()
        self._at_step_boundary()

    def _replan(self) -> None:
        """Choose the batch plan again. A collective call."""
        self.steps.agreed.replan = False
        self.planner.replan(self.optimizer, self.telemetry.step_timer)
        self.steps.use_plan()

    # -- a loop -------------------------------------------------------------------------------------------

    def _leave_loop(self, *, early: bool, by_program: bool = False) -> None:
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
                expected=self.steps.finish_reason is not None or self.job.finished,
            )
        self.loop.leave(by_program=by_program)

    def _is_in_epoch(self, epoch: int) -> bool:
        """Whether the program has not ended `epoch` yet."""
        return epoch in (self.progress.epoch, self.loop.overtaken_epoch)

    # -- training -----------------------------------------------------------------------------------------

    def finish(self, reason: str) -> None:
        """End training: at once on one replica, else after the next step for which the replicas agree."""
        self.steps.leave()
        if not self.job.finished:
            if self.group.replicas == 1:
                self.progress.finish_reason = reason
                self._save_final()
            else:
                self.steps.request_finish(reason)
        self.steps.mark_finish()

    def end_restored_training(self) -> None:
        """Save the end of training, if the state that was restored is finished, and the end is not saved.

        Members that were saving it when a replica was lost do so again, with the replica that replaces it.
        """
        if not self.checkpointing.has_final:
            self._save_final()
        else:
            self.channel.send(TrainingSaved())
        if self.group.is_main:
            progress = self.progress
            reason = f" ({progress.finish_reason})" if progress.finish_reason else ""
            print(
                f"adascale: training has already finished, at step {progress.step}, "
                f"progress {progress.progress:,.0f}{reason}",
                flush=True,
            )

    def _save_final(self) -> None:
        """Save the end of training, once. If members are lost meanwhile, the others save it."""
        if self.checkpointing.has_final:
            return
        self.telemetry.report(self.planner.plan, self.planner.bounds)
        while True:
            try:
                self.comparison.compare(self.progress.step)
                self._save(final=True)
                break
            except PeersLostError:
                self.generations.recover()
        self.loop.overtaken_epoch = None
        self.feed.close()
        self.channel.send(TrainingSaved())
        if self.group.generation == 0:
            # The rest of the program, for example an evaluation, has no step at which it could exit.
            self.shutdown_request.uninstall()

    # -- the process --------------------------------------------------------------------------------------

    def end_of_program(self) -> AdaScaleError | None:
        """Report the last step, and return an error if training is not finished, else None."""
        self.telemetry.report_last(self.planner.plan, self.planner.bounds)
        if self.steps.has_stepped and not self.checkpointing.has_final:
            try:
                self.state.require_finite_weights()
            except NonFiniteWeightsError as error:
                return error
        try:
            self._save_end_of_left_epoch()
        except AdaScaleError as error:
            return error
        unfinished = self.job.unfinished
        self.evaluations.announce_passed([math.inf])
        if self.steps.finish_reason is not None and not self.job.finished:
            return self.steps.finish_alone()
        try:
            self._leave_loop(early=True)
            self.departures.wait(lambda: self.shutdown_request.is_made)
        except ReplicationError as error:
            return error
        if unfinished is None:
            return None
        return WorkerError(
            f"the program ended at {unfinished}. Train until trainer.finished is true, or call "
            "trainer.finish(reason) to end training earlier"
        )

    def _save_end_of_left_epoch(self) -> None:
        """End the last epoch of a program that has left it, and save the end of training if it is reached."""
        epoch = self.left_epoch
        if epoch is None or not self._is_in_epoch(epoch) or self.checkpointing.has_final:
            return
        if epoch != self.loop.overtaken_epoch:
            self.progress.epoch += 1
        if self.job.finished:
            self._leave_loop(early=True)
            self.departures.wait()
            self._save_final()

    def _save_and_exit(self) -> NoReturn:
        """Save, and end the program so that it can be started again. Without an agent."""
        self.telemetry.report(self.planner.plan, self.planner.bounds)
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


def _require_sharded(group: ReplicaGroup, parts: ProgramParts, scaler: torch.amp.GradScaler | None) -> None:
    """Check what a program passes whose replicas have several processes."""
    if parts.are_several:
        raise WorkerError(
            f"program_reentry got several models or optimizers, and a replica has {group.processes} "
            "processes (processesPerReplica): pass one sharded model and its optimizer, or leave out "
            "processesPerReplica"
        )
    if scaler is not None:
        raise WorkerError(
            f"program_reentry got a GradScaler, and a replica has {group.processes} processes "
            "(processesPerReplica): use bfloat16, which needs none, as "
            "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
        )
    require_sharded(parts.model, group)
