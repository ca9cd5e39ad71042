"""Replica counts of a high total utility on the nodes of a cluster, by hill climbing.

The search starts from the smallest count of every job and from the present counts. It changes one job at a
time, always to a higher total utility, and prefers the change with the most utility per share of the nodes.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from adascale_core.decision.job_utility import JobUtility
from adascale_core.decision.resource_prices import Consumer, choose_counts
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Packing

_MAX_ROUNDS = 8
"""How often the search tries to improve every job."""
_PLANS = 7
"""How often counts that do not fit are chosen again, for a part of the resources."""


def allocate_on_nodes(
    jobs: Sequence[JobUtility], tables: Sequence[Mapping[int, int]], capacity: NodeCapacity
) -> list[int]:
    """Return one replica count per job, in the order of arrival, of the highest total utility that is found.

    The present counts are among the candidates, so they change only for a higher total utility.
    """
    utilities = {job.job.id: table for job, table in zip(jobs, tables, strict=True) if job.counts}
    wanted = {job.job.id: _most_useful(utilities[job.job.id], job.job.replicas) for job in jobs if job.counts}
    if capacity.fits(wanted):
        return [wanted.get(job.job.id, 0) for job in jobs]
    plan = _Plan(utilities, capacity)
    if not plan.may_fit or plan.start is None:
        admitted = _admit(jobs, capacity)
        if len(admitted) < len(utilities):
            utilities = {name: utilities[name] for name in admitted}
            plan = _Plan(utilities, capacity)
    planned = plan.start or plan.start_for_part()
    present = {job.job.id: job.present_count or job.counts[0] for job in jobs if job.job.id in utilities}
    packing = capacity.pack(present)
    starts = [planned] if packing is None else [_Start(present, packing), planned]
    found = []
    for start in starts:
        search = HillClimbing(utilities, capacity, start.packing, start.counts)
        search.raise_to(start.desired)
        search.run()
        found.append(search.result())
    best = max(found, key=lambda counts: sum(utilities[name][count] for name, count in counts.items()))
    return [best.get(job.job.id, 0) for job in jobs]


def _most_useful(utilities: Mapping[int, int], present: int) -> int:
    """Return the count of the highest utility; of several, the present one, else the smallest."""
    return max(utilities, key=lambda count: (utilities[count], count == present, -count))


@dataclass(frozen=True)
class _Start:
    """Where a search starts."""

    counts: Mapping[str, int]
    packing: Packing
    # the counts to which jobs are raised first, as far as they fit
    desired: Mapping[str, int] = field(default_factory=dict)


class _Plan:
    """Counts of a high total utility, where all nodes together are taken for a single one."""

    def __init__(self, utilities: Mapping[str, Mapping[int, int]], capacity: NodeCapacity) -> None:
        self._capacity = capacity
        self._consumers = [Consumer(counts, capacity.request(name)) for name, counts in utilities.items()]
        self._smallest = {name: min(counts) for name, counts in utilities.items()}
        self._totals = np.array(capacity.totals, dtype=np.float64)
        self._least = sum(
            (
                count * np.array(each.request)
                for count, each in zip(self._smallest.values(), self._consumers, strict=True)
            ),
            start=np.zeros(len(self._totals)),
        )

    @property
    def may_fit(self) -> bool:
        """Whether the smallest counts would fit on a single node with all resources."""
        return bool(np.all(self._least <= self._totals))

    @cached_property
    def start(self) -> _Start | None:
        """The best counts for all resources; None if the nodes do not hold them."""
        counts = self._counts(1.0)
        packing = self._capacity.pack(counts)
        return None if packing is None else _Start(counts, packing)

    def start_for_part(self) -> _Start:
        """Return the best counts for as large a part of the resources as the nodes hold.

        The smallest counts must fit.
        """
        fitting, low, high = self._smallest, 0.0, 1.0
        packing = self._capacity.pack(fitting)
        assert packing is not None
        for _ in range(_PLANS):
            share = (low + high) / 2
            counts = self._counts(share)
            packed = self._capacity.pack(counts)
            if packed is None:
                high = share
            else:
                fitting, packing, low = counts, packed, share
        return _Start(fitting, packing, self._counts(1.0))

    def _counts(self, share: float) -> dict[str, int]:
        """Return the best counts for a share of what the smallest counts leave free."""
        chosen = choose_counts(self._consumers, self._least + share * (self._totals - self._least))
        return dict(zip(self._smallest, chosen, strict=True))


def _admit(jobs: Sequence[JobUtility], capacity: NodeCapacity) -> dict[str, JobUtility]:
    """Return the jobs whose smallest count fits beside those of the jobs before them."""
    runnable = {utility.job.id: utility for utility in jobs if utility.counts}
    if capacity.fits({name: utility.counts[0] for name, utility in runnable.items()}):
        return runnable
    packing = capacity.empty_packing()
    admitted: dict[str, JobUtility] = {}
    # A count that did not fit does not fit beside even more jobs.
    rejected: dict[object, int] = {}
    for name, utility in runnable.items():
        smallest, equivalence_class = utility.counts[0], capacity.equivalence_class(name)
        if equivalence_class in rejected and smallest >= rejected[equivalence_class]:
            continue
        if packing.resize(name, smallest, always_repack=True):
            admitted[name] = utility
        else:
            rejected[equivalence_class] = smallest
    if capacity.fits({name: utility.counts[0] for name, utility in admitted.items()}):
        return admitted
    # They fit only when they are packed in the order of arrival; `fits`, on which the next decision relies,
    # packs in another order.
    fitting: dict[str, int] = {}
    for name, utility in admitted.items():
        if capacity.fits(fitting | {name: utility.counts[0]}):
            fitting[name] = utility.counts[0]
    return {name: admitted[name] for name in fitting}


class HillClimbing:
    """A sequence of changes that raise the total utility. Each changes the count of one job."""

    def __init__(
        self,
        utilities: Mapping[str, Mapping[int, int]],
        capacity: NodeCapacity,
        packing: Packing,
        start: Mapping[str, int],
    ) -> None:
        self._utilities = utilities
        self._capacity = capacity
        self._packing = packing
        self._start = dict(start)
        self._counts = dict(start)
        self._changes: list[tuple[str, int]] = []

    def raise_to(self, desired: Mapping[str, int]) -> None:
        """Raise jobs to the `desired` counts (job id -> count) as far as they fit, the densest first."""
        larger = [job for job in desired if desired[job] > self._counts[job]]
        for job in sorted(larger, key=lambda job: -self._density(job, desired[job])):
            self._change(job, desired[job])

    def run(self) -> None:
        """Change counts until no change of one job raises the total utility, or for `_MAX_ROUNDS` rounds."""
        for _ in range(_MAX_ROUNDS):
            before = len(self._changes)
            self._grow()
            for job, utilities in self._utilities.items():
                for count in sorted(utilities, key=lambda count: (-utilities[count], count)):
                    if count == self._counts[job] or self._change(job, count):
                        break
            if len(self._changes) == before:
                return

    def result(self) -> dict[str, int]:
        """Return the last counts (job id -> count) that fit when they are packed from scratch.

        Replicas that were placed one after the other may not fit when all are placed at the same time, and
        the next decision would then reject these counts.
        """
        last = len(self._changes)
        if self._changes and not self._capacity.fits(self._counts):
            fitting = 0
            while last - fitting > 1:
                middle = (fitting + last) // 2
                if self._capacity.fits(self._start | dict(self._changes[:middle])):
                    fitting = middle
                else:
                    last = middle
            last = fitting
        return self._start | dict(self._changes[:last])

    def _grow(self) -> None:
        """Raise counts as long as a larger count fits, in descending order of density."""
        jobs = list(self._utilities)
        rejected: dict[str, int] = {}
        queue: list[tuple[float, int, int]] = []

        def enqueue(i: int) -> None:
            job = jobs[i]
            larger = [
                count
                for count in self._utilities[job]
                if self._counts[job] < count < rejected.get(job, count + 1)
                and self._improvement(job, count) > 0
            ]
            if larger:
                count = max(larger, key=lambda count: (self._density(job, count), -count))
                insort(queue, (self._density(job, count), -i, count))

        for i in range(len(jobs)):
            enqueue(i)
        while queue:
            _, i, count = queue.pop()
            if not self._change(jobs[-i], count):
                rejected[jobs[-i]] = count
            enqueue(-i)

    def _change(self, job: str, count: int) -> bool:
        if self._improvement(job, count) <= 0 or not self._packing.resize(job, count):
            return False
        self._counts[job] = count
        self._changes.append((job, count))
        return True

    def _improvement(self, job: str, count: int) -> int:
        return self._utilities[job][count] - self._utilities[job][self._counts[job]]

    def _density(self, job: str, count: int) -> float:
        """Return the utility of additional replicas per dominant share that they take."""
        share = self._capacity.dominant_share(job) * (count - self._counts[job])
        return self._improvement(job, count) / share
