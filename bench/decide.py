"""Time of a decision for all jobs, beside the exact optimum of HiGHS, and how far from it the decision is.

    python bench/decide.py [--largest 10000]

Each size is decided twice: with nothing known from before, and again with new estimates of a tenth of the
jobs and with the predictions of the decision before, as in a running cluster. `nodes` is the same on nodes
of 8 replicas, and `unlike` on the same nodes with replicas that request 4 or 8 of the node's 48 processors.
All are seconds of processor time.

HiGHS solves the choice of counts as a MILP, with the utilities given: its time is without predictions. For
unlike replicas its optimum is exact too: each node holds one of the mixtures of replicas that fill it. Then
unlike replicas of more kinds are decided, also at smaller sizes.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from time import process_time

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import lil_matrix  # type: ignore[import-untyped]

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds, BatchPlan
from adascale_core.decision.decide import DecisionProblem
from adascale_core.decision.job_utility import UTILITY_UNIT, JobState, JobUtility, weighted
from adascale_core.decision.placing import choose_counts
from adascale_core.messages.reports import StepTime
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.placement.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.placement.packing import Demand, Node

NODE = 8
SIZES = ((160, 512), (1000, 8192), (10_000, 100_000))
UNLIKE_SIZES = ((10, 32), (40, 128), *SIZES[:2])
MAX_MILP_JOBS = 1000


def jobs_of(number: int, replicas: int, random: Random) -> list[JobState]:
    """Return jobs of several kinds that have run for a while, with noisy step times."""
    share = max(replicas // number, 1)
    jobs = []
    for i in range(number):
        truth = StepTimeModel(
            0.01, 0.002, 0.01, 0.0005, True, random.choice([0.02, 0.1]), random.choice([0.0005, 0.002])
        )
        bounds = BatchBounds(*random.choice([(32, 2048, (8, 64)), (128, 8192, (16, 256))]))
        present = max(1, min(int(share * random.uniform(0.3, 1.5)), 64))
        plans = [(BatchPlan(k, b), 1 + (k > NODE)) for k in {1, present} for b in (16, 32, 64)]
        times = tuple(
            StepTime(
                plan.replicas,
                plan.local_bsz,
                1,
                truth.step_time(plan, nodes) * random.lognormvariate(0, 0.03),
                9,
                nodes,
            )
            for plan, nodes in plans
        )
        estimate = GradientEstimate(1.0, random.lognormvariate(3, 1))
        jobs.append(
            JobState(
                f"{i:06}",
                float(i),
                bounds,
                1,
                256,
                present,
                -1e6,
                present,
                estimate,
                times,
                remaining=random.lognormvariate(11, 1.5),
                restart_seconds=5.0,
            )
        )
    return jobs


Kind = tuple[int, ...]
"""Units of GPUs, processors and memory, which a replica requests or a node has."""

UNLIKE: Sequence[tuple[str, Sequence[Kind], Kind]] = (
    ("processors", ((1, 4, 0), (1, 8, 0)), (8, 48, 0)),
    ("two GPUs", ((1, 4, 0), (2, 4, 0), (1, 12, 0)), (8, 48, 0)),
    ("four kinds", ((1, 3, 0), (2, 16, 0), (1, 12, 0), (4, 10, 0)), (8, 64, 0)),
    ("memory", ((1, 4, 30), (2, 8, 20), (1, 8, 10)), (8, 48, 140)),
)
"""Name, what replicas request, and what a node has."""


def resources(kind: Kind) -> dict[str, int]:
    """Return resource -> units."""
    return dict(zip(("gpu", "cpu", "memory"), kind, strict=True))


def nodes_of(number: int, kind: Kind) -> list[Node]:
    """Return equal nodes."""
    return [Node(f"{i:06}", {**resources(kind), "pods": 100}) for i in range(number)]


def solved(
    jobs: list[JobState], capacity: Capacity, before: DecisionProblem | None = None
) -> tuple[float, DecisionProblem, list[int]]:
    """Return the processor time of a decision, its problem, and the counts."""
    start = process_time()
    problem = DecisionProblem.of(jobs, capacity, () if before is None else (before,))
    counts = problem.solve(0.0)
    return process_time() - start, problem, counts


def mixtures(kinds: Sequence[Kind], node: Kind) -> list[tuple[int, ...]]:
    """Return the numbers of replicas of each kind that fill a node."""
    if not kinds:
        return [()]
    found = []
    for number in range(min(have // units for have, units in zip(node, kinds[0], strict=True) if units) + 1):
        rest = tuple(have - number * units for have, units in zip(node, kinds[0], strict=True))
        found += [(number, *others) for others in mixtures(kinds[1:], rest)]
    return found


def optimum(
    utilities: Sequence[Mapping[int, int]],
    kind_of: list[int],
    patterns: Sequence[tuple[int, ...]],
    nodes: int,
) -> float:
    """Return the highest total utility, by HiGHS.

    Args:
        utilities: of each job: count -> utility.
        kind_of: of each job: the kind of its replicas.
        patterns: the numbers of replicas of each kind that fit on a node.
        nodes: how many nodes there are.
    """
    columns = [(i, count, value) for i, table in enumerate(utilities) for count, value in table.items()]
    kinds = len(patterns[0])
    matrix = lil_matrix((len(utilities) + kinds + 1, len(columns) + len(patterns)))
    for column, (i, count, _) in enumerate(columns):
        matrix[i, column] = 1
        matrix[len(utilities) + kind_of[i], column] = count
    for column, pattern in enumerate(patterns, len(columns)):
        for kind, number in enumerate(pattern):
            matrix[len(utilities) + kind, column] = -number
        matrix[len(utilities) + kinds, column] = 1
    lower = np.array([1.0] * len(utilities) + [-np.inf] * kinds + [0.0])
    upper = np.array([1.0] * len(utilities) + [0.0] * kinds + [float(nodes)])
    values = [value / UTILITY_UNIT for _, _, value in columns] + [0.0] * len(patterns)
    result = milp(
        -np.array(values),
        constraints=LinearConstraint(matrix.tocsr(), lower, upper),
        integrality=np.ones(len(values)),
        bounds=Bounds(0, np.array([1.0] * len(columns) + [float(nodes)] * len(patterns))),
        options={"mip_rel_gap": 1e-6, "time_limit": 300},
    )
    return float(-result.fun)


def distance(best: float, utilities: Sequence[Mapping[int, int]], counts: list[int]) -> float:
    """Return how far counts are from the best total utility, as a share of what can be chosen."""
    reached = sum(table[count] for table, count in zip(utilities, counts, strict=True)) / UTILITY_UNIT
    lowest = sum(table[min(table)] for table in utilities) / UTILITY_UNIT
    return (best - reached) / (best - lowest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--largest", type=int, default=10_000, help="the most jobs")
    largest = parser.parse_args().largest
    print(
        f"{'jobs':>7} {'replicas':>9} {'first':>8} {'again':>8} {'nodes':>8} {'unlike':>8} {'HiGHS':>8}  "
        "below the optimum"
    )
    for number, replicas in SIZES:
        if number > largest:
            continue
        random = Random(0)
        jobs = jobs_of(number, replicas, random)
        changed = [
            replace(job, estimate=GradientEstimate(1.0, random.lognormvariate(3, 1))) if i % 10 == 0 else job
            for i, job in enumerate(jobs)
        ]
        first, before, _ = solved(jobs, ReplicaCapacity(replicas))
        again, _, _ = solved(changed, ReplicaCapacity(replicas), before)
        equal = NodeCapacity(
            nodes_of(replicas // NODE, (NODE, 0, 0)), {job.id: Demand({"gpu": 1}) for job in jobs}
        )
        on_nodes, _, _ = solved(changed, equal, solved(jobs, equal)[1])
        _, kinds, node = UNLIKE[0]
        unlike = NodeCapacity(
            nodes_of(replicas // NODE, node),
            {job.id: Demand(resources(random.choice(kinds))) for job in jobs},
        )
        on_unlike_nodes, _, _ = solved(changed, unlike, solved(jobs, unlike)[1])
        exact = below = float("nan")
        if number <= MAX_MILP_JOBS:
            utilities = [
                utility.utilities(0.0)[0] for utility in weighted([JobUtility.of(job) for job in jobs])
            ]
            start = process_time()
            best = optimum(utilities, [0] * number, [(1,)], replicas)
            exact = process_time() - start
            below = distance(best, utilities, choose_counts(utilities, replicas))
        print(
            f"{number:>7} {replicas:>9} {first:>7.3f}s {again:>7.3f}s {on_nodes:>7.3f}s "
            f"{on_unlike_nodes:>7.3f}s {exact:>7.3f}s  {100 * below:.3f}%",
            flush=True,
        )
    print(f"\n{'unlike':>16} {'jobs':>7} {'replicas':>9} {'decision':>9} {'HiGHS':>8}  below the optimum")
    for name, kinds, node in UNLIKE:
        patterns = mixtures(kinds, node)
        for number, replicas in UNLIKE_SIZES:
            if number > largest:
                continue
            random = Random(0)
            jobs = jobs_of(number, replicas, random)
            kind_of = [random.randrange(len(kinds)) for _ in jobs]
            nodes = replicas // NODE
            demands = {
                job.id: Demand(resources(kinds[kind])) for job, kind in zip(jobs, kind_of, strict=True)
            }
            seconds, problem, counts = solved(jobs, NodeCapacity(nodes_of(nodes, node), demands))
            utilities = [utility.utilities(0.0)[0] for utility in problem.queue]
            start = process_time()
            best = optimum(utilities, kind_of, patterns, nodes)
            exact = process_time() - start
            below = distance(best, utilities, counts)
            print(
                f"{name:>16} {number:>7} {replicas:>9} {seconds:>8.3f}s {exact:>7.3f}s  {100 * below:.3f}%",
                flush=True,
            )


if __name__ == "__main__":
    main()
