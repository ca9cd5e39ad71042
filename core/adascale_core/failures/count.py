"""How often the program of a job has failed.

A generation counts once, however many of its replicas fail in it. A program that fails before it is in any
generation counts once for each round of starts: as often as on the replica that was started most often. With
N spares, the N replicas that were started most often are left out.

Disruptions, and agents that could not reach the metrics service, never count (`ExitClass.is_failure`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class FailureCount:
    """The failures of a job's program."""

    count: int = 0  # how often the program has failed
    generation: int = 0  # the newest generation whose failure is counted; 0 if none is
    # the rounds of starts that are counted, or are never to be counted, of the replicas that are still
    # observed
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

        As many replicas as there are spares may fail to start without keeping the others from training. So a
        round counts only if more have failed in it.
        """
        most = sorted(starts, reverse=True)
        rounds = most[spares] if spares < len(most) else 0
        new = max(rounds - self.false_starts, 0)
        observed = max(rounds, min(self.false_starts, max(most, default=0)))
        return FailureCount(self.count + new, self.generation, observed)

    def without_false_starts(self, starts: Iterable[int]) -> FailureCount:
        """Return this count, in which failures before any generation are not counted now, nor later."""
        return FailureCount(self.count, self.generation, max(starts, default=0))

    def exceeds(self, limit: int) -> bool:
        """Whether the program has failed more often than `limit` (`backoffLimit`) allows."""
        return self.count > limit
