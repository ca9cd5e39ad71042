"""The replica counts of the highest total utility, where all nodes together are taken for a single node.

For few jobs the choice is exact: the highest utility of each number of replicas of a kind (equal replicas)
is computed, and then the best number of each kind.

Otherwise kinds compete by prices. At the best prices (those of the dual problem, found by the ellipsoid
method, Grötschel, Lovász and Schrijver 1981), each job takes the count that is worth most after it has paid
for its resources, and the resources suffice. What remains free goes to the steps with the highest utility per
price that fit, and is used by exchanges between two jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np
import numpy.typing as npt

from adascale_core.decision.slot_allocation import (
    IMPOSSIBLE,
    MAX_EXACT_WORK,
    best_utilities,
    counts_of_best,
    envelope,
)

Floats = npt.NDArray[np.float64]

_MAX_COMBINATIONS = 100_000
"""Combinations of the numbers of replicas of all kinds but one."""
_ITERATIONS = 40
"""Steps of the ellipsoid method, for each pair of resources."""
_MAX_OPTIONS = 1000
"""Counts of all jobs that exchanges between two jobs consider, those nearest to the present choice."""
_MAX_EXCHANGES = 100
_MAX_EXCHANGING = 500
"""Of more jobs, a single step is worth too little for exchanges."""


@dataclass(frozen=True)
class Consumer:
    """A job that competes for resources."""

    utilities: Mapping[int, int]
    request: tuple[int, ...]  # units of each resource that a replica takes


def choose_counts(consumers: Sequence[Consumer], totals: Floats) -> list[int]:
    """Return one count per job, with a high total utility. The smallest counts must fit."""
    if not consumers:
        return []
    return _choose_exactly(consumers, totals) or _choose_by_prices(consumers, totals)


def _choose_exactly(consumers: Sequence[Consumer], totals: Floats) -> list[int] | None:
    """Return one count per job, with the highest total utility; None if that takes too long."""
    members: dict[tuple[int, ...], list[int]] = {}
    for i, each in enumerate(consumers):
        members.setdefault(each.request, []).append(i)
    kinds = np.array(list(members), dtype=np.float64)
    most = np.min(np.divide(totals, kinds, out=np.full(kinds.shape, np.inf), where=kinds > 0), axis=1)
    utilities = [[consumers[i].utilities for i in jobs] for jobs in members.values()]
    most = [
        int(min(number, sum(max(table) for table in tables)))
        for number, tables in zip(most.tolist(), utilities, strict=True)
    ]
    work = sum(number * sum(map(len, tables)) for number, tables in zip(most, utilities, strict=True))
    if work > MAX_EXACT_WORK or prod(number + 1 for number in most[:-1]) > _MAX_COMBINATIONS:
        return None
    best = [best_utilities(tables, number) for tables, number in zip(utilities, most, strict=True)]
    # All numbers of replicas of the kinds but the last, which gets what remains.
    others = np.meshgrid(*(np.arange(number + 1) for number in most[:-1]), indexing="ij")
    numbers = np.array(others, dtype=np.int64).reshape(len(others), -1).T if others else np.zeros((1, 0), int)
    free = totals - numbers @ kinds[:-1]
    last = kinds[-1] > 0
    rest = np.minimum(np.min(free[:, last] // kinds[-1][last], axis=1), most[-1]).astype(np.int64)
    total = np.where((free >= 0).all(axis=1), best[-1][-1][np.maximum(rest, 0)], IMPOSSIBLE)
    for values, column in zip(best, numbers.T, strict=False):
        total = np.maximum(total + np.maximum(values[-1][column], IMPOSSIBLE), IMPOSSIBLE)
    index = int(np.argmax(total))
    if total[index] <= IMPOSSIBLE // 2:
        # The smallest counts fit only because replicas that are placed stay.
        return None
    chosen = [0] * len(consumers)
    for jobs, tables, values, number in zip(
        members.values(), utilities, best, [*numbers[index].tolist(), int(rest[index])], strict=True
    ):
        for i, count in zip(jobs, counts_of_best(tables, values, number), strict=True):
            chosen[i] = count
    return chosen


def _choose_by_prices(consumers: Sequence[Consumer], totals: Floats) -> list[int]:
    """Return one count per job, with a high total utility."""
    chosen = [min(each.utilities) for each in consumers]
    requests = np.array([each.request for each in consumers], dtype=np.float64)
    free = totals - np.array(chosen) @ requests
    steps = [
        (i, slope, before, after)
        for i, each in enumerate(consumers)
        for slope, before, after in envelope(each.utilities)
    ]
    if steps:
        jobs = np.array([step[0] for step in steps])
        slopes = np.array([step[1] for step in steps])
        sizes = np.array([step[3] - step[2] for step in steps], dtype=np.float64)
        prices = _prices(slopes, sizes, requests[jobs], free)
        costs = requests[jobs] @ prices
        ratios = np.divide(slopes, costs, out=np.full(len(steps), np.inf), where=costs > 0)
        left = free.tolist()
        for index in np.lexsort((jobs, -ratios)).tolist():
            i, _, before, after = steps[index]
            if chosen[i] != before:
                continue
            then = [
                have - (after - before) * units
                for have, units in zip(left, consumers[i].request, strict=True)
            ]
            if min(then) >= 0:
                chosen[i], left = after, then
        free = np.array(left)
    if len(consumers) <= _MAX_EXCHANGING:
        _exchange(consumers, requests, chosen, free)
    return chosen


def _prices(slopes: Floats, sizes: Floats, requests: Floats, free: Floats) -> Floats:
    """Return the utility that a unit of each resource is worth.

    `slopes`, `sizes` and `requests` are those of the steps of the concave envelopes: utility per replica,
    replicas, and units of each resource per replica.
    """
    prices = np.zeros(len(free))
    scarce = np.flatnonzero(sizes @ requests > free)
    if not len(scarce):
        return prices
    # In units in which all free resources and the utility of all steps are 1.
    units = np.maximum(free[scarce], 1e-9)
    kinds, kind = np.unique(requests[:, scarce] / units, axis=0, return_inverse=True)
    worth = float(slopes @ sizes)
    order = np.lexsort((-slopes, kind))
    starts = np.searchsorted(kind[order], np.arange(len(kinds) + 1))
    falling, taken = [], []
    for first, last in pairwise(starts.tolist()):
        rows = order[first:last]
        falling.append(-slopes[rows] / worth)
        taken.append(np.concatenate(([0.0], np.cumsum(sizes[rows]))))

    def unused(center: Floats) -> Floats:
        """Return the share of each resource that is not used at some prices."""
        counts = [
            float(sums[np.searchsorted(values, -cost)])
            for values, sums, cost in zip(falling, taken, kinds @ center, strict=True)
        ]
        return np.ones(len(scarce)) - np.array(counts) @ kinds

    number = len(scarce)
    if number == 1:
        low, high = np.zeros(1), np.ones(1)
        for _ in range(_ITERATIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if unused(middle)[0] < 0 else (low, middle)
        prices[scarce] = high * worth / units
        return prices
    center = np.full(number, 0.5)
    shape = np.eye(number) * number / 4
    for _ in range(_ITERATIONS * number * number):
        negative = np.flatnonzero(center < 0)
        gradient = -np.eye(number)[negative[0]] if len(negative) else unused(center)
        along = shape @ gradient
        size = float(gradient @ along)
        if size <= 1e-24:
            break
        step = along / np.sqrt(size)
        center = center - step / (number + 1)
        shape = number**2 / (number**2 - 1) * (shape - 2 / (number + 1) * np.outer(step, step))
    prices[scarce] = np.maximum(center, 0.0) * worth / units
    return prices


def _exchange(consumers: Sequence[Consumer], requests: Floats, chosen: list[int], free: Floats) -> None:
    """Change the counts of one or two jobs at a time for a higher total utility, as long as there is any."""
    near = max(_MAX_OPTIONS // len(consumers), 2)
    for _ in range(_MAX_EXCHANGES):
        options = [
            (i, count)
            for i, each in enumerate(consumers)
            for count in sorted(each.utilities, key=lambda count: (abs(count - chosen[i]), count))[: near + 1]
        ]
        jobs = np.array([i for i, _ in options])
        gains = np.array(
            [consumers[i].utilities[count] - consumers[i].utilities[chosen[i]] for i, count in options]
        )
        changes = np.array([count - chosen[i] for i, count in options])
        used = changes[:, None] * requests[jobs]
        best: tuple[int, int, int] | None = None
        for up in np.flatnonzero(gains > 0).tolist():
            fits = np.all(used + used[up] <= free, axis=1) & ((jobs != jobs[up]) | (changes == 0))
            totals = np.where(fits, gains + gains[up], -1)
            down = int(np.argmax(totals))
            if totals[down] > 0 and (best is None or totals[down] > best[0]):
                best = int(totals[down]), up, down
        if best is None:
            return
        for index in best[1:]:
            i, count = options[index]
            if changes[index]:
                free -= used[index]
                chosen[i] = count
