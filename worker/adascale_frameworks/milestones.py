"""What a framework does once every so many steps, counted in steps at the initial batch size."""

from __future__ import annotations

import math


def crossed(interval: int, before: float, after: float) -> range:
    """Return the multiples of an interval that an optimizer step has crossed, in ascending order.

    A step at a larger batch is worth several steps at the initial batch size, so it can cross a multiple
    without ending at it, and several multiples at once. Each multiple is crossed by exactly one step.
    """
    if interval < 1:
        raise ValueError(f"interval is {interval}: it must be at least 1")
    if not 0 <= before <= after < math.inf:
        raise ValueError(f"progress went from {before} to {after}: it starts at 0 and only rises")
    # Integers, because a quotient of floats may be rounded up to the next multiple.
    first, last = int(before) // interval + 1, int(after) // interval
    return range(first * interval, last * interval + 1, interval)
