"""How often the program of a job has failed.

A generation counts once, however many of its replicas fail in it. A program that fails before it is in any
generation counts once for each round of starts: as often as on the replica that was started most often.
Disruptions, and agents that could not reach the metrics service, never count (`ExitClass.is_failure`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class FailureCount:
    """The failures of a job's program.

    Args:
        count: how often the program has failed.
        generation: the newest generation whose failure is counted; 0 if none is.
        false_starts: the rounds of starts that are counted, of the replicas that are still observed.
    """

    count: int = 0
    generation: int = 0
    false_starts: int = 0

    def with_generations(self, generations: Iterable[int]) -> FailureCount:
        """Return the count after the program has failed in `generations`.

        A generation that is not newer than the newest counted generation is counted already. 0 stands for a
        failure before any generation and does not count here.
        """
        new = {generation for generation in generations if generation > self.generation}
        return FailureCount(self.count + len(new), max([self.generation, *new]), self.false_starts)

    def with_false_starts(self, starts: Iterable[int]) -> FailureCount:
        """Return the count after failures before any generation.

        Args:
            starts: for each replica, how many of its observed starts have failed before any generation. The
                observed starts may become fewer, as when pods are deleted: then the count stays, and later
                failures are added to it.
        """
        rounds = max(starts, default=0)
        new = max(rounds - self.false_starts, 0)
        return FailureCount(self.count + new, self.generation, rounds)

    def exceeds(self, limit: int) -> bool:
        """Whether the program has failed more often than `limit` (`backoffLimit`) allows."""
        return self.count > limit
