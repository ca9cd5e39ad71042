"""The state loop of an agent, from its first registration to its exit."""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from adascale_client import JobClient, ServiceUnreachableError
from adascale_core.exit_codes import (
    EXIT_COMMAND_NOT_FOUND,
    EXIT_FINISHED,
    EXIT_INVALID_PROGRAM,
    EXIT_REENTRY,
    ExitClass,
    agent_exit_code,
    classify_exit,
    describe_exit,
)
from adascale_core.messages import ActiveAllocation, Registration, ReplicaState
from adascale_core.names import ENV_API_URL, ENV_GENERATION
from adascale_core.termination_message import TerminationMessage
from adascale_worker.agent.events import Events
from adascale_worker.agent.heartbeat import Heartbeat
from adascale_worker.agent.kill_deadline import KILL_INTERVAL, KillDeadline, leave_grace
from adascale_worker.agent.rendezvous_socket import RendezvousSocket
from adascale_worker.agent.standby import StandbyTrainer
from adascale_worker.agent.termination_log import TerminationLog
from adascale_worker.agent.trainer_process import TrainerProcess
from adascale_worker.errors import WorkerError

COMPLETION_TIMEOUT = 60.0
"""Seconds that a finished replica waits until rank 0 has finished too."""
EXIT_REPORT_TIMEOUT = 3.0
"""Seconds that an agent which exits waits until the metrics service has its last registration."""


