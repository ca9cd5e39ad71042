"""The type of accelerator of each job, by what it is worth, for all jobs at once.

A job has as options the counts on each type on which it may run, and a type has as many slots as its nodes
hold. Starting from the types of `admit`, those options are chosen that have the highest total utility
(`solver`). Their types are kept, and the counts are then decided for each type, as on a cluster of one type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from adascale_core.decision.job_utility import (
    FORCED_CHANGE_COST,
    JobState,
    JobUtility,
    utilities_of,
    weighted,
    weights_by_size,
)
from adascale_core.decision.solver import Options, solve
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
    fits = capacity.admission()
    for job in jobs:
        if job.job in chosen:
            if not fits(typed_key(job.job, chosen[job.job]), job.smallest[chosen[job.job]]):
                waiting.add(job.job)
        elif job.demands:
            # The type with the largest equal share of its empty nodes, of those on which the smallest count
            # fits beside those of the jobs before it; of equal types, the first by name.
            shares = {
                name: capacity.empty_slots(typed_key(job.job, name)) / (number[name] + 1)
                for name in job.demands
            }
            ordered = sorted(shares, key=lambda name: (-shares[name], name))
            fitting = next((n for n in ordered if fits(typed_key(job.job, n), job.smallest[n])), None)
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
    smallest = job.smallest[name]
    return len(job.demands[name].placed) >= smallest or capacity.fits({typed_key(job.job, name): smallest})


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
        market = _Market(jobs, capacity, {} if before is None else before.known, fairness)
        chosen = market.choose({job: name for job, name in types.items() if job not in waiting}, now)
        if not market.has_equal_replicas and any(chosen[job] != types[job] for job in chosen):
            types = admit(jobs, nodes, chosen, capacity)[0]
        else:
            types |= chosen
        utilities = {
            job: market.known[job, name] for job, name in types.items() if (job, name) in market.known
        }
        return cls(types, utilities, market.weights, market.known)


class _Market:
    """What slots of each type are worth to each job."""

    def __init__(
        self,
        jobs: Sequence[TypeOptions],
        capacity: NodeCapacity,
        before: Mapping[tuple[str, str], JobUtility],
        fairness: float,
    ) -> None:
        self._jobs = jobs
        self._names = sorted({name for job in jobs for name in job.states})
        self._totals: list[float] = []
        """The slots of each type."""
        self._shares: dict[tuple[str, str], float] = {}
        """(job id, type) -> the slots that a replica takes; 0 if replicas that stay are on nodes without a
        slot."""
        self.known: dict[tuple[str, str], JobUtility] = {}
        self.has_equal_replicas = True
        for name in self._names:
            group = [job for job in jobs if name in job.states]
            keys = [typed_key(job.job, name) for job in group]
            self.has_equal_replicas &= capacity.slots_for(keys) is not None
            sizes, fills_nodes = capacity.node_sizes(keys, keys)
            found = utilities_of(
                [job.states[name] for job in group],
                sizes,
                fills_nodes=fills_nodes,
                before={job.job: before[job.job, name] for job in group if (job.job, name) in before},
            )
            number = {job.job: capacity.empty_slots(key) for job, key in zip(group, keys, strict=True)}
            most = max(number.values(), default=0)
            self._totals.append(float(most) + ROUNDING)
            for job, utility in zip(group, found, strict=True):
                self.known[job.job, name] = utility
                self._shares[job.job, name] = most / number[job.job] if number[job.job] else 0.0
        self.weights = weights_by_size({job.job: _size(job, self.known) for job in jobs}, fairness)
        for name in self._names:
            present = [self.known[job.job, name] for job in jobs if (job.job, name) in self.known]
            for utility in weighted(present, self.weights):
                self.known[utility.job.id, name] = utility

    def choose(self, types: Mapping[str, str], now: float) -> dict[str, str]:
        """Return the types of the highest total utility of the jobs that do not wait."""
        jobs: list[str] = []
        least, present = [], []
        rows: list[tuple[int, str, int, int]] = []  # the job, the type, the count and its utility
        for job in self._jobs:
            start = types.get(job.job)
            tables = {} if start is None else self._tables(job, start, now)
            if start is None or start not in tables:
                # It waits, or has to leave its type although it may not change: it is not compared.
                continue
            begin = len(rows)
            rows += [(len(jobs), name, *each) for name, table in tables.items() for each in table.items()]
            own = {row[2]: i for i, row in enumerate(rows[begin:], begin) if row[1] == start}
            least.append(own[min(own)])
            present.append(own.get(job.states[start].replicas, least[-1]))
            jobs.append(job.job)
        usage = np.array(
            [
                [count * self._shares[jobs[i], name] * (name == each) for each in self._names]
                for i, name, count, _ in rows
            ]
        ).reshape(len(rows), len(self._names))
        options = Options(
            np.array([row[0] for row in rows], dtype=np.int64),
            np.array([row[3] for row in rows], dtype=np.int64),
            usage,
            np.array(least, dtype=np.int64),
            np.maximum(self._totals, usage[least].sum(axis=0)),
        )
        found = solve(options, np.array(present, dtype=np.int64)).tolist()
        return dict(types) | {job: rows[i][1] for job, i in zip(jobs, found, strict=True)}

    def _tables(self, job: TypeOptions, start: str, now: float) -> dict[str, Mapping[int, int]]:
        """Return type -> count -> utility; only the type `start` for a job without predictions."""
        names = list(job.states)
        if all(self.known[job.job, name].table is None for name in names):
            names = [start]
        cost = _move_cost(job, self.known, now)
        tables: dict[str, Mapping[int, int]] = {}
        for name in names:
            table, stays = self.known[job.job, name].utilities(now)[0], name == job.present
            if table and (self._shares[job.job, name] or stays):
                tables[name] = {count: value - (0 if stays else cost) for count, value in table.items()}
        return tables


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
