"""The state loop of an agent, from its first registration to its exit."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from adascale_client import ServiceUnreachableError
from adascale_core import names
from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_COMMAND_NOT_FOUND,
    EXIT_FINISHED,
    EXIT_INVALID_PROGRAM,
    EXIT_REENTRY,
    ExitClass,
    TerminationMessage,
    agent_exit_code,
    classify_exit,
    describe_exit,
)
from adascale_core.messages.allocation import ActiveAllocation, Allocation, AllocationView
from adascale_core.messages.channel import Assignment, Follow, Hold, Release, Terminate
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.replica_seconds import Cause
from adascale_core.rendezvous.instruction import Instruction, instruction, is_taken_for_lost
from adascale_worker.agent.heartbeat import Heartbeat
from adascale_worker.agent.link_check import LinkCheck
from adascale_worker.agent.replica_time import ReplicaTime
from adascale_worker.agent.trainer_environment import interface_variables, thread_variables
from adascale_worker.agent.trainer_process import TrainerProcess, TrainerStatus, reap_orphans
from adascale_worker.errors import (
    EnvironmentVariableError,
    ReplicaCheckError,
    ReplicaRefusedError,
    WorkerError,
)
from adascale_worker.process import environment
from adascale_worker.process.snapshot_place import make_snapshot_files

RESCALE_GRACE = 600.0
"""Seconds that a trainer may take to reach the end of its step and leave a generation that is not broken."""
REPLACED_GRACE = 3.0
"""Seconds that a trainer may take to exit when the others have taken it for lost and keep the state.

