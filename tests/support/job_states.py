"""Job states and nodes for tests of the decision: made by hand, and drawn by Hypothesis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import BatchBounds, EfficiencyBound, valid_replicas
from adascale_core.decision.decide import Decision, DecisionProblem, Solution
from adascale_core.decision.job_utility import JobState
from adascale_core.messages.reports import StepTime
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.placement.capacity import Capacity, NodeCapacity, ReplicaCapacity
from adascale_core.placement.packing import Demand, Node

NOW = 10_000.0
GPU = "nvidia.com/gpu"
ANY = BatchBounds(32, 4096, (1, 128))
"""Every count up to 4096 is valid."""
EVEN_SPLIT = BatchBounds(8)
"""1, 2, 4 and 8 are valid."""
NOISY = GradientEstimate(grad_sqr=1.0, grad_var=1000.0)
"""The gain of a larger batch is nearly its scale."""
CLEAR = GradientEstimate(grad_sqr=1.0, grad_var=0.001)
"""The gain of a larger batch is nearly 1."""
OF_SAMPLES = EfficiencyBound(counts_samples=True)
"""That of a job whose length is in samples: 0.8, always."""
COMPUTE = StepTimeModel(fixed=0.01, per_sample=0.01)
"""Communication takes no time: twice the replicas are twice as fast."""
FIXED = StepTimeModel(fixed=1.0, per_sample=1e-6)
"""A step takes the same time with any batch size."""
SLOW_SYNC = StepTimeModel(fixed=0.0, per_sample=0.01, sync=2.0, sync_per_replica=0.5)
"""Communication takes more time than additional replicas save."""


def job(
    name: str,
    replicas: int = 0,
    *,
    arrival: float = 0.0,
    bounds: BatchBounds = ANY,
    at_least: int = 1,
    at_most: int = 8,
    measured: Sequence[int] = (),
    truth: StepTimeModel = COMPUTE,
    estimate: GradientEstimate | None = NOISY,
    stable_for: float | None = 1000.0,
    remaining: float | None = None,
    restart: float = 10.0,
) -> JobState:
    """Return a job with step times on the counts `measured` (default: `replicas`), two batch sizes each."""
    counts = [count for count in measured or [replicas] if count]
    step_times = [
        StepTime(count, max(size // count, 1), 1, 1.0) for count in counts for size in (bounds.batch_size, 64)
    ]
    return JobState(
        id=name,
        arrival=arrival,
        bounds=bounds,
        min_replicas=at_least,
        max_replicas=at_most,
        replicas=replicas,
        stable_since=None if stable_for is None else NOW - stable_for,
        estimate=estimate,
        step_times=[replace(time, step_time=truth.step_time(time.plan)) for time in step_times],
        remaining=remaining,
        restart_seconds=restart,
    )


def unmeasured(name: str, replicas: int = 0, *, arrival: float = 0.0, at_least: int = 1) -> JobState:
    """Return a job without measurements."""
    return replace(
        job(name, replicas, arrival=arrival, at_least=at_least),
        estimate=None,
        step_times=(),
        stable_since=None,
    )


models = st.builds(
    StepTimeModel,
    fixed=st.floats(0, 1),
    per_sample=st.floats(1e-3, 0.1),
    sync=st.floats(0, 1),
    sync_per_replica=st.floats(0, 0.1),
)
bounds_of_jobs = st.sampled_from(
    [
        ANY,
        EVEN_SPLIT,
        BatchBounds(12),
        BatchBounds(9),
        BatchBounds(32, 64, (8, 32)),
        BatchBounds(32, None, (48, 64)),
        BatchBounds(7, None, (2, 6)),
        BatchBounds(8, 16, (9, 32)),
    ]
)

deadlines = st.none() | st.floats(1, 1e5).map(lambda left: NOW + left)


@st.composite
def job_states(draw: st.DrawFn, name: str) -> JobState:
    at_least = draw(st.integers(1, 4))
    state = job(
        name,
        draw(st.integers(0, 9)),
        arrival=draw(st.integers(0, 3)),
        bounds=draw(bounds_of_jobs),
        at_least=at_least,
        at_most=draw(st.integers(at_least, 12)),
        measured=draw(st.lists(st.integers(1, 9), max_size=3)),
        truth=draw(models),
        estimate=draw(
            st.none() | st.builds(GradientEstimate, grad_sqr=st.floats(0, 10), grad_var=st.floats(0, 1e3))
        ),
        stable_for=draw(st.none() | st.sampled_from([0.0, 15.0, 1000.0])),
        remaining=draw(st.none() | st.floats(0, 1e5)),
        restart=draw(st.sampled_from([0.0, 1.0, 10.0, 100.0])),
    )
    later = draw(st.lists(st.tuples(st.floats(0, 0.99), st.floats(0, 1e3)), max_size=2))
    remaining = state.remaining
    return replace(
        state,
        largest=draw(st.integers(0, 9)),
        deadline=draw(deadlines),
        efficiency=EfficiencyBound(draw(st.none() | st.floats(0.01, 1)), draw(st.booleans())),
        later_estimates=()
        if remaining is None
        else tuple((share * remaining, GradientEstimate(1.0, var)) for share, var in sorted(later)),
    )


several_jobs = st.integers(0, 4).flatmap(lambda n: st.tuples(*(job_states(f"job-{i}") for i in range(n))))
capacities = st.integers(0, 24)


def allowed(state: JobState) -> list[int]:
    """Return the counts that are valid for a job, ascending."""
    return [
        count for count in valid_replicas(state.bounds, state.max_replicas) if count >= state.min_replicas
    ]


# -- decisions, and nodes -------------------------------------------------------------------------------


def solved(
    jobs: Sequence[JobState], capacity: int | Capacity, now: float = NOW, *, fairness: float | None = None
) -> Solution:
    """Return the decision about jobs, without their demands."""
    bound = ReplicaCapacity(capacity) if isinstance(capacity, int) else capacity
    problems = DecisionProblem.independent(jobs, bound, fairness=fairness)
    decisions = {name: each for problem in problems for name, each in problem.decide(now).items()}
    return Solution(decisions, problems)


def decide(
    jobs: Sequence[JobState], capacity: int | Capacity, now: float, *, fairness: float | None = None
) -> dict[str, Decision]:
    """Return the decision about each job."""
    return dict(solved(jobs, capacity, now, fairness=fairness).decisions)


def counts(jobs: Sequence[JobState], capacity: int | Capacity) -> dict[str, int]:
    """Return the decided counts."""
    return {name: decision.replicas for name, decision in decide(jobs, capacity, NOW).items()}


def gpus(name: str, count: int) -> Node:
    """Return a node with accelerators."""
    return Node(name, {GPU: count, "pods": 100})


def on(request: int, placed: str = "", *, one_node: bool = False) -> Demand:
    """Return a demand with replicas placed on nodes; `placed` has a one-letter node name for each rank."""
    return Demand({GPU: request}, None, dict(enumerate(placed)), one_node)


Demands = dict[str, Demand]


def placed(nodes: Sequence[Node], demands: Mapping[str, Demand], replicas: Mapping[str, int]) -> Demands:
    """Return the demands with as many placed replicas as fit, job after job."""
    packing = NodeCapacity(nodes, demands).packing()
    for name, count in replicas.items():
        while count and not packing.resize(name, count):
            count -= 1
    return {
        name: replace(demand, placed=packing.placements.get(name, {})) for name, demand in demands.items()
    }
