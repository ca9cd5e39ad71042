"""How many replicas of each kind each node gets, so that unlike replicas share nodes.

Job by job, the first nodes would be filled with the largest replicas, which leaves resources there that only
other replicas could use. So the number of each kind of replicas on each node is chosen first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_MAX_MIXTURES = 2000
"""Steps in which the mixtures that fill a node are found; with more, replicas are placed job by job."""


@dataclass(frozen=True, eq=False)
class Kind:
    """The demands for equal replicas on the same nodes."""

    request: Integers  # the units of each resource that a replica takes
    slots: Integers  # how many replicas each node holds when it is empty; 0 on nodes that are not allowed
    groups: Sequence[Integers]  # the other nodes, in the order in which they are tried
    share: float  # the largest share of a resource of all nodes that one replica requests, 0 to 1

    @cached_property
    def nodes(self) -> Integers:
        """The nodes that may get a replica."""
        return np.concatenate([np.zeros(0, dtype=np.int64), *self.groups])


def mixed_shares(free: Integers, kinds: Sequence[tuple[Kind, int]]) -> list[Integers] | None:
    """Return how many replicas of each kind each of its nodes gets, such that hardly any resource is left.

    None if a node can be filled in too many ways, or not all replicas find a node.
    """
    # Each node gets one of the mixtures that fill it (patterns of the cutting-stock problem, Gilmore and
    # Gomory 1961, without their linear program): of those that leave no more unused than all nodes together
    # can, the mixture nearest to that of the replicas that have no node yet.
    requests = np.array([kind.request for kind, _ in kinds])
    allowed = np.array([kind.slots > 0 for kind, _ in kinds]).T
    used_nodes = np.flatnonzero(allowed.any(axis=1))
    left = np.array([number for _, number in kinds])
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
    return [shares[kind.nodes, k] for k, (kind, _) in enumerate(kinds)]


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