Usually it is frozen, and the job has one replica less until another trainer is started. A trainer that runs
exits within milliseconds, after the exit functions of the program."""
KILL_INTERVAL = 10.0
"""Seconds after which a trainer that has survived SIGKILL (in uninterruptible sleep) is killed again."""
MAX_DELAY = 30.0
"""Maximum seconds before the next trainer is started."""
POLL_INTERVAL = 0.5
"""Seconds for which the agent waits for an event."""
EXIT_REPORT_TIMEOUT = 3.0
"""Seconds that an agent which exits waits until the metrics service has its last registration."""

REPORTED = ("generation", "step", "lost", "stepped", "stall", "accelerator", "local_bsz_limit", "state_port")
"""What an agent registers as its trainer has reported it."""


class TerminationLog:
    """The termination log of a container."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = False

    def write(self, message: TerminationMessage) -> None:
        """Write why the agent exits. Only the first message is kept: later errors are its consequences."""
        if self._path is None or self._written:
            return
        self._written = True
        try:
            # In place: the file is a mount point, onto which no file can be renamed.
            self._path.write_bytes(message.to_text().encode())
        except OSError as error:
            print(
                f"adascale-agent: cannot write the termination message to {self._path}: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )


class Agent:
    """Runs the user's program as one replica of a job, in one generation after the other."""

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], termination_log: TerminationLog
    ) -> None:
        service = environment.read_service(environ)
        if service is None:
            raise EnvironmentVariableError(
                f"{names.ENV_API_URL} and {names.ENV_JOB_ID} are not set: an agent needs a metrics service. "
                "Without one, run the program itself"
            )
        self._command = command
        self._termination_log = termination_log
        self._service_timeout = environment.read_service_timeout(environ)
        self._termination_grace = environment.read_termination_grace(environ)
        self._replica = environment.read_replica(environ)
        self._address = environ.get(names.ENV_ADDRESS, "127.0.0.1")
        self._node = environ.get(names.ENV_NODE_NAME) or socket.gethostname()
        self._environ = {
            # The warnings of c10d about a lost connection have a page of stack frames each.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **environ,
            **interface_variables(self._address, environ),
            **thread_variables(environ),
            names.ENV_REPLICA: str(self._replica),
            names.ENV_ADDRESS: self._address,
        }
        # With the variables of a launcher, frameworks would start communication of their own.
        for name in names.LAUNCHER_VARIABLES:
            self._environ.pop(name, None)
        self._agent = secrets.token_hex(8)
        self._key = secrets.token_hex(16)
        # A SimpleQueue, unlike other locks, can be used in a signal handler.
        self._events: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._parent = os.getppid()
        self._is_terminating = False
        """Whether the agent must exit, by SIGTERM, SIGINT, SIGHUP or the death of its parent."""
        self._time = ReplicaTime()
        self._heartbeat = Heartbeat(*service, self._notify, self._time.seconds)
        if names.ENV_SNAPSHOT_FILES not in environ:
            self._environ[names.ENV_SNAPSHOT_FILES] = make_snapshot_files()
        self._fruitless = 0
        """Trainers that were killed one after the other before they had finished a step."""
        self._restart_at = 0.0
        self._trainers = 0
        """The number of trainers that were started."""
        self._assignment: ActiveAllocation | None = None
        """The newest generation that the trainer was assigned to; None before the first."""
        self._followed: Follow | None = None
        """The last `Follow` that was sent to the trainer; None before the first."""
        self._held = 0
        """The newest generation for which the trainer was sent `hold`."""
        self._released = False
        self._kill_at = math.inf
        """When the trainer is killed unless it has left its generation."""
        self._terminate_sent = False
        self._link_check = LinkCheck(self._replica)

    def run(self) -> int:
        """Run until the program has finished or failed, or the agent gets SIGTERM, SIGINT or SIGHUP."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # as by nohup
                signal.signal(number, self._terminate)
        self._heartbeat.start()
        self._wait_for_service()
        while (trainer := self._wait_for_start()) is not None:
            exit_code = self._handle_exit(trainer, self._wait_for_trainer(trainer))
            if exit_code is not None:
                return exit_code
        if self._view.complete:
            return self._exit(None, ReplicaState.FINISHED, EXIT_FINISHED)
        return self._exit(None, ReplicaState.TERMINATED, EXIT_REENTRY)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._is_terminating = True
        self._notify()

    def _notify(self) -> None:
        """Wake up `_wait`. Safe in any thread and in a signal handler."""
        self._events.put(None)

    def _wait(self) -> None:
        """Wait for the next event of a thread or a signal, for `POLL_INTERVAL` at most."""
        if os.getppid() == 1 and self._parent != 1:
            self._is_terminating = True
        reap_orphans()
        with contextlib.suppress(queue.Empty):
            self._events.get(timeout=POLL_INTERVAL)

    # -- the metrics service -------------------------------------------------------------------------------

    def _wait_for_service(self) -> None:
        deadline = time.monotonic() + self._service_timeout
        while self._heartbeat.view is None and not self._is_terminating:
            if time.monotonic() > deadline:
                error = self._heartbeat.error or "the metrics service does not answer"
                raise ServiceUnreachableError(
                    f"{error}. No answer within {self._service_timeout:.0f} s: check {names.ENV_API_URL}, "
                    "and that the service runs"
                )
            self._wait()

    @property
    def _view(self) -> AllocationView:
        return self._heartbeat.view or AllocationView(0, None, None, broken=False, complete=False)

    @property
    def _instance(self) -> str:
        """The id of the present trainer, or of the last one."""
        return f"{self._agent}.{self._trainers}"

    @property
    def _is_registered(self) -> bool:
        """Whether the present trainer is registered."""
        registered = self._heartbeat.registration
        return registered is not None and registered.instance == self._instance

    @property
    def _assigned(self) -> int:
        """The newest generation that the trainer knows."""
        return max(self._assignment.generation if self._assignment is not None else 0, self._held)

    @property
    def _rank(self) -> int | None:
        return self._assignment.rank_of(self._replica, self._instance) if self._assignment else None

    def _registration(
        self,
        trainer: TrainerProcess | None,
        state: ReplicaState,
        code: int | None = None,
        log: str | None = None,
    ) -> Registration:
        status = trainer.status if trainer is not None else TrainerStatus()
        return Registration(
            replica=self._replica,
            instance=self._instance,
            state=state,
            address=self._address,
            port=status.port or 0,
            exit_code=code,
            log=log,
            # The service gives the next generation a greater number.
            assigned=max(self._assigned, status.saved),
            rank=self._rank,
            replicas=self._assignment.replicas if self._assignment else None,
            version=environment.package_version(),
            node=self._node,
            key=self._heartbeat.key or self._key,
            pid=trainer.pid if trainer is not None and code is None else 0,
            **{name: getattr(status, name) for name in REPORTED},
        )

    # -- without a trainer ---------------------------------------------------------------------------------

    def _wait_for_start(self) -> TrainerProcess | None:
        """Start a trainer when this replica is desired; None if the agent must exit."""
        while not self._is_terminating and not self._view.complete:
            desired = self._view.desired
            if (
                desired is not None
                and self._replica in desired.indices
                and time.monotonic() >= self._restart_at
            ):
                return self._start_trainer(desired)
            self._raise_refusal()
            self._wait()
        return None

    def _start_trainer(self, desired: Allocation) -> TrainerProcess:
        self._trainers += 1
        self._time.follow(Cause.STARTING)
        self._assignment, self._followed, self._held, self._released = None, None, 0, False
        self._kill_at, self._terminate_sent = math.inf, False
        self._link_check = LinkCheck(self._replica)
        environ = {
            **self._environ,
            names.ENV_RANK: str(self._replica),
            names.ENV_REPLICAS: str(max(desired.replicas, self._replica + 1)),
            names.ENV_GENERATION: "0",
        }
        try:
            return TrainerProcess(
                self._command,
                environ,
                on_change=self._notify,
                processes=environment.read_processes(environ) or 1,
            )
        except OSError as error:
            reason = f"{self._command[0]!r} cannot be started: {error.strerror}"
            self._fail(None, EXIT_COMMAND_NOT_FOUND, reason)
            failure = WorkerError(f"{reason}. Check the command of the job")
            failure.exit_code = EXIT_COMMAND_NOT_FOUND
            raise failure from error

    # -- with a trainer ------------------------------------------------------------------------------------

    def _wait_for_trainer(self, trainer: TrainerProcess) -> int:
        """Pass decisions to the trainer and its reports to the service, and return its exit code."""
        while True:
            code = trainer.exit_code
            if code is not None:
                return code
            now = time.monotonic()
            status = trainer.status
            self._time.follow(self._phase(status), status.spent)
            if not self._is_terminating:
                self._raise_refusal(trainer)
            elif not self._terminate_sent:
                self._terminate_sent = True
                if status.generation == 0:
                    # It has no state.
                    trainer.kill()
                else:
                    # A signal would only reach a shell that has started it, or a handler of the program.
                    trainer.send(Terminate())
                self._kill_at = now + self._termination_grace
            self._follow(trainer)
            self._instruct(trainer, now)
            if status.port is not None and self._may_register(trainer):
                self._heartbeat.register(self._registration(trainer, status.state))
            if now > self._kill_at:
                reason = f"it did not leave generation {status.generation} in time"
                print(f"adascale-agent: killed the trainer: {reason}", flush=True)
                trainer.kill()
                self._kill_at = now + KILL_INTERVAL
            self._wait()

    def _phase(self, status: TrainerStatus) -> Cause:
        """Return what a replica does whose trainer does not measure its time yet."""
        if status.port is None or self._assignment is not None:
            return Cause.CHECK if status.spent.present == Cause.CHECK else Cause.STARTING
        if not self._is_registered:
            return Cause.CHECK
        active, desired = self._view.active, self._view.desired
        if active is None or desired is None or self._view.broken or not desired.spares:
            return Cause.STARTING
        return Cause.SPARE if active.replicas >= desired.replicas else Cause.STARTING

    def _may_register(self, trainer: TrainerProcess) -> bool:
        """Whether a trainer is registered already, or its replica reaches the members that train."""
        if self._is_registered or self._is_terminating:
            return True
        try:
            return self._link_check.passes(self._view, is_current=self._heartbeat.error is None)
        except ReplicaCheckError as error:
            trainer.kill()
            raise self._check_failure(str(error)) from None

    def _instruct(self, trainer: TrainerProcess, now: float) -> None:
        """Send the trainer what the generations of the job mean for it."""
        view, status = self._view, trainer.status
        active = view.active
        if status.port is None or status.finished:
            return
        if view.complete:
            if (
                active is None
                or status.state is not ReplicaState.RUNNING
                or view.has_ended(status.generation)
            ):
                # It is about to enter a generation that never begins, and has no state to save.
                trainer.kill()
            return
        if status.state is ReplicaState.WAITING and self._heartbeat.left_out == self._instance:
            trainer.kill()
            return
        is_current = status.generation >= self._assigned
        holds = status.state is ReplicaState.HOLDING and is_current
        must_hold = self._held > 0 and self._held == self._assigned
        if is_current and (holds or not must_hold) and not (self._released or self._is_terminating):
            # It has done what the message requested.
            self._kill_at = math.inf
        if active is None or self._released:
            return
        if not self._heartbeat.key:
            # The generation that this registration has started can be known before its answer, which has the
            # secret of the members.
            return
        match instruction(view, self._replica, self._instance, self._assigned, holds=holds):
            case Instruction.ASSIGN:
                self._assign(trainer, active)
                self._kill_at = min(self._kill_at, now + RESCALE_GRACE)
            case Instruction.HOLD if self._held < active.generation:
                self._held = active.generation
                trainer.send(Hold(active.generation))
                if not self._is_terminating:
                    self._kill_at = min(self._kill_at, now + names.LEAVE_GRACE)
            case Instruction.RELEASE:
                self._released = True
                # With no members, nobody else keeps the state.
                last = not active.members
                trainer.send(Release(active.generation, last=last))
                was_lost = is_taken_for_lost(view, self._replica, self._instance, self._assignment)
                self._kill_at = min(self._kill_at, now + release_grace(was_lost=was_lost, last=last))

    def _follow(self, trainer: TrainerProcess) -> None:
        """Let a trainer that waits get the state of the first member of the generation that trains."""
        active = self._view.active
        if self._assigned or self._view.broken or active is None or not active.members:
            return
        source, key = active.members[0], self._heartbeat.key
        follow = Follow(source, self._instance, key)
        joins = active.rank_of(self._replica, self._instance) is not None
        if key and source.state_port and not joins and follow != self._followed:
            self._followed = follow
            trainer.send(follow)

    def _assign(self, trainer: TrainerProcess, allocation: ActiveAllocation) -> None:
        rank = allocation.rank_of(self._replica, self._instance)
        assert rank is not None, "a trainer that takes part is assigned"
        self._assignment = allocation
        environ = {
            names.ENV_RANK: str(rank),
            names.ENV_REPLICAS: str(allocation.replicas),
            names.ENV_GENERATION: str(allocation.generation),
            # The bounds of the job may have changed since this agent was started.
            **(allocation.spec.environment() if allocation.spec is not None else {}),
        }
        trainer.send(
            Assignment(allocation.generation, rank, allocation.members, self._heartbeat.key, environ)
        )

    # -- after a trainer -----------------------------------------------------------------------------------

    def _handle_exit(self, trainer: TrainerProcess, code: int) -> int | None:
        """Return the exit code of the agent; None if it starts another trainer."""
        status = trainer.status
        self._time.follow(Cause.STARTING, status.spent)
        was_killed = classify_exit(code) in (ExitClass.KILLED, ExitClass.PEER_LOST)
        self._time.end_trainer(Cause.REPEATED if was_killed else Cause.PROGRAM)
        if code == EXIT_CHECK_FAILED and status.port is None:
            raise self._check_failure(_error_of(trainer))
        state = self._state_after_exit(trainer, code)
        if state is ReplicaState.FINISHED:
            self._time.follow(Cause.PROGRAM)
        if state is ReplicaState.FINISHED:
            if self._has_finished_on_rank_0(trainer):
                return self._exit(trainer, state, EXIT_FINISHED)
            if self._is_terminating:
                # Only an agent of a complete job succeeds: the first success ends the job.
                return self._exit(trainer, state, EXIT_REENTRY)
            state = ReplicaState.LOST
        if state is ReplicaState.FAILED:
            if status.port is None or code == EXIT_FINISHED:
                raise self._program_failure(trainer, code)
            return self._fail(trainer, agent_exit_code(code), trainer.log)
        if self._view.complete and not self._is_terminating:
            return self._exit(trainer, ReplicaState.FINISHED, EXIT_FINISHED)
        if self._is_terminating:
            return self._exit(trainer, ReplicaState.TERMINATED, EXIT_REENTRY)
        self._heartbeat.register(self._registration(trainer, state, code))
        was_wanted = self._released or state is ReplicaState.REENTERING
        if not was_wanted:
            self._fruitless = 0 if status.stepped else self._fruitless + 1
        delay = 0.0 if was_wanted else restart_delay(self._fruitless)
        self._restart_at = time.monotonic() + delay
        return None

    def _state_after_exit(self, trainer: TrainerProcess, code: int) -> ReplicaState:
        """Return the state of the replica after its trainer has exited."""
        status = trainer.status
        match classify_exit(code):
            case ExitClass.FINISHED if status.finished or status.final or self._view.complete:
                return ReplicaState.FINISHED
            case ExitClass.FINISHED if self._released:
                return ReplicaState.LOST
            case ExitClass.REENTRY | ExitClass.OUT_OF_MEMORY:
                return ReplicaState.REENTERING
            case ExitClass.PEER_LOST | ExitClass.KILLED:
                return ReplicaState.LOST
            case _ if status.terminated or self._is_terminating:
                return ReplicaState.LOST
            case _:
                return ReplicaState.FAILED

    def _has_finished_on_rank_0(self, trainer: TrainerProcess) -> bool:
        """Wait until the program has finished on rank 0, or cannot any more, and return whether it has."""
        if self._rank == 0:
            return True
        self._heartbeat.register(self._registration(trainer, ReplicaState.FINISHED, EXIT_FINISHED))
        while not self._is_terminating:
            if self._view.complete:
                return True
            if self._view.has_ended(trainer.status.generation):
                return False
            self._wait()
        return self._view.complete

    def _check_failure(self, reason: str) -> ReplicaCheckError:
        return ReplicaCheckError(f"replica {self._replica} on node {self._node} does not join: {reason}")

    def _program_failure(self, trainer: TrainerProcess, code: int) -> WorkerError:
        """Return the error for a trainer that has exited before training, or with code 0 before its end."""
        command = " ".join(self._command)
        if trainer.status.port is not None:
            text = (
                f"{command} ended with exit code 0, but not by the end of its training: the end was not "
                "saved, and the program has not returned. End it by its last statement or sys.exit, not by "
                "os._exit, and call trainer.finish(reason) to end training earlier"
            )
        elif code:
            text = f"{command} ended before it called program_reentry ({describe_exit(code)})"
        else:
            text = f"{command} finished without calling program_reentry of an ElasticTrainer"
        error = WorkerError(text)
        error.exit_code = agent_exit_code(code) if code else EXIT_INVALID_PROGRAM
        self._fail(trainer, error.exit_code, f"{trainer.log}\n{error}".lstrip("\n"))
        return error

    # -- exiting -------------------------------------------------------------------------------------------

    def _raise_refusal(self, trainer: TrainerProcess | None = None) -> None:
        refusal = self._heartbeat.refusal
        if refusal is not None:
            if trainer is not None:
                trainer.kill()
            raise ReplicaRefusedError(refusal)

    def _fail(self, trainer: TrainerProcess | None, code: int, log: str) -> int:
        generation = trainer.status.generation if trainer is not None else 0
        # Before the registration, after which the operator may delete this pod at once.
        self._termination_log.write(TerminationMessage(generation, code, log))
        return self._exit(trainer, ReplicaState.FAILED, code, log)

    def _exit(
        self, trainer: TrainerProcess | None, state: ReplicaState, code: int, log: str | None = None
    ) -> int:
        """Register for the last time, and return the exit code of the agent."""
        registration = self._registration(trainer, state, code, log)
        if not self._heartbeat.register(registration, timeout=EXIT_REPORT_TIMEOUT):
            print("adascale-agent: exiting; the metrics service has not answered", flush=True)
        return code


def _error_of(trainer: TrainerProcess) -> str:
    """Return the message of the error that has ended a trainer."""
    prefix = "adascale: "
    errors = [line.removeprefix(prefix) for line in trainer.log.splitlines() if line.startswith(prefix)]
    return errors[-1] if errors else "its program has ended with the exit code of a failed check"


def release_grace(*, was_lost: bool, last: bool) -> float:
    """Return the seconds that a released trainer may take to exit.

    `was_lost`: its replica is still desired, so the others have taken it for lost. `last`: no other trainer
    keeps the state.
    """
    if not was_lost:
        return RESCALE_GRACE
    return names.LEAVE_GRACE if last else REPLACED_GRACE


def restart_delay(fruitless: int) -> float:
    """Return the seconds until the next trainer is started: 0, 1, 2, 4 and so on.

    `fruitless` trainers were killed before they had finished a step. The next one may be killed for the same
    reason, for example because the program exceeds the memory of its container.
    """
    # The exponent is bounded, because a float overflows.
    return min(2.0 ** min(fruitless - 2, 30), MAX_DELAY) if fruitless > 1 else 0.0
