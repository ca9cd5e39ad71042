"""Time of a decision for all jobs, beside the exact optimum of HiGHS, and how far from it the decision is.

    python bench/decide.py [--largest 10000]

Each size is decided twice: with nothing known from before, and again with new estimates of a tenth of the
jobs, as in a running cluster. `nodes` is the same on nodes of 8 replicas, and `unlike` on the same nodes with
replicas that request 4 or 8 of the node's 48 processors, after a first decision. All are seconds of
processor time.

HiGHS solves the choice of counts as a MILP, with the utilities given: its time is without predictions. For
unlike replicas it takes the nodes as one large node, so its optimum is a bound that may be out of reach.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from random import Random
from time import process_time

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
from scipy.sparse import lil_matrix  # type: ignore[import-untyped]

from adascale_core.batch import BatchBounds, BatchPlan
from adascale_core.capacity import NodeCapacity
from adascale_core.decision import DecisionProblem, decide
from adascale_core.exact_allocation import maximize
from adascale_core.gain import GradientEstimate
from adascale_core.job_state import JobState
from adascale_core.job_utility import UTILITY_UNIT, JobUtility, weighted
from adascale_core.messages import StepTime
from adascale_core.packing import Demand, Node
from adascale_core.throughput import StepTimeModel

NODE = 8
SIZES = ((160, 512), (1000, 8192), (10_000, 100_000))
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


def seconds(jobs: list[JobState], capacity: int | NodeCapacity) -> float:
    """Return the processor time of a decision."""
    start = process_time()
    decide(jobs, capacity, 0.0)
    return process_time() - start


def optimum(utilities: list[dict[int, int]], requests: list[list[int]], totals: list[int]) -> float:
    """Return the highest total utility, by HiGHS.

    Args:
        utilities: of each job: count -> utility.
        requests: of each job: units of each resource that one replica takes.
        totals: units of each resource.
    """
    columns = [(i, count, value) for i, table in enumerate(utilities) for count, value in table.items()]
    matrix = lil_matrix((len(utilities) + len(totals), len(columns)))
    for column, (i, count, _) in enumerate(columns):
        matrix[i, column] = 1
        for row, units in enumerate(requests[i], len(utilities)):
            matrix[row, column] = count * units
    lower = np.array([1.0] * len(utilities) + [0.0] * len(totals))
    upper = np.array([1.0] * len(utilities) + [float(total) for total in totals])
    result = milp(
        -np.array([value / UTILITY_UNIT for _, _, value in columns]),
        constraints=LinearConstraint(matrix.tocsr(), lower, upper),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-6, "time_limit": 300},
    )
    return float(-result.fun)


def distance(best: float, utilities: list[dict[int, int]], counts: list[int]) -> float:
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
        "below the optimum, unlike"
    )
    for number, replicas in SIZES:
        if number > largest:
            continue
        random = Random(0)
        jobs = jobs_of(number, replicas, random)
        first = seconds(jobs, replicas)
        changed = [
            replace(job, estimate=GradientEstimate(1.0, random.lognormvariate(3, 1))) if i % 10 == 0 else job
            for i, job in enumerate(jobs)
        ]
        again = seconds(changed, replicas)
        nodes = [Node(f"{i:06}", {"gpu": NODE, "pods": 100}) for i in range(replicas // NODE)]
        on_nodes = seconds(changed, NodeCapacity(nodes, {job.id: Demand({"gpu": 1}) for job in jobs}))
        processors = [random.choice([4, 8]) for _ in jobs]
        nodes = [Node(node.name, {**node.free, "cpu": 48}) for node in nodes]
        unlike = NodeCapacity(
            nodes,
            {job.id: Demand({"gpu": 1, "cpu": cpu}) for job, cpu in zip(jobs, processors, strict=True)},
        )
        decide(changed, unlike, 0.0)
        again_unlike = seconds(jobs, unlike)
        exact = below = below_unlike = float("nan")
        if number <= MAX_MILP_JOBS:
            utilities = [
                utility.utilities(0.0)[0] for utility in weighted([JobUtility.of(job) for job in jobs])
            ]
            start = process_time()
            best = optimum(utilities, [[1]] * number, [replicas])
            exact = process_time() - start
            below = distance(best, utilities, maximize(utilities, replicas))
            problem = DecisionProblem.of(jobs, unlike)
            utilities = [utility.utilities(0.0)[0] for utility in problem.queue]
            best = optimum(utilities, [[1, cpu] for cpu in processors], [replicas, 48 * len(nodes)])
            below_unlike = distance(best, utilities, problem.solve(0.0))
        print(
            f"{number:>7} {replicas:>9} {first:>7.3f}s {again:>7.3f}s {on_nodes:>7.3f}s "
            f"{again_unlike:>7.3f}s {exact:>7.3f}s  {100 * below:.3f}%, {100 * below_unlike:.3f}%",
            flush=True,
        )


if __name__ == "__main__":
    main()
