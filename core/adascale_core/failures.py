"""How a replica ends, what counts as a failure of the program, and how often it has failed."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Self

EXIT_FINISHED: Final = 0
EXIT_SERVICE_UNAVAILABLE: Final = 69
"""Of an agent that the metrics service never answered (EX_UNAVAILABLE of sysexits.h)."""
EXIT_REENTRY: Final = 75
"""Of a trainer or agent that has saved its state and can be started again (EX_TEMPFAIL of sysexits.h)."""
EXIT_PEER_LOST: Final = 76
"""Of a trainer that has lost a peer and can be started again. It gets the state from the members that hold
it, or from the last checkpoint if none does."""
EXIT_SINGLE_REPLICA: Final = 77
"""Of a trainer or agent whose program cannot train on several replicas, but on one."""
EXIT_INVALID_PROGRAM: Final = 78
"""Of a trainer or agent whose program or settings must be changed (EX_CONFIG of sysexits.h)."""
EXIT_OUT_OF_MEMORY: Final = 79
"""Of a trainer whose batch did not fit into memory, and that can be started again with smaller batches."""
EXIT_REFUSED: Final = 80
"""Of an agent that the metrics service refuses, because replicas that train have another version."""
EXIT_CHECK_FAILED: Final = 81
"""Of a trainer or agent whose device or network has failed the check before the replica joins the others."""
EXIT_COMMAND_NOT_FOUND: Final = 127
"""Of an agent that cannot start the program, as in shells."""

_SIGNAL_BASE: Final = 128
_SIGNAL_NAMES: Final = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
    9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM",
    24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
"""Signal numbers of Linux, where the pods run."""
_DISRUPTION_SIGNALS: Final = frozenset({"SIGHUP", "SIGINT", "SIGKILL", "SIGTERM"})
"""Signals that others send. Any other signal is the program's own fault."""


class ExitClass(Enum):
    """What the end of a trainer or an agent means."""

    FINISHED = auto()
    """The program has finished."""
    REENTRY = auto()
    """The state is saved; the replica can be started again."""
    PEER_LOST = auto()
    """Another replica was lost; this replica can be started again, and gets the state from the others."""
    KILLED = auto()
    """The process was ended from outside by SIGKILL, SIGTERM, SIGINT or SIGHUP: a disruption."""
    OUT_OF_MEMORY = auto()
    """A batch did not fit into memory, or the kernel has ended the container at its memory limit."""
    SERVICE_UNAVAILABLE = auto()
    """The agent could not reach the metrics service."""
    REFUSED = auto()
    """The metrics service has refused the agent: replicas that train have another version of the package."""
    CHECK_FAILED = auto()
    """The replica has failed the check before it joins: its device is faulty, or it reaches no member."""
    COMMAND_NOT_FOUND = auto()
    """The program could not be started."""
    INVALID_PROGRAM = auto()
    """The program or its settings must be changed: it would fail again."""
    SINGLE_REPLICA_PROGRAM = auto()
    """The program cannot train on several replicas: it would fail again, except on one."""
    PROGRAM_FAILURE = auto()
    """The program has failed by itself."""

    @property
    def is_failure(self) -> bool:
        """Whether the end counts against `backoffLimit` as a failure of the program."""
        return self in {
            ExitClass.COMMAND_NOT_FOUND,
            ExitClass.INVALID_PROGRAM,
            ExitClass.SINGLE_REPLICA_PROGRAM,
            ExitClass.PROGRAM_FAILURE,
        }


_CLASSES: Final = {
    EXIT_FINISHED: ExitClass.FINISHED,
    EXIT_SERVICE_UNAVAILABLE: ExitClass.SERVICE_UNAVAILABLE,
    EXIT_REENTRY: ExitClass.REENTRY,
    EXIT_PEER_LOST: ExitClass.PEER_LOST,
    EXIT_OUT_OF_MEMORY: ExitClass.OUT_OF_MEMORY,
    EXIT_REFUSED: ExitClass.REFUSED,
    EXIT_CHECK_FAILED: ExitClass.CHECK_FAILED,
    EXIT_INVALID_PROGRAM: ExitClass.INVALID_PROGRAM,
    EXIT_SINGLE_REPLICA: ExitClass.SINGLE_REPLICA_PROGRAM,
    EXIT_COMMAND_NOT_FOUND: ExitClass.COMMAND_NOT_FOUND,
}


