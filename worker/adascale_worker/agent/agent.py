"""One replica, from its first registration to its end."""

from __future__ import annotations

import os
import queue
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from types import FrameType

from adascale_client import JobClient, ServiceUnreachableError
from adascale_core.exit_codes import (
    EXIT_COMMAND_NOT_FOUND,
    EXIT_FINISHED,
    EXIT_REENTRY,
    ExitClass,
    agent_exit_code,
    classify_exit,
    describe_exit,
)
from adascale_core.messages import ActiveAllocation, AllocationView, Registration, ReplicaState
from adascale_core.names import ENV_GENERATION, LEAVE_GRACE
from adascale_core.termination_message import TerminationMessage
from adascale_worker.agent.heartbeat import Heartbeat
from adascale_worker.agent.termination_log import TerminationLog
from adascale_worker.agent.trainer_process import TrainerProcess, reap_orphans
from adascale_worker.errors import WorkerError

RESCALE_GRACE = 600.0
"""Seconds that a trainer may take to save and leave a generation whose replicas are all well."""
END_TIMEOUT = 60.0
"""Seconds that a replica which has finished waits to hear that rank 0 has."""
TERMINATION_MESSAGE_TIMEOUT = 3.0
"""Seconds spent on telling the service why the agent leaves."""
PREPARATION = 60.0
"""Seconds after which a new replica counts as there even if its program has not said that it is ready."""
STANDBY_TIMEOUT = 120.0
"""Seconds that a trainer is kept ready for a generation that does not come."""
KILLED_AGAIN = 10.0
"""Seconds after which a trainer that could not even be killed is killed again."""
TICK = 0.5


class _Event(Enum):
    CHANGED = auto()
    TRAINER = auto()
    TERMINATE = auto()


