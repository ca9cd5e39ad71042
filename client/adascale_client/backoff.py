"""How long a client waits before it repeats a failed request."""

import random

MIN_BACKOFF = 0.1
"""Seconds after the first failed request until the next attempt."""
MAX_BACKOFF = 5.0
"""Seconds between two attempts while the service does not answer, at most."""


class Backoff:
    """Waiting times that double with each failure.

    Each is shortened by up to half at random, so that the clients of a service that restarts do not all send
    their requests at once.
    """

    def __init__(self) -> None:
        self._next = MIN_BACKOFF
        # Of its own: a program that trains may rely on the numbers of the common generator.
        self._random = random.Random()

    def next(self) -> float:
        """Return the seconds to wait after one more failure."""
        seconds = self._next
        self._next = min(2 * seconds, MAX_BACKOFF)
        return seconds * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Begin with the shortest time again, after a success."""
        self._next = MIN_BACKOFF
