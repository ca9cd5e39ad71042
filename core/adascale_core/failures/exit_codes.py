"""Exit codes of a trainer and of its agent, and what each of them means.

The agent decides by its trainer's exit code whether to start it again, and the controller by the agent's. Two
notations exist for a process that was ended by a signal: `-n` in Python's `subprocess`, and `128+n` in shells
and container runtimes. Both mean the same here, since a program that runs under a shell has the second.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

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
    """Return what an exit code of a trainer or an agent means."""
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


IGNORED_EXIT_CODES: Final = tuple(code for code in range(1, 256) if not classify_exit(code).is_failure)
"""Exit codes other than 0, ascending, with which a process says that the program has not failed."""
