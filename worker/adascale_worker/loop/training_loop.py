"""The trainer's part of the program's training loop: optimizer steps, step boundaries, epochs.

The program iterates over `epoch`, calls `optimizer.step()`, which `optimizer_step` replaces, and calls
`end_epoch`. Between two steps all replicas do what they have agreed on: save, enter another generation, or
save and exit. A step in which members are lost is discarded before the optimizer changes anything. The
remaining members then enter another generation, where the same samples are delivered again. So do all members
if a batch does not fit into the memory of one, with a lower limit of the local batch size.
"""

from __future__ import annotations

import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

import torch

from adascale_core.errors import AdaScaleError
from adascale_core.failures.exit_codes import EXIT_REENTRY
from adascale_core.messages.channel import Assignment
from adascale_worker.adascale import AdaScale
from adascale_worker.batches.seeding import seed_generators
from adascale_worker.batches.stream import SampleStream
from adascale_worker.errors import (
    NonFiniteWeightsError,
    ReplicationError,
    WorkerError,
    error_of_kind,
    kind_of_error,
)
from adascale_worker.gradients.accumulation import Accumulation
from adascale_worker.gradients.data_parallel import DataParallelModel
from adascale_worker.gradients.loss_scaling import UnregisteredScaler, scaler_of
from adascale_worker.gradients.model_set import ModelSet
from adascale_worker.gradients.out_of_memory import release_memory
from adascale_worker.loop.agreement import Agreement, Requests
from adascale_worker.loop.checks import (
    BatchChecks,
    LoopChecks,
    check_optimizer_parameters,
)
from adascale_worker.loop.departures import LoopDepartures
from adascale_worker.loop.evaluation_sequence import EvaluationSequence
from adascale_worker.loop.finish_request import FinishRequest
from adascale_worker.loop.memory_shortage import MemoryShortage
from adascale_worker.membership.generations import LeaveError, Membership
from adascale_worker.membership.links import Formation, PeersLostError, StateNumber
from adascale_worker.process.exit import FastExit
from adascale_worker.process.shutdown_request import ShutdownRequest
from adascale_worker.process.user_code import calling_line
from adascale_worker.program.buffers import ModelBuffers
from adascale_worker.program.weight_checks import FiniteWeights, WeightComparison
from adascale_worker.state.components import TrainerComponents
from adascale_worker.state.exchange import StateExchange
from adascale_worker.state.program import ProgramState
from adascale_worker.state.saving import StateSaving
from adascale_worker.state.training import TrainingState

SLOW_STEP = 0.05
"""Seconds per step from which on the replicas exchange requests on every step."""

MAX_SKIPPED_STEPS = 100
"""Steps in a row whose gradients are not finite, after which training fails."""


