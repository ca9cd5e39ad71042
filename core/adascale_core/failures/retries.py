"""Which failures of a program are not retried, because it would fail again."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from adascale_core.failures.exit_codes import ExitClass

LAST_LINES = 2
"""How many last lines of output two failures must have in common to be alike."""


@dataclass(frozen=True)
class ProgramFailure:
    """A failure of the program on a replica."""

    replica: int  # the index of the replica
    generation: int  # the last generation that the program has run in; 0 if none
    exit_code: int | None  # the exit code of the agent. None if unknown.
    log: str  # the last lines of the program's output

    def is_like(self, other: ProgramFailure) -> bool:
        """Whether both have the same exit code and the same last lines of output."""
        return self._signature == other._signature

    @property
    def _signature(self) -> tuple[int | None, list[str]]:
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

    False if the program has trained on another replica count, to which the job may return.
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
