"""Which replicas were slow a short while ago, and when a spare may take the place of the next one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from adascale_core.messages import Message
from adascale_core.messages.registration import Registration

MEMORY: Final = 600.0
"""Seconds for which a replica whose place a spare has taken is known to be slow."""
MIN_PAUSE: Final = 60.0
"""Seconds after a spare has taken a place until another one may."""
MAX_PAUSE: Final = 86_400.0
"""The longest of these pauses, in seconds. They double as long as replacements do not end the slowness."""


@dataclass(frozen=True)
class SlowPlace(Message):
    """A replica that was slow on a node. On another node it need not be slow."""

    replica: int
    node: str  # empty if unknown
    found_at: float  # when a spare has taken its place, in seconds since 1970


@dataclass(frozen=True)
class SlowPlaces(Message):
    """The replicas that were slow, and when a spare has last taken the place of one.

    A difference of the clocks of several services, or a clock that is set back, has no lasting effect: a
    time in the future counts like one in the past.
    """

    places: tuple[SlowPlace, ...] = ()
    replaced_at: float = 0.0  # when a spare has last taken a place, in seconds since 1970; 0 if none has
    pause: float = 0.0  # seconds from then on in which no other one does

    def includes(self, registration: Registration) -> bool:
        """Whether a replica was slow, and is on the same node still."""
        return any((each.replica, each.node) == _place(registration) for each in self.places)

    def ordered(self, registrations: Iterable[Registration]) -> list[Registration]:
        """Return replicas in the order in which they should join: those that were slow last.

        Before them come those on nodes where others were slow. Otherwise the order stays.
        """
        nodes = {each.node for each in self.places if each.node}
        return sorted(registrations, key=lambda each: (self.includes(each), each.node in nodes))

    def may_replace(self, now: float) -> bool:
        """Whether a spare may take the place of a slow replica."""
        return abs(now - self.replaced_at) >= self.pause

    def at(self, now: float) -> SlowPlaces:
        """Return what is still known."""
        places = tuple(each for each in self.places if abs(now - each.found_at) < MEMORY)
        return self if places == self.places else replace(self, places=places)

    def with_replaced(self, registration: Registration, now: float) -> SlowPlaces:
        """Return this after a spare has taken the place of a slow replica.

        If one had to do so shortly before, that may not help: a program that does more on one rank is slow
        there on any replica. Then the pause doubles.
        """
        others = (each for each in self.places if (each.replica, each.node) != _place(registration))
        is_first = abs(now - self.replaced_at) > 2 * max(self.pause, MEMORY)
        pause = MIN_PAUSE if is_first else min(max(2 * self.pause, MIN_PAUSE), MAX_PAUSE)
        return SlowPlaces((*others, SlowPlace(*_place(registration), now)), now, pause)


def _place(registration: Registration) -> tuple[int, str]:
    return registration.replica, registration.node
