"""Which type of accelerator each job runs on, in a cluster that has several.

A job runs on one type at a time. `choose_types` is the only place where the type is chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from adascale_core.placement.capacity import NodeCapacity
from adascale_core.placement.packing import Demand, Node


@dataclass(frozen=True)
class Accelerator:
    """The type of accelerator that a job runs on.

    Args:
        type: the type. None if the job is not tied to a type.
        required: whether its replicas have to be kept from other types.
    """

    type: str | None = None
    required: bool = False


@dataclass(frozen=True)
class TypeOptions:
    """The types of accelerators that a job may run on.

    Args:
        job: the job id.
        smallest: type -> its smallest replica count there, on the types that have one.
        demands: type -> what it requests of the nodes of that type, on the same types.
        present: the type that it runs on; None if it has no replicas.
    """

    job: str
    smallest: Mapping[str, int]
    demands: Mapping[str, Demand]
    present: str | None = None


def choose_types(jobs: Sequence[TypeOptions], nodes: Iterable[Node]) -> dict[str, str]:
    """Return the type of accelerator of each job that has any option, by job id.

    A job stays on its present type if that can hold its smallest count, or if no other type can. Any other
    job gets the type on which an equal share of the nodes is largest (replicas that fit on the empty nodes,
    divided by the jobs on that type and this one), among those on which its smallest count fits beside the
    smallest counts of the jobs before it; of equal types, the first by name. If its smallest count fits on
    no type, it gets the type with the largest share, and waits.

    Args:
        jobs: all jobs, in the order of their arrival.
        nodes: all nodes.
    """
    chosen = {job.job: next(iter(job.demands)) for job in jobs if len(job.demands) == 1}
    if all(job.job in chosen or not job.demands for job in jobs):
        return chosen
    capacity = NodeCapacity(
        nodes, {_key(job.job, name): demand for job in jobs for name, demand in job.demands.items()}
    )
    for job in jobs:
        present = job.present
        if present is None or present not in job.demands:
            continue
        if _can_hold(capacity, job, present) or not any(
            _can_hold(capacity, job, name) for name in job.demands
        ):
            chosen[job.job] = present
    if len(chosen) == sum(bool(job.demands) for job in jobs):
        return chosen
    number = Counter(chosen.values())
    packing = capacity.empty_packing()
    # A count that did not fit does not fit beside even more jobs.
    rejected: dict[object, int] = {}

    def fits(job: TypeOptions, name: str) -> bool:
        key = _key(job.job, name)
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
            fits(job, chosen[job.job])
        elif job.demands:
            shares = {
                name: capacity.empty_slots(_key(job.job, name)) / (number[name] + 1) for name in job.demands
            }
            ordered = sorted(shares, key=lambda name: (-shares[name], name))
            fitting = next((name for name in ordered if fits(job, name)), None)
            chosen[job.job] = fitting or ordered[0]
            number[chosen[job.job]] += fitting is not None
    return chosen


def _key(job: str, name: str) -> str:
    """Return a job id for the demand of a job on one type. No job id has a slash."""
    return f"{job}/{name}"


def _can_hold(capacity: NodeCapacity, job: TypeOptions, name: str) -> bool:
    """Whether the nodes of a type hold the smallest count of a job if no other job runs."""
    demand, smallest = job.demands[name], job.smallest[name]
    if len(demand.placed) >= smallest:
        return True
    if not demand.one_node and not demand.placed:
        return capacity.empty_slots(_key(job.job, name)) >= smallest
    return capacity.fits({_key(job.job, name): smallest})
