"""Changes of generation: how this replica enters one, leaves one, and gets the state of training.

Without an agent there is one generation, which `begin_alone` enters.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NoReturn

from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_REENTRY
from adascale_core.messages.channel import Assignment, SavedElsewhere
from adascale_worker.errors import (
    CheckpointError,
    StorageUnavailableError,
    UnusableCheckpointError,
    WorkerError,
)
from adascale_worker.gradients.step_failure import release_memory
from adascale_worker.loop.context import Context
from adascale_worker.loop.steps import Steps
from adascale_worker.membership.generations import LeaveError, Membership
from adascale_worker.membership.links import Formation
from adascale_worker.membership.replica_processes import described_error, shared_error
from adascale_worker.program.parts import check_optimizer_parameters

SHARED_ERRORS = (UnusableCheckpointError, StorageUnavailableError, CheckpointError, WorkerError)
"""Errors of a restored checkpoint with which all replicas end, with the same message and exit code."""


@dataclass(eq=False, kw_only=True)
class Generations(Context):
    """Enters and leaves generations."""

    steps: Steps
    _assignment: Assignment | None = field(default=None, init=False)

    # -- the first generation -----------------------------------------------------------------------------

    def begin_alone(self) -> None:
        """Restore the last checkpoint, and begin, without an agent. A collective call."""
        self.state.was_restored = self._load()
        self._begin()

    def prepare_to_receive(self) -> None:
        """Prepare memory for the state of the other replicas and for gradients, before they wait."""
        if self.device.type == "cpu":
            self.state.prepare_to_receive()
            self.accumulation.prepare()

    # -- entering -----------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Enter the newest generation of this trainer, and get the state of its members."""
        assert self.membership is not None
        try:
            self.membership.join(self.synchronize)
        except LeaveError:
            self.exit(EXIT_REENTRY)

    def synchronize(self, assignment: Assignment, formation: Formation) -> None:
        """Give all members of a generation whose group is formed the same state."""
        group, steps, trained = self.group, self.steps, self.program.trained
        self._assignment = assignment
        self._adopt_settings(assignment)
        if group.replicas > 1:
            check_optimizer_parameters(self.program.model, self.optimizer, group.replicas)
            # Before more memory is mapped for the exchange of gradients.
            self.optimizer.discard_comparison()
        self.failure.clear()
        if formation.sources:
            self._transfer(formation.sources)
            if formation.states[group.rank] is None:
                self.state.was_restored = True
        else:
            self.state.was_restored = self._load()
        self.state.begin_generation(assignment.generation)
        # What a member decides between two steps does not change the number of its state.
        rows = group.gather([self.progress.finish_reason, trained.recorded])
        self.progress.finish_reason = next((reason for reason, _ in rows if reason is not None), None)
        trained.begin_generation(rows[formation.sources[0] if formation.sources else 0][1])
        steps.agreement.begin_generation()
        steps.begin_generation()
        self._announce_place()
        self._begin()
        steps.agreement.withdraw()

    def _adopt_settings(self, assignment: Assignment) -> None:
        self.job.adopt(assignment.env)
        settings = self.job.settings
        self.planner.bounds = settings.bounds
        self.feed.change_bounds(settings.bounds)
        self.checkpointing.interval = settings.checkpoint_interval

    def _announce_place(self) -> None:
        """Announce where the program is, also if the state that was copied is in a later epoch."""
        loop, epoch = self.loop, self.progress.epoch
        if loop.number and epoch > loop.epoch:
            loop.overtaken_epoch = loop.epoch
            loop.overtaken_states = deepcopy(self.program.registered_states())
        if loop.is_inside and loop.overtaken_epoch is None:
            self.evaluations.announce_training()
        if loop.is_inside or (loop.number and epoch <= loop.epoch):
            self.departures.begin_generation(loop.epoch, inside=loop.is_inside)
        else:
            self.departures.begin_generation(epoch, inside=True)

    def _begin(self) -> None:
        """Use the restored state, or the initial state, with the present replicas. A collective call."""
        bounds = self.job.settings.bounds
        self.planner.adapt(bounds, self.optimizer, self.telemetry.step_timer)
        self.use_plan()
        self.loop.step_at_begin = self.progress.step
        self.telemetry.begin_generation(bounds)

    def use_plan(self) -> None:
        """Use the planner's batch plan from the next step on."""
        self.steps.use_plan(self.planner.plan, self.planner.scale)

    # -- the state ----------------------------------------------------------------------------------------

    def _load(self) -> bool:
        """Restore the last checkpoint on all ranks, and return whether there is one. A collective call.

        Rank 0 reads it, each process of it its part, and sends the state to the others. If the memory of its
        agent has a later copy, it uses that.
        """
        group, checkpointing, trained = self.group, self.checkpointing, self.program.trained
        failure: tuple[str, str] | None = None
        loaded = None
        if group.rank > 0:
            group.settle()
        else:
            try:
                # In the first generation the storage's address may be wrong, so an error is raised at once.
                loaded = self.state.load(wait=group.generation > 1)
                group.settle(failed=self._continues_elsewhere())
                if loaded is not None:
                    self.state.restore(loaded)
                    self.feed.begin_from_checkpoint()
                elif self.state.is_mixed:
                    # Nobody has the state any more, of which this replica had received a part.
                    self.exit(EXIT_REENTRY)
            except AdaScaleError as error:
                failure = described_error(error, SHARED_ERRORS)
            failure = next((each for each in group.own.exchange(failure) if each is not None), None)
        # More steps may be required now than when the end of training was saved.
        is_final = loaded is not None and self.state.has_loaded_final and self.job.finished
        is_restored, is_final, failure = group.broadcast((loaded is not None, is_final, failure))
        if failure is not None:
            raise shared_error(failure, SHARED_ERRORS, WorkerError)
        checkpointing.keep_final(is_final=is_final)
        if not is_restored:
            trained.require_equal()
        # Also without a checkpoint: each rank may have made another seed, or other registered objects.
        if group.replicas > 1:
            self._transfer([0])
        if not is_restored:
            self.planner.begin(self.job.settings.bounds)
        trained.begin_generation(trained.recorded)
        return bool(is_restored)

    def _continues_elsewhere(self) -> bool:
        """Whether this generation is before that of the restored checkpoint, which it cannot replace.

        Another controller has continued the job, such as `adascale run` on the checkpoints of a cluster. Then
        the service has to begin a later generation.
        """
        last, info = self.checkpointing.manifest, self.state.info()
        if self.channel is None or last is None or last.incarnation != info.incarnation:
            return False
        if last.generation <= info.generation:
            return False
        if not self.group.is_main:
            return True
        print(
            f"adascale: the last checkpoint is of generation {last.generation}, and this is generation "
            f"{self.group.generation}: the job was continued elsewhere. It continues here in a later "
            "generation",
            flush=True,
        )
        self.channel.send(SavedElsewhere(last.generation))
        return True

    def _transfer(self, sources: Sequence[int]) -> None:
        """Copy the state of the ranks `sources`, which is the same, to all others."""
        nodes = (
            [member.node or member.address for member in self._assignment.members]
            if self._assignment is not None
            else [""] * self.group.replicas
        )
        self.state.transfer(sources, nodes)

    # -- changes ------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Discard the step in which members were lost, and enter another generation."""
        self.steps.discard()
        if self.failure.lacks_memory:
            release_memory()
        self.enter()

    def retry_in_smaller_batches(self) -> None:
        """Deliver the samples of a step that lacked memory again, in smaller batches. Without an agent."""
        self.job.limit_local_bsz(self.shortage.limit)
        self.shortage.limit = None
        self.steps.discard()
        self.failure.clear()
        release_memory()
        self._begin()

    def change(self) -> None:
        """Do what the members have agreed on: terminated members leave, or all enter a newer generation."""
        membership, group, assignment = self.membership, self.group, self._assignment
        assert membership is not None
        assert assignment is not None
        is_terminated = self.shutdown_request.is_made
        rows = group.gather([is_terminated, membership.newest_generation])
        leaving = {rank for rank, row in enumerate(rows) if row[0]}
        if leaving:
            self.report()
            if len(leaving) == group.replicas:
                # Else the others keep the state.
                self.state.save_if_possible()
            if group.rank in leaving:
                self._leave(membership)
            membership.leave_without({assignment.members[rank].replica for rank in leaving})
        else:
            membership.wait_for_generation(max(row[1] for row in rows))
            released = [row[0] for row in group.gather([membership.is_released])]
            if all(released):
                self.state.save_if_possible()
            if released[group.rank]:
                self.report()
                self._leave(membership)
        self.enter()

    def report(self) -> None:
        """Report the present step to the metrics service."""
        self.telemetry.report(self.planner.plan, self.progress, self.optimizer)

    # -- leaving ------------------------------------------------------------------------------------------

    def _leave(self, membership: Membership) -> NoReturn:
        membership.close()
        self.exit(EXIT_REENTRY)

    def exit(self, code: int) -> NoReturn:
        """End the process with an exit code, after the program's own handler for a signal was called."""
        if self.membership is not None and self.shutdown_request.is_made:
            self.membership.report_terminated()
        self.telemetry.close()
        self.group.destroy()
        # The handler may end the program.
        self.process_exit.code = code
        self.shutdown_request.call_program_handler()
        self.process_exit.exit(code)