def classify_exit(code: int, *, out_of_memory: bool = False) -> ExitClass:
    """Return what an exit code means. `out_of_memory` is what the container runtime reports (`OOMKilled`)."""
    if out_of_memory:
        return ExitClass.OUT_OF_MEMORY
    if signal_name(code) in _DISRUPTION_SIGNALS:
        return ExitClass.KILLED
    return _CLASSES.get(code, ExitClass.PROGRAM_FAILURE)


def agent_exit_code(trainer_code: int) -> int:
    """Return the exit code with which an agent reports that its trainer has failed.

    It is the trainer's own, and 128+n for signal n. A code that means no failure when an agent exits with it
    (for example 69) becomes 1.
    """
    code = trainer_code if trainer_code >= 0 else _SIGNAL_BASE - trainer_code
    return code if classify_exit(code).is_failure else 1


def signal_number(code: int) -> int | None:
    """Return the signal in an exit code, `-n` or `128+n`; None if the process has exited by itself."""
    number = -code if code < 0 else code - _SIGNAL_BASE
    return number if number > 0 else None


def signal_name(code: int) -> str | None:
    """Return the name of the signal in an exit code, `-n` or `128+n`; None if it has no well-known name."""
    return _SIGNAL_NAMES.get(signal_number(code) or 0)


def describe_exit(code: int) -> str:
    """Return a phrase for an exit code: "exit code 3", "killed by SIGKILL"."""
    name = signal_name(code)
    if name is not None:
        return f"killed by {name}"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


_ENDS: Final = {
    ExitClass.FINISHED: "has finished",
    ExitClass.REENTRY: "has saved its state, and was released",
    ExitClass.PEER_LOST: "has lost another replica",
    ExitClass.KILLED: "was lost",
    ExitClass.OUT_OF_MEMORY: "was out of memory",
    ExitClass.SERVICE_UNAVAILABLE: "could not reach the metrics service",
    ExitClass.REFUSED: "was refused",
    ExitClass.CHECK_FAILED: "has failed its check",
    ExitClass.COMMAND_NOT_FOUND: "did not find the program",
    ExitClass.INVALID_PROGRAM: "has a program that must be changed",
    ExitClass.SINGLE_REPLICA_PROGRAM: "has a program that can train on one replica only",
    ExitClass.PROGRAM_FAILURE: "has failed",
}


def describe_end(code: int, said: str = "") -> str:
    """Return how a replica has ended: "was lost (killed by SIGKILL)"; `said` is in place of the code."""
    return f"{_ENDS[classify_exit(code)]} ({said or describe_exit(code)})"


def failure_cause(log: str) -> str:
    """Return the error in the last lines of a program's output, and where it was raised; empty if unknown."""
    errors = _ERROR.findall(log)
    if not errors:
        return ""
    frames = [frame for frame in _FRAME.findall(log) if "site-packages" not in frame[0]]
    error = errors[-1].strip().removeprefix("adascale: ")
    is_traceback = frames and not errors[-1].startswith("adascale: ")
    return f"{error}, at {frames[-1][0].rpartition('/')[2]}:{frames[-1][1]}" if is_traceback else error


_ERROR: Final = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)\b|adascale: ).*$", re.MULTILINE
)
_FRAME: Final = re.compile(r'^ +File "([^"<]+)", line (\d+)', re.MULTILINE)


@dataclass(frozen=True)
class FailureCount:
    """The failures of a job's program."""

    count: int = 0  # how often the program has failed
    generation: int = 0  # the newest generation whose failure is counted; 0 if none is
    # the number of failed starts of the observed replicas that are counted already, or never will be
    false_starts: int = 0

    def with_generations(self, generations: Iterable[int]) -> FailureCount:
        """Return the count after the program has failed in `generations`.

        A generation that is not newer than the newest counted generation is counted already. 0 stands for a
        failure before any generation and does not count here.
        """
        new = {generation for generation in generations if generation > self.generation}
        return FailureCount(self.count + len(new), max([self.generation, *new]), self.false_starts)

    def with_false_starts(self, starts: Iterable[int], *, spares: int = 0) -> FailureCount:
        """Return the count after failures before any generation.

        `starts` has for each replica how often it has failed to start. As many replicas as there are spares
        may fail without keeping the others from training, so a round counts only if more have failed in it.
        """
        most = sorted(starts, reverse=True)
        rounds = most[spares] if spares < len(most) else 0
        new = max(rounds - self.false_starts, 0)
        # The observed starts become fewer when pods are deleted: later failures are still added to the count.
        observed = max(rounds, min(self.false_starts, max(most, default=0)))
        return FailureCount(self.count + new, self.generation, observed)

    def without_false_starts(self, starts: Iterable[int]) -> FailureCount:
        """Return this count, in which failures before any generation are not counted now, nor later."""
        return FailureCount(self.count, self.generation, max(starts, default=0))

    def exceeds(self, limit: int) -> bool:
        """Whether the program has failed more often than `limit` (`backoffLimit`) allows."""
        return self.count > limit