class TrainingLoop:
    """What happens in optimizer steps, between them, and at the end of an epoch.

    Args:
        trainer: the parts of the trainer.
        program: the parts of the program.
        model: makes the program's model data-parallel.
        buffers: puts the model's buffers back if a step is discarded. None if a subclass puts all state back.
        accumulation: counts the micro-batches of a step.
        checks: checks the steps of the program's loop.
        membership: enters generations. None without an agent.
        adopt_settings: called with the environment variables of each generation.
        shutdown_request: requests the exit of all replicas.
        fast_exit: ends the process.
    """

    def __init__(
        self,
        trainer: TrainerComponents,
        program: ProgramState,
        model: DataParallelModel | ModelSet,
        buffers: ModelBuffers | None,
        accumulation: Accumulation,
        checks: LoopChecks | BatchChecks,
        membership: Membership | None,
        adopt_settings: Callable[[Mapping[str, str | None]], None],
        shutdown_request: ShutdownRequest,
        fast_exit: FastExit,
    ) -> None:
        self.adascale = program.optimizer
        self._trainer = trainer
        self._program = program
        self._rates = program.rates
        self._model = model
        self._buffers = buffers
        self._membership = membership
        self._adopt_settings = adopt_settings
        self._accumulation = accumulation
        self._checks = checks
        self._weights = FiniteWeights(program.optimizer, trainer.settings.max_nonfinite_steps, trainer.group)
        self.comparison = WeightComparison(program.model, program.optimizer, trainer.group)
        self._departures = LoopDepartures(trainer.group)
        trainer.telemetry.measure_sync = model.sync_time
        self._state = TrainingState(trainer, program)
        self._exchange = StateExchange(trainer, program, self._state)
        self._saving = StateSaving(trainer, program, self._state, self._weights)
        self._finish_request = FinishRequest(trainer, self._saving)
        self._shortage = MemoryShortage(trainer, model, membership)
        self.evaluations = EvaluationSequence(trainer)
        self._shutdown_request = shutdown_request
        self._fast_exit = fast_exit
        self._agreement = Agreement()
        self._unregistered_scaler = UnregisteredScaler(scaler_of(program.registered.values()))
        self.made_step = False
        """Whether the last `optimizer.step()` has changed the weights."""
        self.step_calls = 0
        """Calls of `optimizer.step()` so far."""
        self._skipped_steps = 0
        self._stepped_at = float("-inf")
        self._steps_are_slow = True
        self._delivered = 0
        self._position_after_step = 0
        """Samples consumed after the last step that this process has made."""
        self._inside_epoch = False
        self._current_epoch: object = None
        self._is_looping = False
        """Whether a loop over `epoch` has begun and not ended."""
        self._left_loop = False
        """Whether the program has left that loop before its end, and not called `end_epoch`."""
        self._ended_epoch: int | None = None
        self._step_at_end = 0
        """The last step at the end of the last epoch."""
        self._epoch_of_program = 0
        """The epoch of the program's loop."""
        self._overtaken_epoch: int | None = None
        """The epoch of the program's loop, if a member had ended it, and this one has copied its state."""
        self._overtaken_states: dict[str, dict[str, Any]] | None = None
        """The states of the registered objects then: the program changes them again after its loop."""
        self._epochs_behind = 0
        """How many epochs fewer than `progress.epoch` the program has ended, if it has batches of its own."""
        self._step_at_begin = 0
        """The last step before the current epoch of such a program."""
        self.was_restored = False
        """Whether training has continued from a checkpoint, or from the state of other members."""
        trainer.group.save_alone = self._save_in_thread
        trainer.checkpointing.is_terminated = lambda: shutdown_request.received is not None
        self._assignment: Assignment | None = None
        self._state_generation: int | None = None
        """The generation in which the state was last equal on all members. None without a state."""
        model.handles_shortage = self._handle_shortage
        model.local_bsz = lambda: trainer.planner.plan.local_bsz

    @property
    def inside_epoch(self) -> bool:
        """Whether the program is inside its data loop."""
        return self._inside_epoch

    @property
    def is_overtaken(self) -> bool:
        """Whether the state is that of another member, whose program is in a later epoch than this one."""
        return self._overtaken_states is not None

    @property
    def has_stepped(self) -> bool:
        """Whether this process has made a step."""
        return self._stepped_at > float("-inf")

    # -- generations --------------------------------------------------------------------------------------

    def load(self) -> bool:
        """Restore the last checkpoint on all ranks, and return whether there is one. A collective call.

        Rank 0 reads it, and sends the state to the others.

        Raises:
            CheckpointError: no intact checkpoint is left, or it was saved by another program.
            PeersLostError: members are lost, or this generation could not replace the checkpoint.
        """
        trainer, group = self._trainer, self._trainer.group
        failure: tuple[str, str] | None = None
        state = None
        if group.is_main:
            self._exchange.release_memory()
            try:
                # In the first generation the storage's address may be wrong, so an error is raised at once.
                state = trainer.checkpointing.load(wait=trainer.generation > 1)
                self._require_later_generation()
                if state is not None:
                    self._state.load_state_dict(state)
                    trainer.feed.begin_from_checkpoint()
                else:
                    self._exchange.keep_initial_weights()
            except AdaScaleError as error:
                failure = kind_of_error(error), str(error)
        # More steps may be required now than when the end of training was saved.
        is_final = state is not None and trainer.checkpointing.has_restored_final and trainer.finished
        is_restored, is_final, failure = group.broadcast((state is not None, is_final, failure))
        if failure is not None:
            raise error_of_kind(*failure)
        trainer.checkpointing.keep_final(is_final=is_final)
        if not is_restored:
            self._program.trained.require_equal()
        # Also without a checkpoint: each rank may have made another seed, or other registered objects.
        if group.replicas > 1:
            self._transfer([0])
        if not is_restored:
            trainer.planner.begin(trainer.settings.bounds)
        self._program.trained.begin_generation(self._program.trained.encoded())
        self._use_trained()
        return bool(is_restored)

    def _require_later_generation(self) -> None:
        """Leave a generation that is earlier than that of the restored checkpoint, which it cannot replace.

        Another controller has continued the job, such as `adascale run` on the checkpoints of a cluster.

        Raises:
            PeersLostError: the service has to begin a later generation.
        """
        trainer, membership = self._trainer, self._membership
        later = trainer.checkpointing.later_generation(self._state.info())
        if later is None or membership is None:
            return
        print(
            f"adascale: the last checkpoint is of generation {later}, and this is generation "
            f"{trainer.generation}: the job was continued elsewhere. It continues here in a later generation",
            flush=True,
        )
        membership.report_saved(later)
        raise PeersLostError

    def prepare_to_receive(self) -> None:
        """Prepare memory for the state of the other replicas and for gradients, before they wait."""
        if self._model.device.type == "cpu":
            self._exchange.prepare()
            self._model.prepare()

    def begin(self) -> None:
        """Use the restored state, or the initial state, with the present replicas. A collective call."""
        trainer = self._trainer
        trainer.planner.adapt(trainer.settings.bounds, self.adascale, trainer.telemetry.step_timer)
        self._apply_plan()
        self._step_at_begin = trainer.progress.step
        trainer.telemetry.begin_generation(trainer.settings.bounds)

    def enter_generation(self) -> None:
        """Enter the newest generation of this trainer, and get the state of its members."""
        membership = self._membership
        assert membership is not None
        try:
            membership.join(
                lambda: self.state_number, self._release_group, self._synchronize, self._save_before_leaving
            )
        except LeaveError:
            self._exit(EXIT_REENTRY)

    @property
    def state_number(self) -> StateNumber | None:
        """The number of the state in memory; None without a state."""
        if self._state_generation is None:
            return None
        progress = self._trainer.progress
        return self._state_generation, progress.step, progress.consumed

    def _release_group(self) -> None:
        self._model.disconnect()
        self._trainer.group.destroy()

    def _synchronize(self, assignment: Assignment, formation: Formation) -> None:
        """Give all members of a generation whose group is formed the same state."""
        trainer, group = self._trainer, self._trainer.group
        self._assignment = assignment
        self._adopt_settings(assignment.env)
        if group.replicas > 1:
            check_optimizer_parameters(self._program.model, self.adascale.optimizer, group.replicas)
            # Before more memory is mapped for the exchange of gradients.
            self.adascale.discard_comparison()
        self._model.connect()
        self.adascale.change_model(self._model.ddp)
        if formation.sources:
            self._transfer(formation.sources)
            if formation.states[group.rank] is None:
                self.was_restored = True
        else:
            self.was_restored = self.load()
        self._state_generation = assignment.generation
        self._exchange.end()
        # What a member decides between two steps does not change the number of its state.
        trained = self._program.trained
        rows = group.gather([trainer.progress.finish_reason, trained.encoded()])
        trainer.progress.finish_reason = next((reason for reason, _ in rows if reason is not None), None)
        trained.begin_generation(rows[formation.sources[0] if formation.sources else 0][1])
        self._use_trained()
        trainer.checkpointing.begin_generation()
        self._agreement = Agreement()
        self._checks.begin_generation()
        self._accumulation.begin_generation()
        self._overtake()
        self._announce_place()
        self.begin()
        if self._current_epoch is not None:
            # Batches of the new plan come from the trainer, so the program uses their size.
            trainer.planner.acknowledge()
        self.adascale.flags = self._requests().flags()

    def _use_trained(self) -> None:
        """Use the parameters that are trained in the restored state."""
        self._model.use_trained()
        self.adascale.change_model(self._model.ddp)
        self._checks.observe()

    def _transfer(self, sources: Sequence[int]) -> None:
        """Copy the state of the ranks `sources`, which is the same, to all others."""
        nodes = (
            [member.node or member.address for member in self._assignment.members]
            if self._assignment is not None
            else [""] * self._trainer.group.replicas
        )
        if self._exchange.copy(sources, nodes):
            self._delivered = self._trainer.progress.consumed

    def _overtake(self) -> None:
        """Find out whether the copied state is in a later epoch than the program's loop."""
        if self._current_epoch is not None and self._trainer.progress.epoch > self._epoch_of_program:
            self._overtaken_epoch = self._epoch_of_program
            self._overtaken_states = deepcopy(self._program.registered_states())

    def _announce_place(self) -> None:
        if self._is_looping and self._overtaken_epoch is None:
            self.evaluations.announce_training()
        epoch, has_looped = self._trainer.progress.epoch, self._current_epoch is not None
        if self._is_looping or (has_looped and epoch <= self._epoch_of_program):
            self._departures.begin_generation(self._epoch_of_program, inside=self._is_looping)
        else:
            self._departures.begin_generation(epoch, inside=True)

    def _leave_loop(self, *, early: bool) -> None:
        """Announce that the program has left its data loop, if it is in one."""
        if self._is_looping:
            self._is_looping = False
            self._departures.leave(
                self._epoch_of_program,
                self._trainer.progress.step,
                calling_line(),
                early=early,
                expected=self._finish_request.reason is not None or self._trainer.finished,
            )

    def announce_failure(self) -> None:
        """Announce that an error of the program ends this replica, and so its loop."""
        self._departures.fail()

    def explain_stall(self) -> str | None:
        """Return an error message if the present step cannot end because others have left their loop."""
        if self.evaluations.is_evaluating or self._trainer.group.has_failed:
            return None
        failure = self._program.trained.find_failure(self._trainer.progress.step)
        if failure is not None or not self._inside_epoch:
            return failure
        self.evaluations.announce_training(is_waiting=True)
        return self._departures.find_failure(self._trainer.progress.step)

    def _recover(self) -> None:
        """Discard the step in which members were lost, and enter another generation."""
        self._discard_step()
        if self._model.lacks_memory:
            release_memory()
        self.enter_generation()

    def _discard_step(self) -> None:
        """Undo what an unfinished step has changed, and deliver its samples again."""
        group = self._trainer.group
        try:
            self._accumulation.restart_step()
        except RuntimeError as error:
            if not group.is_failure(error):
                raise
            self._accumulation.restart_step()
        self._restore_step()
        self._checks.discarded_step()
        self._delivered = self._trainer.progress.consumed

    def _restore_step(self) -> None:
        """Put back what an unfinished step has changed."""
        if self._buffers is not None:
            self._buffers.restore()

    def handle_communication_error(self, error: BaseException) -> bool:
        """Whether `error` of a backward pass or a step means that members are lost; then it is discarded."""
        if self._trainer.group.is_failure(error):
            self._model.has_missed_exchange = True
            return True
        return False

    def handle_backward_error(self, error: BaseException) -> bool:
        """Whether `error` of a backward pass means that its step is discarded, and its samples repeated."""
        return self.handle_communication_error(error) or self._handle_shortage(error)

    def skips_backward(self) -> bool:
        """Whether a backward pass is not made: the step is discarded, and its gradients are zero."""
        return self._model.lacks_memory

    # -- batches that do not fit into memory --------------------------------------------------------------

    def _handle_shortage(self, error: BaseException) -> bool:
        """Whether `error` means that a batch does not fit, and its samples can follow in smaller batches."""
        return self._inside_epoch and self._shortage.handle(error)

    def _retry_in_smaller_batches(self) -> None:
        """Deliver the samples of the discarded step again, in batches that may fit."""
        trainer = self._trainer
        bounds = trainer.settings.bounds.with_limit(self._shortage.take_limit())
        self._discard_step()
        self._model.has_missed_exchange = self._model.lacks_memory = False
        trainer.settings = replace(trainer.settings, bounds=bounds)
        release_memory()
        self.begin()
        trainer.planner.acknowledge()

    def leave_short_of_memory(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Prepare the end of the process after an error of the program that the lack of memory has caused.

        With an agent, another process continues with smaller batches, from the state of the others. Rank 0
        saves its state, because the batch may have been too large for all of them.

        Returns:
            whether it has, so that the process can end.
        """
        if self._membership is None or not isinstance(error, Exception) or not self._is_training():
            return False
        if not self._model.lacks_memory and self._shortage.limit_after(error) is None:
            return False
        group = self._trainer.group
        group.fail()  # The others need not wait until this process has ended.
        if group.is_main:
            traceback.clear_frames(trace)
            release_memory()
            try:
                self._discard_step()
                self._saving.save_alone()
            except (RuntimeError, MemoryError) as failure:
                print(f"adascale: the state was not saved: {failure}", file=sys.stderr)
        return True

    def _is_training(self) -> bool:
        """Whether the program makes steps, in the trainer's loop, which an error has ended, or in its own."""
        return self._left_loop or (self._current_epoch is None and self._program.model.training)

    def _change_generation(self) -> None:
        """Do what the members have agreed on: terminated members leave, or all enter a newer generation."""
        membership, group, assignment = self._membership, self._trainer.group, self._assignment
        assert membership is not None
        assert assignment is not None
        is_terminated = self._shutdown_request.received is not None
        rows = group.gather_integers([is_terminated, membership.newest_generation])
        leaving = {rank for rank, row in enumerate(rows) if row[0]}
        if leaving:
            self._report()
            if len(leaving) == group.replicas:
                # Else the others keep the state.
                self._saving.save_if_possible()
            if is_terminated:
                self._leave()
            membership.leave_without({assignment.members[rank].replica for rank in leaving})
        else:
            membership.wait_for_generation(max(row[1] for row in rows))
            if all(row[0] for row in group.gather_integers([membership.is_released])):
                self._saving.save_if_possible()
            if membership.is_released:
                self._report()
                self._leave()
        self.enter_generation()

    def _save_before_leaving(self) -> None:
        """Save the state of a trainer that waits for a generation, and was terminated."""
        if self._state_generation is not None:
            self._saving.save_alone()

    def _save_in_thread(self) -> bool:
        """Save the state in a thread while the main thread cannot leave a collective call.

        Returns:
            Whether it is saved. It is not between a step and what the program does after it.
        """
        trainer = self._trainer
        has_state = self._state_generation is not None and trainer.checkpointing.enabled
        if not has_state or self._position_after_step > trainer.progress.consumed:
            return False
        self._restore_step()
        return self._saving.save_alone()

    def _leave(self) -> NoReturn:
        assert self._membership is not None
        self._membership.close()
        self._exit(EXIT_REENTRY)

    def _exit(self, code: int) -> NoReturn:
        trainer = self._trainer
        if self._membership is not None and self._shutdown_request.received is not None:
            self._membership.report_terminated()
        trainer.telemetry.close()
        self._release_group()
        # The handler may end the program.
        self._fast_exit.code = code
        self._shutdown_request.call_program_handler()
        self._fast_exit.exit(code)

    def _apply_plan(self) -> None:
        """Use the planner's batch plan from the next step on."""
        planner = self._trainer.planner
        self._accumulation.set_plan(planner.plan, planner.scale)
        self._model.begin_timing()

    # -- optimizer steps --------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """Count a micro-batch, and after the last one of a step update the parameters.

        Raises:
            StaleBatchSizeError: the program has not read the current local batch size.
            WorkerError: the loop does not make its steps as the trainer requires, or the weights of the
                replicas differ or are not finite.
        """
        self._begin_call()
        if self._model.has_missed_exchange:
            self._discard_step()
            return
        self._accumulation.put_back()
        self._checks.check_step(inside_epoch=self._inside_epoch)
        if not self._accumulation.advance():
            return
        trainer, flags = self._trainer, self._requests().flags()
        self._checks.count_passes(trainer.planner.plan.accumulation)
        try:
            # The exchange must have succeeded before anything is changed.
            adascale = self._require_one_optimizer()
            # In this order, because other replicas may have exchanged the statistics in backward() already.
            adascale.exchange_statistics()
            adascale.flags = flags
            self._accumulation.check_exchange()
            trainer.group.wait_for_device()
            self._model.follow_trained()
            trainer.checkpointing.before_step()
            adascale.step()
        except (RuntimeError, PeersLostError) as error:
            if not self.handle_communication_error(error):
                raise
            self._discard_step()
            return
        self.made_step = True
        # What this step has changed stays, also if members are lost before the next.
        self._begin_step()
        trainer.planner.finished_step()
        self._count_step(flags)

    def _require_one_optimizer(self) -> AdaScale:
        assert isinstance(self.adascale, AdaScale), "several optimizers have a loop of their own"
        return self.adascale

    def _begin_call(self) -> None:
        """Check and record a call of `optimizer.step()`."""
        self.step_calls += 1
        self.made_step = False
        self.evaluations.is_evaluating = False
        self._shutdown_request.reinstall()
        self._unregistered_scaler.check()
        self._trainer.planner.require_acknowledged()

    def _count_step(self, flags: Sequence[float]) -> None:
        """Count a step that was made, and agree with the other replicas on what to do after it.

        Args:
            flags: what this replica requests.
        """
        trainer, group = self._trainer, self._trainer.group
        sums = self.adascale.flags_sum
        self._skipped_steps = 0
        trainer.progress.advance(self.adascale.gain(), self._delivered)
        self._position_after_step = self._delivered
        trainer.telemetry.step(trainer.planner.plan, trainer.progress, self.adascale)
        if self._membership is not None:
            self._membership.report_step()
        try:
            if sums is None and self._agreement.agree_each_step:
                # AdaScale does not measure every step, and the next measured one may be a minute away.
                sums = group.sum(flags)
            self._agreement.update(sums, group.replicas)
            if sums is not None:
                trainer.checkpointing.is_unsaved = self._agreement.is_unsaved
            now = time.monotonic()
            self._steps_are_slow = now - self._stepped_at >= SLOW_STEP
            self._stepped_at = now
            self._check_weights()
        except PeersLostError:
            # The step is made. What follows it waits for the next generation.
            return

    @property
    def steps(self) -> int:
        """Steps that were made so far."""
        return self._trainer.progress.step

    @property
    def awaits_micro_batches(self) -> bool:
        """Whether the present micro-batch does not complete a step, or its step will be discarded."""
        return self._model.has_missed_exchange or not self._accumulation.at_last_micro_batch

    def skip_step_of(self, _optimizer: torch.optim.Optimizer) -> None:
        """Count the samples of a step whose gradients are not finite, without making it.

        Raises:
            WorkerError: see `optimizer_step`.
            NonFiniteWeightsError: too many steps in a row are skipped.
        """
        self._checks.check_step(inside_epoch=self._inside_epoch)
        self._accumulation.advance()
        self._count_skipped_step()

    def _count_skipped_step(self) -> None:
        self._trainer.telemetry.step_timer.pause()
        self.made_step = False
        self._skipped_steps += 1
        if self._skipped_steps == MAX_SKIPPED_STEPS:
            raise NonFiniteWeightsError(
                f"the gradients of {MAX_SKIPPED_STEPS} steps in a row were not finite, and the GradScaler "
                f"skipped them, after step {self.steps}: look for a division by zero or the logarithm of "
                "a number that is not positive in the loss, and try a smaller learning rate"
            )

    def _check_weights(self) -> None:
        step = self._trainer.progress.step
        self._weights.check_step(step, gradients_are_finite=self.adascale.gradients_are_finite)
        if self._agreement.compare_weights:
            self._agreement.compare_weights = False
            self.comparison.compare(step, self._checks.passes_per_batch)
            self._withdraw_requests()

    def _requests(self) -> Requests:
        """What this replica requests. Some requests are made by rank 0 only."""
        trainer = self._trainer
        signaled = self._shutdown_request.received is not None
        if signaled and self._membership is not None:
            self._membership.report_terminated()
        finish = self._finish_request.reason is not None
        change = self._membership is not None and self._membership.change_is_pending
        if not trainer.group.is_main:
            return Requests(exit=signaled, finish=finish, change=change)
        return Requests(
            exit=signaled,
            change=change,
            save=trainer.checkpointing.is_due,
            replan=trainer.planner.is_due,
            agree_each_step=self._steps_are_slow,
            finish=finish,
            compare_weights=self.comparison.is_due,
            is_unsaved=trainer.checkpointing.last_is_unsaved,
        )

    def _at_step_boundary(self) -> None:
        """Finish training, save, change the generation or exit if the replicas have agreed to.

        Raises:
            PeersLostError: members are lost.
        """
        self._program.trained.record()
        if self._agreement.finish and not self._trainer.finished:
            self._finish_request.agree()
            self._save_final()
            return
        if self._membership is None and self._agreement.exit:
            self._save_and_exit()
        if self._agreement.exit or self._agreement.change:
            self._change_generation()
            return
        if self._agreement.save and not self.adascale.awaits_comparison:
            self._agreement.save = False
            self._saving.save()
            self._withdraw_requests()
            self._trainer.telemetry.step_timer.pause()

    def _withdraw_requests(self) -> None:
        """Replace requests that are fulfilled, so that the next all-reduce does not sum them again."""
        self.adascale.flags = self._requests().flags()

    # -- epochs -----------------------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The number of the epoch that the program is in or begins next, from 0."""
        return self._trainer.progress.epoch - self._epochs_behind

    def is_in_epoch(self, epoch: int) -> bool:
        """Whether the program has not ended `epoch` yet."""
        return epoch in (self.current_epoch, self._overtaken_epoch)

    def require_epoch(self) -> None:
        """Check that the current epoch has not ended.

        Raises:
            WorkerError: all batches of the epoch were delivered, and `end_epoch` was not called.
        """
        epoch = self._trainer.progress.epoch
        if self._ended_epoch == epoch and not self._trainer.checkpointing.has_final:
            raise WorkerError(
                f"trainer.dataloader() was called again after all batches of epoch {epoch}: iterate over it "
                "once in each epoch of `for epoch in trainer.epochs(...)`, or call "
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
        end = trainer.feed.progress_at(progress.epoch + 1)
        batches: Iterator[Any] | None = None
        place = (trainer.generation, planner.plan)
        self._rates.begin_epoch()
        self._rates.check(inside_epoch=False)
        self._end_batch()
        self._leave_loop(early=True)
        self._departures.wait()
        self.evaluations.announce_training()
        self._epoch_of_program = progress.epoch
        self._is_looping, self._left_loop = True, False
        if self._overtaken_states is not None:
            self._program.load_registered(self._overtaken_states)
            self._overtaken_states = None
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
                self._end_batch()
                at_boundary = self._accumulation.at_first_micro_batch
                if at_boundary and not self._model.has_missed_exchange:
                    # Includes batches for which the program made no step.
                    progress.consumed = self._delivered
                if self._shortage.awaits_retry:
                    self._retry_in_smaller_batches()
                elif trainer.group.has_failed:
                    self._recover()
                elif at_boundary:
                    try:
                        self._at_step_boundary()
                    except PeersLostError:
                        continue
                if self._overtaken_epoch is not None:
                    self._leave_loop(early=False)
                    return
                if self._accumulation.at_first_micro_batch:
                    seed_generators(trainer.feed.seed, progress.consumed, trainer.group.rank)
                    if trainer.finished or progress.progress >= end:
                        self._ended_epoch = progress.epoch
                        self._leave_loop(early=False)
                        return
                    try:
                        self._begin_step()
                    except PeersLostError:
                        continue
                if batches is None or place != (trainer.generation, planner.plan):
                    place = (trainer.generation, planner.plan)
                    batches = trainer.feed.micro_batches(
                        dataset, stream, progress.consumed, planner.plan, options
                    )
                batch = next(batches)
                self._delivered += trainer.group.replicas * planner.plan.local_bsz
                self._inside_epoch = True
                self._begin_batch()
                self._checks.delivered_batch()
                epoch = progress.epoch
                yield batch
                self._rates.check(inside_epoch=True)
                self._rates.begin_batch()
                self._inside_epoch = False
                if progress.epoch != epoch:
                    raise WorkerError(
                        f"trainer.step({epoch}) was called inside the loop over trainer.dataloader(), which "
                        f"ends epoch {epoch}: call it once, after the loop"
                    )
        except GeneratorExit:
            if self._current_epoch is this_epoch:
                self._left_loop = True
                self._leave_loop(early=True)
            raise
        finally:
            self._inside_epoch = False
            self._rates.begin_epoch()
            trainer.telemetry.step_timer.pause()

    def _begin_step(self) -> None:
        """Prepare for the next step, and for putting the state back if it fails."""
        if self._buffers is not None:
            self._buffers.begin_step()
        self._model.begin_step()

    def _begin_batch(self) -> None:
        """Prepare for a batch, which the program gets next."""
        self._accumulation.begin_batch()

    def _end_batch(self) -> None:
        """Complete what the program has done for its last batch.

        Not when the loop is left, which may be because of an error.
        """
        if self._accumulation.at_first_micro_batch or not self._checks.left_out_step:
            return
        if self._model.has_missed_exchange:
            return
        if self._trainer.group.replicas > 1 and not self._accumulation.at_last_micro_batch:
            raise WorkerError(
                "optimizer.step() was left out after backward() for one of several batches of a step, on one "
                "of several replicas, so the others would wait for it: decide after the last backward() of "
                "the step, from the gradients, which are the same on all replicas then, or let a step have "
                "one batch (local_bsz_bounds with a larger upper bound)"
            )
        # The program does not want the mean gradient, which is the same on all replicas, or a part of it.
        self._accumulation.restart_step()
        self._checks.discarded_step()

    def end_epoch(self, epoch: int) -> None:
        """End the current epoch: replan if the replicas have agreed to, or save the end of training.

        Args:
            epoch: number of the current epoch, from 0.

        Raises:
            WorkerError: `epoch` is not the current epoch.
            ReplicationError: this replica has left its data loop, and another has not.
            CheckpointError: the state at the end of training cannot be saved.
        """
        trainer = self._trainer
        self._rates.begin_epoch()
        self._end_batch()
        self._left_loop = self._inside_epoch = False
        self._leave_loop(early=True)
        self._departures.wait()
        if epoch == self._overtaken_epoch:
            # The state is already that of the end of this epoch.
            self._overtaken_epoch = None
            if trainer.finished:
                self._save_final()
            return
        if epoch != self.current_epoch:
            raise WorkerError(
                f"trainer.step({epoch}) was called, but the current epoch is {self.current_epoch}: use `for "
                "epoch in trainer.epochs(...)`, which ends each epoch itself; or start with the epoch that "
                "program_reentry returns, and call trainer.step(epoch) once per epoch"
            )
        if self._current_epoch is None:
            self._end_epoch_of_own_batches(epoch)
            return
        self._require_loop_in_epoch(epoch)
        trainer.progress.epoch += 1
        try:
            self._begin_next_epoch()
        except PeersLostError:
            # The members enter another generation at the beginning of the next epoch.
            return

    def _end_epoch_of_own_batches(self, epoch: int) -> None:
        """End an epoch of a program that trains with a DataLoader of its own, as for a stream.

        Its replicas have the same number of batches in each epoch. So if members are lost, the others leave
        out the rest of the epoch, and enter another generation at its end, which is the same place on all of
        them. An epoch counts if it has had a step; so all have the same number, also if some have noticed the
        loss in the last step of an epoch, and others in the first step of the next.
        """
        progress, group = self._trainer.progress, self._trainer.group
        if not group.has_failed or progress.step > self._step_at_begin:
            progress.epoch += 1
        try:
            if group.has_failed:
                raise PeersLostError
            self._begin_next_epoch()
        except PeersLostError:
            self._recover()
            if self._trainer.finished:
                self._save_final()
        self._step_at_begin = progress.step
        self._epochs_behind = progress.epoch - epoch - 1

    def _begin_next_epoch(self) -> None:
        """Do what the replicas have agreed on, between an epoch and the next one.

        Raises:
            PeersLostError: members are lost.
        """
        trainer = self._trainer
        self.evaluations.announce_passed([trainer.progress.epoch - 1, math.inf])
        self._accumulation.restart_step()
        self._program.trained.record()
        if trainer.finished:
            self._save_final()
            return
        if self._agreement.replan:
            self._agreement.replan = False
            trainer.planner.replan(self.adascale, trainer.telemetry.step_timer)
            self._apply_plan()
            self._withdraw_requests()
        self._at_step_boundary()

    def _require_loop_in_epoch(self, epoch: int) -> None:
        """Check that an epoch which ends has had a data loop or steps, if the program has data loops."""
        step = self._trainer.progress.step
        is_empty = self._epoch_of_program != epoch and self._step_at_end == step
        if self._current_epoch is not None and is_empty and not self._trainer.finished:
            raise WorkerError(
                f"epoch {epoch} has ended, but has had no batch: call "
                "trainer.dataloader(dataset) in each epoch, because the iterator that it returns ends with "
                "its epoch"
            )
        self._step_at_end = step

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
        self._finish_request.make(reason)

    def end_of_program(self, left_epoch: int | None = None) -> AdaScaleError | None:
        """Report the last step, and return an error if training is not finished, else None.

        Args:
            left_epoch: the epoch of a loop over `trainer.epochs` that the program has left before its end.
        """
        trainer = self._trainer
        trainer.telemetry.report_last(trainer.planner.plan, trainer.progress, self.adascale)
        if self.has_stepped and not trainer.checkpointing.has_final:
            try:
                self._saving.require_finite_weights()
            except NonFiniteWeightsError as error:
                return error
        try:
            self._end_left_epoch(left_epoch)
        except AdaScaleError as error:
            return error
        unfinished = trainer.unfinished
        self.evaluations.announce_passed([math.inf])
        if self._finish_request.reason is not None and not trainer.finished:
            return self._finish_request.end_alone()
        try:
            self._leave_loop(early=True)
            self._departures.wait(lambda: self._shutdown_request.received is not None)
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
        trainer = self._trainer
        if epoch is None or not self.is_in_epoch(epoch) or trainer.checkpointing.has_final:
            return
        if epoch != self._overtaken_epoch:
            trainer.progress.epoch += 1
        if trainer.finished:
            self._leave_loop(early=True)
            self._departures.wait()
            self._save_final()

    def end_restored_training(self) -> None:
        """Save the end of training, if the state that was restored is finished, and the end is not saved.

        Members that were saving it when a replica was lost do so again, with the replica that replaces it.
        """
        if not self._trainer.checkpointing.has_final:
            self._save_final()
        elif self._membership is not None:
            self._membership.report_final()

    def _save_final(self) -> None:
        """Save the end of training, once. If members are lost meanwhile, the others save it."""
        if self._trainer.checkpointing.has_final:
            return
        self._report()
        while True:
            try:
                self.comparison.compare(self._trainer.progress.step, self._checks.passes_per_batch)
                self._saving.save(final=True)
                break
            except PeersLostError:
                self._recover()
        self._overtaken_epoch = None
        if self._membership is not None:
            self._membership.report_final()
        if self._trainer.generation == 0:
            # The rest of the program, for example an evaluation, has no step at which it could exit.
            self._shutdown_request.uninstall()

    # -- saving and exiting -----------------------------------------------------------------------------

    def _report(self) -> None:
        self._trainer.telemetry.report(self._trainer.planner.plan, self._trainer.progress, self.adascale)

    def _save_and_exit(self) -> NoReturn:
        """Save, and end the program so that it can be started again. Without an agent."""
        trainer = self._trainer
        self._report()
        saved = True
        try:
            self._saving.save(durable=True)
        except NonFiniteWeightsError as error:
            saved = False
            if trainer.group.is_main:
                print(f"adascale: {error}", flush=True)
        received = self._shutdown_request.received
        if received is None:
            self._exit(EXIT_REENTRY)
        if saved and trainer.group.is_main:
            step = trainer.progress.step
            print(f"adascale: saved a checkpoint at step {step}; run the same command to resume", flush=True)
        self._exit(128 + received)