class Agent:
    """Runs the user's program as one replica of a job, in one generation after the other.

    Args:
        client: client of the metrics service, for this job.
        command: the user's program and its arguments.
        environ: the environment of the trainers, without their rank assignment.
        rank: index of the replica.
        address: host name or IP address at which other replicas reach it.
        service_timeout: seconds within which the service must answer for the first time.
        termination_grace: seconds that a trainer has to save its state after SIGTERM.
        termination_log: where to write why the program has failed.
    """

    def __init__(
        self,
        client: JobClient,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rank: int,
        address: str,
        service_timeout: float,
        termination_grace: float,
        termination_log: TerminationLog,
    ) -> None:
        self._service_timeout = service_timeout
        self._termination_grace = termination_grace
        self._termination_log = termination_log
        self._command = list(command)
        # The warnings of c10d about a lost connection have a page of stack frames each.
        self._environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **environ}
        self._rank = rank
        self._address = address
        self._instance = secrets.token_hex(8)
        self._events = Events()
        self._heartbeat = Heartbeat(client, self._events.notify)
        self._socket = RendezvousSocket(address)
        self._standby = StandbyTrainer(self._start_trainer)
        self._generation = 0
        """The last generation that was entered."""
        self._prepared_generation = 0
        """The newest generation for which the next trainer is reported as ready."""

    def run(self) -> int:
        """Run until the program has finished or failed, or the agent gets SIGTERM or SIGINT.

        Returns:
            the exit code of the agent: 0, that of the failed program (128+n for signal n), or EXIT_REENTRY.

        Raises:
            ServiceUnreachableError: the metrics service does not answer.
            WorkerError: the program cannot be started, or makes no trainer.
        """
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)
        self._heartbeat.start()
        self._wait_for_service()
        state, code = ReplicaState.WAITING, None
        while True:
            trainer = self._wait_for_assignment(state, code)
            if trainer is None:
                if self._job_is_complete:
                    return self._exit(ReplicaState.FINISHED, EXIT_FINISHED)
                return self._exit(ReplicaState.TERMINATED, EXIT_REENTRY)
            code = self._wait_for_trainer(trainer)
            state = self._state_after_exit(code)
            if state is ReplicaState.FINISHED:
                if self._has_finished_on_rank_0():
                    return self._exit(state, code)
                state = ReplicaState.LOST
            if state is ReplicaState.FAILED:
                return self._fail(agent_exit_code(code), trainer.log)
            if self._events.terminating:
                return self._exit(ReplicaState.TERMINATED, EXIT_REENTRY)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._events.terminate()

    # -- the metrics service -------------------------------------------------------------------------------

    def _wait_for_service(self) -> None:
        deadline = time.monotonic() + self._service_timeout
        while self._heartbeat.view is None and not self._events.terminating:
            if time.monotonic() > deadline:
                error = self._heartbeat.error or "the metrics service does not answer"
                raise ServiceUnreachableError(
                    f"{error}. No answer within {self._service_timeout:.0f} s: check {ENV_API_URL}, and "
                    "that the service runs"
                )
            self._events.wait()

    @property
    def _job_is_complete(self) -> bool:
        return self._heartbeat.view is not None and self._heartbeat.view.complete

    def _registration(
        self, state: ReplicaState, code: int | None = None, log: str | None = None
    ) -> Registration:
        return Registration(
            rank=self._rank,
            instance=self._instance,
            state=state,
            generation=self._generation,
            address=self._address,
            port=self._socket.port,
            exit_code=code,
            log=log,
            prepared=self._prepared_generation if state is ReplicaState.RUNNING else None,
        )

    # -- idle ----------------------------------------------------------------------------------------------

    def _wait_for_assignment(self, state: ReplicaState, code: int | None) -> TrainerProcess | None:
        """Wait for the next generation of this replica, and return its trainer.

        Args:
            state: the state to register meanwhile.
            code: exit code of the last trainer, to register with it; None if there was none.

        Returns:
            the trainer; None if the agent must exit, or the job is complete.
        """
        # A new replica registers when its first trainer is ready, any other replica at once.
        registered = state is not ReplicaState.WAITING
        if registered:
            self._heartbeat.register(self._registration(state, code))
        while not self._events.terminating and not self._job_is_complete:
            view = self._heartbeat.view
            allocation = view.next_allocation(self._generation) if view is not None else None
            if allocation is not None and allocation.admits(self._rank, self._instance):
                trainer = self._enter(allocation)
                if trainer is not None:
                    return trainer
                state, code = ReplicaState.LOST, None
                continue
            if registered and view is not None and view.used_port == self._socket.port:
                # The port was assigned to a generation that this replica has missed.
                self._renew_port()
                self._heartbeat.register(self._registration(state, code))
            exited = self._standby.update(view.desired if view else None, self._rank, self._generation)
            if exited is not None:
                raise self._preparation_failure(exited)
            if not registered and self._standby.is_prepared:
                registered = True
                self._heartbeat.register(self._registration(state))
            self._events.wait()
        self._standby.stop()
        return None

    def _enter(self, allocation: ActiveAllocation) -> TrainerProcess | None:
        """Enter a generation, and return its trainer.

        Returns:
            the trainer; None if rank 0 no longer has the generation's port, so that another one is needed.
        """
        self._generation = allocation.generation
        if self._rank == 0 and allocation.master_port != self._socket.port:
            self._renew_port()
            self._heartbeat.register(self._registration(ReplicaState.LOST))
            return None
        trainer = self._standby.take(allocation.generation)
        trainer.assign(
            {
                "RANK": str(self._rank),
                "WORLD_SIZE": str(allocation.replicas),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": allocation.master_addr,
                "MASTER_PORT": str(allocation.master_port),
                ENV_GENERATION: str(allocation.generation),
                # The bounds of the job may have changed since this agent was started.
                **(allocation.spec.environment() if allocation.spec is not None else {}),
            }
        )
        self._prepared_generation = allocation.generation
        if self._rank == 0:
            self._renew_port()
        self._heartbeat.register(self._registration(ReplicaState.RUNNING))
        return trainer

    def _renew_port(self) -> None:
        """Listen on another port. On rank 0, replace the standby trainer, which has the old socket."""
        if self._rank == 0:
            self._standby.restart_after(self._generation)
        self._socket.renew()

    # -- running -------------------------------------------------------------------------------------------

    def _wait_for_trainer(self, trainer: TrainerProcess) -> int:
        """Return the exit code of the trainer. Kill it if it does not leave an ended generation in time."""
        deadline = KillDeadline()
        sigterm_sent = False
        while True:
            self._events.wait()
            code = trainer.exit_code
            if code is not None:
                return code
            now = time.monotonic()
            if not self._events.terminating:
                self._prepare_next_trainer()
                grace = leave_grace(self._heartbeat.view, self._generation)
                if grace is not None:
                    deadline.advance(now + grace)
            elif not sigterm_sent:
                sigterm_sent = True
                trainer.send_signal(signal.SIGTERM)
                deadline.set(now + self._termination_grace)
            if deadline.is_exceeded(now):
                reason = f"it did not leave generation {self._generation} in time"
                print(f"adascale-agent: killed the trainer: {reason}", flush=True)
                trainer.send_signal(signal.SIGKILL)
                deadline.set(now + KILL_INTERVAL)

    def _prepare_next_trainer(self) -> None:
        """Prepare the trainer of the desired generation, and register when it is ready."""
        view = self._heartbeat.view
        desired = view.desired if view is not None else None
        # A standby trainer that fails has no effect on the present one.
        self._standby.update(desired, self._rank, self._generation)
        if desired is None or self._rank >= desired.replicas:
            return
        if desired.generation > self._prepared_generation and self._standby.is_prepared:
            self._prepared_generation = desired.generation
            self._heartbeat.register(self._registration(ReplicaState.RUNNING))

    def _state_after_exit(self, code: int) -> ReplicaState:
        """Return the state of the replica after its trainer has exited."""
        view = self._heartbeat.view
        has_ended = view is not None and view.has_ended(self._generation)
        match classify_exit(code):
            case ExitClass.FINISHED:
                return ReplicaState.FINISHED
            case ExitClass.REENTRY:
                return ReplicaState.REENTERING
            case ExitClass.PEER_LOST | ExitClass.KILLED:
                return ReplicaState.LOST
            case _ if has_ended or self._events.terminating:
                return ReplicaState.LOST
            case _:
                return ReplicaState.FAILED

    def _has_finished_on_rank_0(self) -> bool:
        """Wait until the program has finished on rank 0, and return False if its generation breaks before."""
        give_up = time.monotonic() + COMPLETION_TIMEOUT
        while self._rank > 0 and not self._events.terminating and time.monotonic() < give_up:
            if self._job_is_complete:
                return True
            if self._heartbeat.view is not None and self._heartbeat.view.has_ended(self._generation):
                return False
            self._events.wait()
        return True

    # -- starting and exiting ------------------------------------------------------------------------------

    def _start_trainer(self) -> TrainerProcess:
        listen_fd = self._socket.fileno() if self._rank == 0 else None
        try:
            return TrainerProcess(self._command, self._environ, listen_fd, on_change=self._events.notify)
        except OSError as error:
            reason = f"{self._command[0]!r} cannot be started: {error.strerror}"
            self._fail(EXIT_COMMAND_NOT_FOUND, reason)
            failure = WorkerError(f"{reason}. Check the command of the job")
            failure.exit_code = EXIT_COMMAND_NOT_FOUND
            raise failure from error

    def _preparation_failure(self, trainer: TrainerProcess) -> WorkerError:
        """Return the error for a trainer that has exited before it got a rank assignment."""
        code = trainer.exit_code or 0
        command = " ".join(self._command)
        error = WorkerError(
            f"{command} ended before it made an ElasticTrainer ({describe_exit(code)})"
            if code
            else f"{command} finished without making an ElasticTrainer"
        )
        error.exit_code = agent_exit_code(code) if code else EXIT_INVALID_PROGRAM
        self._fail(error.exit_code, f"{trainer.log}\n{error}".lstrip("\n"))
        return error

    def _fail(self, code: int, log: str) -> int:
        # Before the registration, after which the operator may delete this pod at once.
        self._termination_log.write(TerminationMessage(self._generation, code, log))
        return self._exit(ReplicaState.FAILED, code, log)

    def _exit(self, state: ReplicaState, code: int, log: str | None = None) -> int:
        """Register for the last time, and return the exit code of the agent."""
        if not self._heartbeat.register(self._registration(state, code, log), timeout=EXIT_REPORT_TIMEOUT):
            print("adascale-agent: exiting; the metrics service has not answered", flush=True)
        return code
