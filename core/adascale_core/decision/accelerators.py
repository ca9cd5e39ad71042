"""On which type of accelerator each job fits, in a cluster that has several.

A job runs on one type at a time. `type_choice` compares what types are worth to jobs; it starts from what is
chosen here by the number of nodes and jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from adascale_core.decision.job_state import JobState
from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node


@dataclass(frozen=True)
class Accelerator:
    """The type of accelerator that a job runs on."""

    type: str | None = None  # the type. None if the job is not tied to a type.
    required: bool = False  # whether its replicas have to be kept from other types


@dataclass(frozen=True)
class TypeOptions:
    """The types of accelerators that a job may run on."""

    job: str
    smallest: Mapping[str, int]  # type -> its smallest replica count there, on the types that have one
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

    A job stays on its present type if that can hold its smallest count, or if no other type can. Any other
    job gets the type on which an equal share of the nodes is largest (replicas that fit on the empty nodes,
    divided by the jobs on that type and this one), among those on which its smallest count fits beside the
    smallest counts of the jobs before it; of equal types, the first by name. If its smallest count fits on
    no type, it gets the type with the largest share, and waits. Types are not compared here: `TypeChoice`
    does that.
    """
    preferred = preferred or {}
    waiting: set[str] = set()
    chosen = {job.job: next(iter(job.demands)) for job in jobs if len(job.demands) == 1}
    if all(job.job in chosen or not job.demands for job in jobs):
        return chosen, waiting
    capacity = capacity or typed_capacity(jobs, nodes)
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
