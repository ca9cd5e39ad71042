"""How many replicas of each kind each node gets, so that unlike replicas share nodes.

First fit fills the first nodes with the largest replicas, which leaves resources there that only other
replicas could use. `even_shares` spreads each kind over the nodes; `mixed_shares` fills node by node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

Request = tuple[tuple[int, int], ...]
"""(index of a resource, units) for each resource that one replica takes."""

_LEVELS = 40
"""How often the interval for the room that is left on each node is halved."""
_MAX_MIXTURES = 2000
"""Steps in which the mixtures that fill a node are found. With more kinds, `even_shares` does well."""


@dataclass(frozen=True)
class Kind:
    """Equal new replicas."""

    request: Request  # the resources that a replica takes
    nodes: Integers  # the nodes that may get one, in the order in which they are tried
    number: int


def as_int64(units: int) -> int:
    """Return a number of units, limited to what a signed integer of 64 bits holds."""
    return min(max(units, -(2**62)), 2**62)


def even_shares(free: Integers, kinds: Sequence[Kind]) -> list[Integers] | None:
    """Return how many replicas of each kind each of its nodes gets, such that the room left is even.

    None if there is not enough room. `free` has the shape (nodes, resources), the largest kind is the first.
    """
    free = free.copy()
    found = []
    for kind in kinds:
        units = np.array([as_int64(units) for _, units in kind.request])
        columns = np.ix_(kind.nodes, np.array([i for i, _ in kind.request]))
        room = np.maximum(np.min(free[columns] / units, axis=1), 0.0)
        shares = _leveled(room, kind.number)
        if shares is None:
            return None
        free[columns] -= shares[:, None] * units
        found.append(shares)
    return found


def _leveled(room: Floats, total: int) -> Integers | None:
    """Return how many of `total` replicas each node gets, such that the room left is even.

    `room` is in replicas, with fractions. None if it is not enough.
    """
    whole = np.floor(room)
    if total > whole.sum():
        return None
    low, high = 0.0, float(room.max(initial=0.0))
    shares = np.zeros_like(whole)
    for _ in range(_LEVELS):
        level = (low + high) / 2
        fewer = np.minimum(np.maximum(np.ceil(room - level), 0.0), whole)
        if fewer.sum() > total:
            low = level
        else:
            high, shares = level, fewer
    more = np.flatnonzero(shares < whole)
    last = more[np.argsort(shares[more] - room[more], kind="stable")]
    counts: Integers = shares.astype(np.int64)
    counts[last[: total - int(counts.sum())]] += 1
    return counts


def mixed_shares(free: Integers, kinds: Sequence[Kind]) -> list[Integers] | None:
    """Return how many replicas of each kind each of its nodes gets, such that hardly any resource is left.

    None if a node can be filled in too many ways, or not all replicas find a node.
    """
    # Each node gets one of the mixtures that fill it (patterns of the cutting-stock problem, Gilmore and
    # Gomory 1961, without their linear program): of those that leave no more unused than all nodes together
    # can, the mixture nearest to that of the replicas that have no node yet.
    requests = np.zeros((len(kinds), free.shape[1]), dtype=np.int64)
    allowed = np.zeros((len(free), len(kinds)), dtype=bool)
    for k, kind in enumerate(kinds):
        allowed[kind.nodes, k] = True
        for i, units in kind.request:
            requests[k, i] = as_int64(units)
    used_nodes = np.flatnonzero(allowed.any(axis=1))
    free = np.maximum(free, 0)
    left = np.array([kind.number for kind in kinds])
    unused = free[used_nodes].sum(axis=0) - left @ requests
    if (unused < 0).any():
        return None
    totals = np.maximum(free[used_nodes].sum(axis=0), 1).astype(np.float64)
    sizes = (requests / totals).max(axis=1)
    shares = np.zeros(allowed.shape, dtype=np.int64)
    mixtures: dict[tuple[bytes, bytes], Integers | None] = {}
    remaining = totals.copy()
    for node in used_nodes.tolist():
        key = free[node].tobytes(), allowed[node].tobytes()
        if key not in mixtures:
            mixtures[key] = _mixtures(free[node].tolist(), requests.tolist(), allowed[node].tolist())
        mixture = mixtures[key]
        if mixture is None:
            return None
        numbers = np.minimum(mixture, left)
        wasted = free[node] - numbers @ requests
        excess = (np.maximum(wasted - unused, 0) / totals).sum(axis=1)
        share = float((free[node] / np.maximum(remaining, 1.0)).max())
        distance = (((numbers - share * left) * sizes) ** 2).sum(axis=1)
        best = int(np.lexsort((distance, excess))[0])
        shares[node] = numbers[best]
        left = left - numbers[best]
        unused = unused - wasted[best]
        remaining = remaining - free[node]
    if left.any():
        return None
    return [shares[kind.nodes, k] for k, kind in enumerate(kinds)]


def _mixtures(
    free: Sequence[int], requests: Sequence[Sequence[int]], allowed: Sequence[bool]
) -> Integers | None:
    """Return all mixtures of replicas to which a node can't take another one, of shape (mixtures, kinds).

    None if there are more than `_MAX_MIXTURES`.
    """
    found: list[tuple[int, ...]] = []
    steps = 0

    def extend(mixture: tuple[int, ...], rest: Sequence[int]) -> bool:
        """Add all mixtures that begin with `mixture`; False if there are too many."""
        nonlocal steps
        steps += 1
        if steps > _MAX_MIXTURES:
            return False
        kind = len(mixture)
        if kind == len(requests):
            if not any(map(most, range(kind), [rest] * kind)):
                found.append(mixture)
            return True
        return all(
            extend(
                (*mixture, number),
                [have - number * units for have, units in zip(rest, requests[kind], strict=True)],
            )
            for number in range(most(kind, rest), -1, -1)
        )

    def most(kind: int, rest: Sequence[int]) -> int:
        if not allowed[kind]:
            return 0
        return min(have // units for have, units in zip(rest, requests[kind], strict=True) if units)

    return np.array(found, dtype=np.int64) if extend((), free) else None
