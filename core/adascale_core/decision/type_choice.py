"""The type of accelerator of each job, by what it is worth, for all jobs at once.

With given types, the highest total utility of the jobs of a type, if fractions of replicas could be shared
out, is the least over prices p >= 0 of a slot of

    p * slots + sum over jobs of the largest (utility - p * slots of the count)

(Lagrangian duality). Starting from the types of `admit`, a job moves, or two jobs swap types, while that
raises the sum over the types. The prices show which moves can be worth it, so few are tried. The counts are
then decided for each type, as on a cluster of one type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from adascale_core.decision.job_utility import (
    FORCED_CHANGE_COST,
    UTILITY_UNIT,
    JobState,
    JobUtility,
    utilities_of,
    weighted,
    weights_by_size,
)
from adascale_core.names import DEFAULT_FAIRNESS_ACROSS_TYPES
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node


@dataclass(frozen=True)
class Accelerator:
    """The type of accelerator that a job runs on."""

    type: str | None = None  # None if the job is not tied to a type
    required: bool = False  # whether its replicas have to be kept from other types


@dataclass(frozen=True)
class TypeOptions:
    """The types of accelerators that a job may run on."""

    job: str
    smallest: Mapping[str, int]  # type -> its smallest replica count, on the types that have a valid count
    demands: Mapping[str, Demand]  # type -> what it requests of the nodes of that type, on the same types
    present: str | None = None  # the type that it runs on; None if it has no replicas
    # type -> its state there, on the same types. Empty if types are not compared.
    states: Mapping[str, JobState] = field(default_factory=lambda: MappingProxyType({}))


def admit(
    jobs: Sequence[TypeOptions],
    nodes: Iterable[Node],
    preferred: Mapping[str, str] | None = None,
    capacity: NodeCapacity | None = None,
) -> tuple[dict[str, str], set[str]]:
    """Return the type of accelerator of each job, and the jobs that wait: their smallest count does not fit.

    What types are worth to jobs is not compared here: `TypeChoice` does that. `preferred` types take the
    place of the present ones.
    """
    preferred = preferred or {}
    waiting: set[str] = set()
    chosen = {job.job: next(iter(job.demands)) for job in jobs if len(job.demands) == 1}
    if all(job.job in chosen or not job.demands for job in jobs):
        return chosen, waiting
    capacity = capacity or typed_capacity(jobs, nodes)
    # A job stays on its present type if that can hold its smallest count, or if no other type can.
    for job in jobs:
        present = preferred.get(job.job, job.present)
        if present is None or present not in job.demands:
            continue
        if _can_hold(capacity, job, present) or not any(
            _can_hold(capacity, job, name) for name in job.demands
        ):
            chosen[job.job] = present
    if len(chosen) == sum(bool(job.demands) for job in jobs) and not preferred:
        return chosen, waiting
    number = Counter(chosen.values())
    packing = capacity.empty_packing()
    # A count that did not fit does not fit beside even more jobs.
    rejected: dict[object, int] = {}

    def fits(job: TypeOptions, name: str) -> bool:
        key = typed_key(job.job, name)
        kind = capacity.equivalence_class(key)
        smallest = job.smallest[name]
        if kind in rejected and smallest >= rejected[kind]:
            return False
        if packing.resize(key, smallest, always_repack=True):
            return True
        rejected[kind] = smallest
        return False

    for job in jobs:
        if job.job in chosen:
            if not fits(job, chosen[job.job]):
                waiting.add(job.job)
        elif job.demands:
            # The type with the largest equal share of its empty nodes, of those on which the smallest count
            # fits beside those of the jobs before it; of equal types, the first by name.
            shares = {
                name: capacity.empty_slots(typed_key(job.job, name)) / (number[name] + 1)
                for name in job.demands
            }
            ordered = sorted(shares, key=lambda name: (-shares[name], name))
            fitting = next((name for name in ordered if fits(job, name)), None)
            chosen[job.job] = fitting or ordered[0]
            number[chosen[job.job]] += fitting is not None
            if fitting is None:
                waiting.add(job.job)
    return chosen, waiting


def typed_capacity(jobs: Sequence[TypeOptions], nodes: Iterable[Node]) -> NodeCapacity:
    """Return the capacity for the demands of each job on each type, by `typed_key`."""
    return NodeCapacity(
        nodes, {typed_key(job.job, name): demand for job in jobs for name, demand in job.demands.items()}
    )


def typed_key(job: str, name: str) -> str:
    """Return a job id for the demand of a job on one type. No job id has a slash."""
    return f"{job}/{name}"


def _can_hold(capacity: NodeCapacity, job: TypeOptions, name: str) -> bool:
    """Whether the nodes of a type hold the smallest count of a job if no other job runs."""
    demand, smallest = job.demands[name], job.smallest[name]
    if len(demand.placed) >= smallest:
        return True
    if not demand.one_node and not demand.placed:
        return capacity.empty_slots(typed_key(job.job, name)) >= smallest
    return capacity.fits({typed_key(job.job, name): smallest})


Floats = npt.NDArray[np.float64]

MIN_GAIN = 1e-3
"""The least gain of total utility for which jobs change types, in natural logarithms of goodput."""
MAX_TRIES = 8
"""Moves that are tried before swaps are, those that gain most at the present prices."""
HALVINGS = 24
"""Of the interval of a price."""
ROUNDING = 1e-6
"""Of a slot."""


@dataclass(frozen=True)
class TypeChoice:
    """The types of accelerators of all jobs."""

    types: Mapping[str, str]  # job id -> the type, of each job that has any option
    # job id -> what counts are worth to a job on that type
    utilities: Mapping[str, JobUtility] = field(default_factory=lambda: MappingProxyType({}))
    # job id -> the weight of its utility; None if types were not compared
    weights: Mapping[str, float] | None = None
    # (job id, type) -> what counts are worth there, for the next decision
    known: Mapping[tuple[str, str], JobUtility] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(
        cls,
        jobs: Sequence[TypeOptions],
        nodes: Sequence[Node],
        now: float,
        before: TypeChoice | None = None,
        *,
        fairness: float | None = None,
    ) -> TypeChoice:
        """Return the types of the highest total utility that is found. `jobs` are in admission order."""
        if all(len(job.states) < 2 for job in jobs):
            return cls(admit(jobs, nodes)[0])
        fairness = DEFAULT_FAIRNESS_ACROSS_TYPES if fairness is None else fairness
        capacity = typed_capacity(jobs, nodes)
        types, waiting = admit(jobs, nodes, capacity=capacity)
        market = _Market.of(jobs, capacity, now, {} if before is None else before.known, fairness)
        chosen = market.improve({job: name for job, name in types.items() if job not in waiting})
        if not market.has_equal_replicas and any(chosen[job] != types[job] for job in chosen):
            types = admit(jobs, nodes, chosen, capacity)[0]
        else:
            types |= chosen
        utilities = {
            job: market.known[job, name] for job, name in types.items() if (job, name) in market.known
        }
        return cls(types, utilities, market.weights, market.known)


@dataclass(frozen=True)
class _Market:
    """What slots of each type are worth to each job."""

    jobs: Sequence[TypeOptions]
    names: Sequence[str]
    totals: Sequence[float]
    known: Mapping[tuple[str, str], JobUtility]  # (job id, type) -> what counts are worth
    weights: Mapping[str, float]
    # of each type, shape (jobs, counts); minus infinity where a job has no such count
    utilities: Sequence[Floats]
    slots: Sequence[Floats]  # of each type, what the counts take, same shape
    has_equal_replicas: bool  # whether the replicas of all jobs take the same on each type
    compared: frozenset[str]  # the ids of the jobs whose goodput is predicted. Others stay where they are.

    @classmethod
    def of(
        cls,
        jobs: Sequence[TypeOptions],
        capacity: NodeCapacity,
        now: float,
        before: Mapping[tuple[str, str], JobUtility],
        fairness: float,
    ) -> _Market:
        names = sorted({name for job in jobs for name in job.states})
        known: dict[tuple[str, str], JobUtility] = {}
        totals, shares, is_equal = [], [], True
        for name in names:
            group = [job for job in jobs if name in job.states]
            keys = [typed_key(job.job, name) for job in group]
            equal = capacity.equal_slots(keys)
            is_equal &= equal is not None
            found = utilities_of(
                [job.states[name] for job in group],
                [equal.node_size if equal else capacity.node_size(key) for key in keys],
                fills_nodes=equal is not None and equal.is_uniform,
                before={job.job: before[job.job, name] for job in group if (job.job, name) in before},
            )
            known |= {(job.job, name): utility for job, utility in zip(group, found, strict=True)}
            number = {job.job: capacity.empty_slots(key) for job, key in zip(group, keys, strict=True)}
            most = max(number.values(), default=0)
            totals.append(float(most))
            # Replicas that stay on nodes without a slot take none.
            shares.append({job: most / slots if slots else 0.0 for job, slots in number.items()})
        weights = weights_by_size({job.job: _size(job, known) for job in jobs}, fairness)
        for name in names:
            present = [known[job.job, name] for job in jobs if (job.job, name) in known]
            for utility in weighted(present, weights):
                known[utility.job.id, name] = utility
        utilities, slots = [], []
        costs = {job.job: _move_cost(job, known, now) for job in jobs}
        for name, share in zip(names, shares, strict=True):
            tables = [
                _options(job, name, known, costs[job.job], now)
                if share.get(job.job) or name == job.present
                else {}
                for job in jobs
            ]
            width = max(map(len, tables), default=0)
            values, takes = np.full((len(jobs), width), -np.inf), np.zeros((len(jobs), width))
            for i, (job, table) in enumerate(zip(jobs, tables, strict=True)):
                values[i, : len(table)] = list(table.values())
                takes[i, : len(table)] = np.array(list(table)) * share.get(job.job, 0.0)
            utilities.append(values / UTILITY_UNIT)
            slots.append(takes)
        compared = frozenset(job for (job, _), utility in known.items() if utility.table is not None)
        return cls(jobs, names, totals, known, weights, utilities, slots, is_equal, compared)

    def improve(self, types: Mapping[str, str]) -> dict[str, str]:
        """Return types of a higher total utility, or the same."""
        index = {name: t for t, name in enumerate(self.names)}
        chosen = np.array([index.get(types.get(job.job, ""), -1) for job in self.jobs])
        for i, t in enumerate(chosen.tolist()):
            if t >= 0 and not np.isfinite(self.utilities[t][i]).any():
                # It has to leave its type although it may not change, so its type is not compared.
                chosen[i] = -1
        found = [self._price(t, chosen == t) for t in range(len(self.names))]
        for i in np.nonzero(chosen < 0)[0].tolist():
            if self.jobs[i].job not in types:
                self._admit(i, chosen, found)
        for _ in range(2 * len(self.jobs)):
            gains = self._gains(chosen, [price for _, price in found])
            if not any(self._change(chosen, found, moved) for moved in _promising(chosen, gains)):
                break
        return {
            job.job: self.names[t] if t >= 0 else types[job.job]
            for job, t in zip(self.jobs, chosen.tolist(), strict=True)
            if t >= 0 or job.job in types
        }

    def _admit(self, i: int, chosen: npt.NDArray[np.int64], found: list[tuple[float, float]]) -> None:
        """Give a job that waits the best type on which its smallest count fits, if there is one."""
        best: tuple[float, int, tuple[float, float]] | None = None
        for t, (value, price) in enumerate(found):
            members = chosen == t
            members[i] = True
            if self.totals[t] and np.isfinite(self.utilities[t][i]).any():
                new = self._price(t, members, price)
                if np.isfinite(new[0]) and (best is None or new[0] - value > best[0]):
                    best = new[0] - value, t, new
        if best is not None:
            _, chosen[i], found[best[1]] = best

    def _gains(self, chosen: npt.NDArray[np.int64], prices: Sequence[float]) -> Floats:
        """Return what each job gains on each type at these prices, of shape (jobs, types)."""
        worth = np.full((len(self.jobs), len(self.names)), -np.inf)
        compared = np.array([job.job in self.compared for job in self.jobs])
        for t, price in enumerate(prices):
            if self.utilities[t].shape[1]:
                worth[:, t] = (self.utilities[t] - price * self.slots[t]).max(axis=1)
        present = np.where(chosen >= 0, worth[np.arange(len(chosen)), chosen], np.inf)
        gains: Floats = worth - np.where(compared, present, np.inf)[:, None]
        return gains

    def _change(
        self, chosen: npt.NDArray[np.int64], found: list[tuple[float, float]], moved: Mapping[int, int]
    ) -> bool:
        """Change the types of jobs if that raises the total utility, and return whether it does."""
        after = chosen.copy()
        for i, t in moved.items():
            after[i] = t
        changed = {*chosen[list(moved)].tolist(), *moved.values()}
        new = {t: self._price(t, after == t, found[t][1]) for t in changed}
        gain = sum(new[t][0] - found[t][0] for t in changed)
        if not gain > MIN_GAIN:
            return False
        chosen[:] = after
        for t in changed:
            found[t] = new[t]
        return True

    def _price(self, t: int, members: npt.NDArray[np.bool_], guess: float = 0.0) -> tuple[float, float]:
        """Return the highest total utility of jobs on a type, and the price of a slot.

        Minus infinity if their smallest counts do not fit.
        """
        utilities, slots, total = self.utilities[t][members], self.slots[t][members], self.totals[t]
        if not utilities.size:
            return 0.0, 0.0
        rows = np.arange(len(utilities))

        def at(price: float) -> tuple[float, float]:
            worth = utilities - price * slots
            best = worth.argmax(axis=1)
            return price * total + float(worth[rows, best].sum()), float(slots[rows, best].sum())

        value, taken = at(0.0)
        if taken <= total + ROUNDING:
            return value, 0.0
        smallest = np.where(np.isfinite(utilities), slots, np.inf).min(axis=1).sum()
        if smallest > total + ROUNDING:
            return -np.inf, guess
        low, high = 0.0, max(2 * guess, 1e-3)
        value, taken = at(high)
        while taken > total + ROUNDING:
            low, high = high, 4 * high
            value, taken = at(high)
        for _ in range(HALVINGS):
            if high - low <= 1e-6 * high:
                break
            middle = (low + high) / 2
            found, taken = at(middle)
            if taken > total + ROUNDING:
                low = middle
            else:
                high, value = middle, found
        return value, high


def _promising(chosen: npt.NDArray[np.int64], gains: Floats) -> Iterable[dict[int, int]]:
    """Yield moves and swaps that gain at the present prices, as index of a job -> index of its new type."""
    flat = np.argsort(-gains, axis=None)[:MAX_TRIES]
    for i, t in zip(*np.unravel_index(flat, gains.shape), strict=True):
        if gains[i, t] > MIN_GAIN:
            yield {int(i): int(t)}
    for a, b in permutations(range(gains.shape[1]), 2):
        on_a, on_b = np.nonzero(chosen == a)[0], np.nonzero(chosen == b)[0]
        if a < b and len(on_a) and len(on_b):
            i, j = on_a[gains[on_a, b].argmax()], on_b[gains[on_b, a].argmax()]
            if gains[i, b] + gains[j, a] > MIN_GAIN:
                yield {int(i): b, int(j): a}


def _size(job: TypeOptions, known: Mapping[tuple[str, str], JobUtility]) -> float | None:
    """Return the seconds that the rest of a job takes on its smallest count on the best type."""
    sizes = [known[job.job, name].remaining_seconds for name in job.states]
    return min((size for size in sizes if size is not None), default=None)


def _move_cost(job: TypeOptions, known: Mapping[tuple[str, str], JobUtility], now: float) -> int:
    """Return what a move costs a job, in `UTILITY_UNIT`."""
    if job.present is None or (job.job, job.present) not in known:
        return 0
    cost = known[job.job, job.present].move_cost(now)
    return FORCED_CHANGE_COST if cost is None else cost


def _options(
    job: TypeOptions,
    name: str,
    known: Mapping[tuple[str, str], JobUtility],
    move_cost: int,
    now: float,
) -> Mapping[int, int]:
    """Return count -> utility of a job on a type; empty if it may not run there."""
    utility = known.get((job.job, name))
    if utility is None:
        return {}
    table = utility.utilities(now)[0]
    if name == job.present or not move_cost:
        return table
    return {count: value - move_cost for count, value in table.items()}
