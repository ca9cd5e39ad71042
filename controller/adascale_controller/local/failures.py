"""Counts how often the user's program has failed, and how long to wait before it is tried again."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_BACKOFF = 30.0


@dataclass
class Failures:
    """The failures of one run of a job.

    Args:
        limit: how many are put up with; the next one fails the job.
    """

    limit: int
    _generations: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many generations the program has failed in."""
        return len(self._generations)

    @property
    def too_many(self) -> bool:
        """Whether the job has failed."""
        return self.count > self.limit

    @property
    def pause(self) -> float:
        """Seconds to wait before the program is started again: 1, 2, 4, ..."""
        return min(2.0 ** (self.count - 1), MAX_BACKOFF) if self.count else 0.0

    def add(self, generation: int) -> bool:
        """Count a failure in `generation`; false if it has been, for all replicas of one fail together."""
        if generation in self._generations:
            return False
        self._generations.add(generation)
        return True