LAST_LINES = 2
"""How many last lines of output two failures must have in common to be alike."""


@dataclass(frozen=True)
class ProgramFailure:
    """A failure of the program on a replica."""

    replica: int
    generation: int  # the last generation that the program has run in; 0 if none
    exit_code: int
    log: str  # the last lines of the program's output
    place: str = ""  # where the replica ran, for people
    is_reported: bool = (
        True  # whether its agent reports it; otherwise it does not show whether it will repeat
    )

    def is_like(self, other: ProgramFailure) -> bool:
        """Whether both have the same exit code and the same last lines of output."""
        return self._signature == other._signature

    @property
    def _signature(self) -> tuple[int, list[str]]:
        return self.exit_code, self.log.strip().splitlines()[-LAST_LINES:]


def is_permanent(exit_class: ExitClass, measured: Collection[int]) -> bool:
    """Whether a program that has ended in this way would fail again.

    A program that has failed because it has several replicas may continue on one, if it has trained on one.
    """
    if exit_class is ExitClass.SINGLE_REPLICA_PROGRAM:
        return 1 not in measured
    return exit_class is ExitClass.INVALID_PROGRAM


def repeats_early_failure(
    failures: Iterable[ProgramFailure], latest: int, replicas: int | None, measured: Collection[int]
) -> bool:
    """Whether a replica has failed twice in a row in the same way, both times before a step.

    False if the program has trained on another replica count, to which the job may return. `failures` are in
    the order of the replicas' starts, `latest` is the newest generation that has made a step.
    """
    if any(replicas is not None and count != replicas for count in measured):
        return False
    last: dict[int, ProgramFailure] = {}
    repeating: set[int] = set()
    for failure in failures:
        before = last.pop(failure.replica, None)
        repeating.discard(failure.replica)
        if not 0 < failure.generation <= latest:
            last[failure.replica] = failure
            if before is not None and failure.is_like(before):
                repeating.add(failure.replica)
    return bool(repeating)


MESSAGE_LIMIT = 4096
"""Bytes of a termination message that Kubernetes keeps."""

_FIRST_LINE = re.compile(
    r"(?:generation (?P<generation>[1-9][0-9]{0,9})|before any generation)"
    r": exit code (?P<code>[0-9]{1,3})(?: \(SIG[A-Z0-9]+\))?"
)


@dataclass(frozen=True)
class TerminationMessage:
    """The message of an agent that exits because its program has failed."""

    generation: int  # the last generation that its program has run in; 0 if none
    exit_code: int  # exit code of the agent: that of the program, or 128+n for signal n
    log: str = ""  # the last lines of the program's output, or an error message

    def to_text(self, limit: int = MESSAGE_LIMIT) -> str:
        """Return the message as text of at most `limit` bytes in UTF-8. A long log loses its first lines."""
        first = self._first_line
        log = _end_of(self.log, limit - len(first) - 1)
        return f"{first}\n{log}" if log else first

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the message that `to_text` has written; None for any other text."""
        first, _, log = text.partition("\n")
        match = _FIRST_LINE.fullmatch(first)
        if match is None:
            return None
        return cls(int(match["generation"] or 0), int(match["code"]), log)

    @property
    def _first_line(self) -> str:
        when = f"generation {self.generation}" if self.generation > 0 else "before any generation"
        name = signal_name(self.exit_code)
        return f"{when}: exit code {self.exit_code}" + (f" ({name})" if name else "")


def _end_of(text: str, limit: int) -> str:
    """Return the last whole lines of `text` that fit in `limit` bytes; the end of a single longer line."""
    # Unpaired surrogates cannot be encoded in UTF-8, and would make the whole message invalid.
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    if limit <= 0:
        return ""
    kept = data[-limit:]
    is_whole = data[-limit - 1 : -limit] == b"\n"
    lines = kept if is_whole else kept.partition(b"\n")[2]
    # The cut may have left the end of a multi-byte character at the beginning.
    return (lines or kept).decode(errors="ignore")