class Agent:
    """Runs the user's program as one replica of a job, generation after generation.

    Args:
        client: the metrics service.
        command: the user's program and its arguments.
        environ: the environment that trainers get, besides their place.
        rank: index of the replica.
        address: where other replicas reach it.
        patience: seconds within which the service must answer for the first time.
        termination_grace: seconds that a trainer may take when the agent itself is asked to leave.
        termination_log: where to say that the program has failed.
    """

    def __init__(
        self,
        client: JobClient,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        rank: int,
        address: str,
        patience: float,
        termination_grace: float,
        termination_log: TerminationLog,
    ) -> None:
        self._patience = patience
        self._termination_grace = termination_grace
        self._termination_log = termination_log
        self._command = list(command)
        # A lost connection is told in our own words; c10d's are a screen of stack frames each.
        self._environ = {"TORCH_CPP_LOG_LEVEL": "ERROR", **environ}
        self._rank = rank
        self._address = address
        self._instance = secrets.token_hex(8)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._link = Heartbeat(client, lambda: self._events.put(_Event.CHANGED))
        self._socket = _listen(address)
        self._generation = 0
        self._standby: TrainerProcess | None = None
        self._standby_generation = 0
        self._standby_since = 0.0
        self._ready_for = 0
        self._terminating = False

    def run(self) -> int:
        """Run until the program has come to its end, has failed, or the agent is asked to leave.

        Returns:
            0, the program's exit code (128+n for a signal), or the re-entry code.

        Raises:
            ServiceUnreachableError: the metrics service does not answer.
            WorkerError: the program cannot be started.
        """
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)
        self._link.start()
        self._await_first_answer()
        replica_state, code = ReplicaState.WAITING, None
        while True:
            trainer = self._wait_for_assignment(replica_state, code)
            if trainer is None:
                if self._job_is_complete:
                    return self._end(ReplicaState.FINISHED, EXIT_FINISHED)
                return self._end(ReplicaState.TERMINATED, EXIT_REENTRY)
            code = self._watch(trainer)
            replica_state = self._replica_state(code)
            if replica_state is ReplicaState.FINISHED:
                if self._job_came_to_its_end():
                    return self._end(replica_state, code)
                replica_state = ReplicaState.LOST
            if replica_state is ReplicaState.FAILED:
                return self._fail(agent_exit_code(code), trainer.log)
            if self._terminating:
                return self._end(ReplicaState.TERMINATED, EXIT_REENTRY)

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        self._events.put(_Event.TERMINATE)

    def _await_first_answer(self) -> None:
        deadline = time.monotonic() + self._patience
        while self._link.view is None and not self._terminating:
            if time.monotonic() > deadline:
                raise ServiceUnreachableError(
                    f"{self._link.error or 'the metrics service does not answer'}. Nothing was heard for "
                    f"{self._patience:.0f} s: is the address right, and the service up?"
                )
            self._next_event()

    def _wait_for_assignment(self, replica_state: ReplicaState, code: int | None) -> TrainerProcess | None:
        """A trainer in its place in the next generation; none if asked to leave, or the job is complete.

        Args:
            replica_state: what to tell the service meanwhile.
            code: the exit code of the trainer before, to be told with it.
        """
        # One that has run before says at once that it has left; a new one, when it is ready to begin.
        told = replica_state is not ReplicaState.WAITING
        if told:
            self._link.register(self._registration(replica_state, code))
        while not self._terminating and not self._job_is_complete:
            view = self._link.view
            following = view.next_allocation(self._generation) if view is not None else None
            if following is not None and following.admits(self._rank, self._instance):
                trainer = self._enter(following)
                if trainer is not None:
                    return trainer
                replica_state, code = ReplicaState.LOST, None
                continue
            if told and view is not None and view.used_port == self._port:
                # It was given to a generation that this replica has missed; the next needs another.
                self._renew_socket()
                self._link.register(self._registration(replica_state, code))
            if not self._prepare(view):
                raise self._cannot_prepare()
            if not told and self._is_prepared:
                told = True
                self._link.register(self._registration(replica_state))
            self._next_event()
        self._dismiss()
        return None

    def _prepare(self, view: AllocationView | None) -> bool:
        """Start a trainer ahead of a generation that is desired; let it go when that does not come.

        Returns:
            whether all is well; otherwise the trainer that was started has ended by itself.
        """
        desired = view.desired if view is not None else None
        if self._standby is not None:
            code = self._standby.exit_code
            if code is not None:
                if classify_exit(code) is not ExitClass.KILLED:
                    return False
                self._standby, self._standby_generation = None, self._generation
                return True
            if self._prepared_for > STANDBY_TIMEOUT:
                self._dismiss()
            return True
        if (
            desired is None
            or self._rank >= desired.replicas
            or desired.generation <= self._standby_generation
        ):
            return True
        self._standby_generation = desired.generation
        self._standby_since = time.monotonic()
        self._standby = self._spawn()
        return True

    def _prepare_to_follow(self) -> None:
        """Make the next trainer ready while one runs, and tell when it is."""
        view = self._link.view
        if not self._prepare(view):
            # A failed preparation says nothing about the trainer that runs.
            self._standby = None
        desired = view.desired if view is not None else None
        if desired is None or desired.generation <= self._ready_for or self._rank >= desired.replicas:
            return
        if self._is_prepared:
            self._ready_for = desired.generation
            self._link.register(self._registration(ReplicaState.RUNNING))

    @property
    def _job_is_complete(self) -> bool:
        return self._link.view is not None and self._link.view.complete

    @property
    def _port(self) -> int:
        """The port kept for the next generation."""
        return int(self._socket.getsockname()[1])

    @property
    def _is_prepared(self) -> bool:
        """Whether the next trainer is ready, or not worth waiting for any longer."""
        return self._standby is None or self._standby.ready or self._prepared_for > PREPARATION

    @property
    def _prepared_for(self) -> float:
        """Seconds since the standby was started."""
        return time.monotonic() - self._standby_since

    def _cannot_prepare(self) -> WorkerError:
        """What to raise when the program ends before it is told its place."""
        assert self._standby is not None
        code = self._standby.exit_code or 0
        error = WorkerError(
            f"{' '.join(self._command)} ended before it made an ElasticTrainer ({describe_exit(code)})"
            if code
            else f"{' '.join(self._command)} finished without making an ElasticTrainer"
        )
        error.exit_code = agent_exit_code(code)
        self._fail(error.exit_code, f"{self._standby.log}\n{error}".lstrip("\n"))
        return error

    def _dismiss(self) -> None:
        if self._standby is not None:
            self._standby.end()
            self._standby = None

    def _spawn(self) -> TrainerProcess:
        listen_fd = self._socket.fileno() if self._rank == 0 else None
        try:
            return TrainerProcess(
                self._command, self._environ, listen_fd, on_change=lambda: self._events.put(_Event.TRAINER)
            )
        except OSError as error:
            reason = f"{self._command[0]!r} cannot be started: {error.strerror}"
            self._fail(EXIT_COMMAND_NOT_FOUND, reason)
            refusal = WorkerError(f"{reason}. Check the command of the job")
            refusal.exit_code = EXIT_COMMAND_NOT_FOUND
            raise refusal from error

    def _enter(self, allocation: ActiveAllocation) -> TrainerProcess | None:
        """Give a trainer its place; none if this generation cannot be served, and another is needed."""
        self._generation = allocation.generation
        first = self._rank == 0
        if first and allocation.master_port != self._port:
            # It was given a port of before: the peers must not wait there.
            self._renew_socket()
            self._link.register(self._registration(ReplicaState.LOST))
            return None
        trainer = self._standby or self._spawn()
        self._standby = None
        trainer.place(
            {
                "RANK": str(self._rank),
                "WORLD_SIZE": str(allocation.replicas),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": allocation.master_addr,
                "MASTER_PORT": str(allocation.master_port),
                ENV_GENERATION: str(allocation.generation),
                # Bounds may have been edited since this agent was started with its own environment.
                **(allocation.spec.environment() if allocation.spec is not None else {}),
            }
        )
        self._standby_generation = self._ready_for = allocation.generation
        if first:
            self._renew_socket()
        self._link.register(self._registration(ReplicaState.RUNNING))
        return trainer

    def _watch(self, trainer: TrainerProcess) -> int:
        """Wait for the trainer to end, and see to it that it does when its generation is over."""
        give_up: float | None = None
        asked = False
        while True:
            self._next_event()
            code = trainer.exit_code
            if code is not None:
                return code
            if not self._terminating:
                self._prepare_to_follow()
            now = time.monotonic()
            if self._terminating and not asked:
                asked = True
                trainer.send(signal.SIGTERM)
                give_up = now + self._termination_grace
            elif give_up is None:
                grace = _grace(self._link.view, self._generation)
                give_up = None if grace is None else now + grace
            elif not self._terminating:
                # A generation that was left in peace may break while it is being left.
                grace = _grace(self._link.view, self._generation)
                give_up = min(give_up, now + grace) if grace is not None else give_up
            if give_up is not None and now > give_up:
                print(
                    f"adascale-agent: the trainer did not leave generation {self._generation} in time: ended",
                    flush=True,
                )
                trainer.send(signal.SIGKILL)
                give_up = now + KILLED_AGAIN

    def _job_came_to_its_end(self) -> bool:
        """Whether the program has finished on rank 0 too, without which its end does not count."""
        give_up = time.monotonic() + END_TIMEOUT
        while self._rank > 0 and not self._terminating and time.monotonic() < give_up:
            if self._job_is_complete:
                return True
            if self._link.view is not None and self._link.view.has_ended(self._generation):
                return False
            self._next_event()
        return True

    def _replica_state(self, code: int) -> ReplicaState:
        """What the end of a trainer means."""
        exit_class = classify_exit(code)
        if exit_class is ExitClass.FINISHED:
            return ReplicaState.FINISHED
        if exit_class is ExitClass.REENTRY:
            return ReplicaState.REENTERING
        view = self._link.view
        over = view is not None and view.has_ended(self._generation)
        disrupted = exit_class in {ExitClass.PEER_LOST, ExitClass.KILLED}
        if disrupted or over or self._terminating:
            return ReplicaState.LOST
        return ReplicaState.FAILED

    def _fail(self, code: int, log: str) -> int:
        # First of all: whoever hears of it from the service may end this pod at once.
        self._termination_log.say(TerminationMessage(self._generation, code, log))
        return self._end(ReplicaState.FAILED, code, log)

    def _end(self, replica_state: ReplicaState, code: int, log: str | None = None) -> int:
        told = self._link.register(
            self._registration(replica_state, code, log), timeout=TERMINATION_MESSAGE_TIMEOUT
        )
        if not told:
            print("adascale-agent: leaving without an answer from the metrics service", flush=True)
        return code

    def _registration(
        self, replica_state: ReplicaState, code: int | None = None, log: str | None = None
    ) -> Registration:
        return Registration(
            rank=self._rank,
            instance=self._instance,
            state=replica_state,
            generation=self._generation,
            address=self._address,
            port=self._port,
            exit_code=code,
            log=log,
            prepared=self._ready_for if replica_state is ReplicaState.RUNNING else None,
        )

    def _renew_socket(self) -> None:
        """Keep another port; a trainer that waits with the old one is of no use any more."""
        if self._rank == 0:
            self._dismiss()
            self._standby_generation = self._generation
        self._socket.close()
        self._socket = _listen(self._address)

    def _next_event(self) -> _Event | None:
        """Wait a little for something to happen."""
        if os.getppid() == 1 and _PARENT != 1:
            self._terminating = True
        if os.getpid() == 1:
            reap_orphans()
        try:
            event = self._events.get(timeout=TICK)
        except queue.Empty:
            return None
        if event is _Event.TERMINATE:
            self._terminating = True
        return event


_PARENT = os.getppid()


def _grace(view: AllocationView | None, generation: int) -> float | None:
    """Seconds that a trainer of `generation` may still take; none while it is current."""
    if view is None or not view.has_ended(generation):
        return None
    if view.complete:
        # It is on its way to a generation that will never be; it has nothing to save.
        return 0.0
    return LEAVE_GRACE if view.broken else RESCALE_GRACE


def _listen(address: str) -> socket.socket:
    """A socket that listens on a free port, kept until a trainer takes it over."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    local = address if address.startswith("127.") else ("::" if family == socket.AF_INET6 else "")
    listener.bind((local, 0))
    listener.listen(128)
    return listener
