"""A scheduler that gets what has changed decides like one that gets everything again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.schedule import scheduler as scheduler_module
from adascale_controller.operator.schedule.scheduler import BURST, MAX_CHANGE_SHARE, MIN_INTERVAL, Scheduler
from adascale_controller.schedule.standing import MAX_EXPLAINED
from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.decision.type_choice import Accelerator
from adascale_core.messages.reports import StepTime
from adascale_core.names import DEFAULT_ACCELERATOR_LABEL
from support.examples import examples
from support.observed_jobs import GPU, NOW, new_job, node, pod, report, view

Nodes = Sequence[Mapping[str, Any]]
CONTAINER = {"name": "worker", "resources": {"limits": {GPU: 1}}}
TIMES = (StepTime(1, 4, 1, 0.1), StepTime(2, 4, 1, 0.101))


def waiting(number: int, most: int | None, zone: str | None) -> ObservedJob:
    """Return a job that has not started."""
    spec: dict[str, Any] = {"containers": [CONTAINER]}
    if zone is not None:
        spec["nodeSelector"] = {"zone": zone}
    made = new_job(f"job-{number}", replica_limit=most, template={"spec": spec})
    return replace(made, resource=replace(made.resource, generation=(most or 0) + 10 * len(zone or "")))


def training(number: int, most: int | None, zone: str | None, count: int, *, measured: bool) -> ObservedJob:
    base = waiting(number, most, zone)
    status = {"allocation": {"generation": 1, "replicas": count}}
    service = replace(view((1, count), (1, count)), id=base.resource.id)
    if measured:
        service = replace(service, latest=report(1, count), step_times=TIMES)
    pods = tuple(replace(pod(rank), node=f"node{number % 3}") for rank in range(count))
    return replace(
        base,
        resource=replace(base.resource, status=status),
        service=service,
        pods=pods,
    )


def _on_type(job: ObservedJob, accelerator: str) -> ObservedJob:
    """Return a job whose status says that its replicas are on a type of accelerator."""
    status = {**job.resource.status, "accelerator": accelerator}
    return replace(job, resource=replace(job.resource, status=status))


def nodes_of_types(*types: str) -> Nodes:
    """Return a node of each type of accelerator, with one of them."""
    return [node(name, 1, {DEFAULT_ACCELERATOR_LABEL: name}) for name in types]


@st.composite
def jobs(draw: st.DrawFn) -> ObservedJob:
    number, most = draw(st.integers(0, 3)), draw(st.sampled_from([None, 1, 2]))
    zone = draw(st.sampled_from([None, "a"]))
    if draw(st.booleans()):
        return waiting(number, most, zone)
    return training(number, most, zone, draw(st.integers(1, 3)), measured=draw(st.booleans()))


@st.composite
def clusters(draw: st.DrawFn) -> Nodes:
    version = draw(st.integers(1, 10**6))
    each = st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from([None, "h200", "l4"]))
    nodes = []
    for number, (gpus, zone, type_) in enumerate(draw(st.lists(each, max_size=3))):
        labels = {"zone": zone} | ({DEFAULT_ACCELERATOR_LABEL: type_} if type_ else {})
        made = node(f"node{number}", gpus, labels)
        nodes.append({**made, "metadata": made["metadata"] | {"resourceVersion": str(version)}})
    return nodes


CHANGES = st.lists(st.one_of(jobs(), clusters(), st.integers(0, 3)), min_size=1, max_size=12)


def decide(scheduler: Scheduler, now: float, present: Iterable[str] = ()) -> None:
    """Decide if that is due, as the control loop does, which then looks at the jobs that are returned."""
    if scheduler.is_due(now):
        before = {job_id: scheduler.decision(job_id) for job_id in present}
        changed = scheduler.adopt(scheduler.solve(scheduler.decision_input()), now)
        for job_id, decision in before.items():
            if job_id not in changed:
                assert _requested(scheduler.decision(job_id)) == _requested(decision)


def _requested(decision: Decision | None) -> object:
    return decision and (decision.replicas, decision.accelerator)


@settings(max_examples=examples(30))
@given(CHANGES)
def test_after_any_changes_the_decisions_are_those_that_a_look_at_everything_finds(
    changes: Sequence[Any],
) -> None:
    incremental = Scheduler()
    nodes: Nodes = ()
    present: dict[str, ObservedJob] = {}
    incremental.set_resources(nodes, ())
    for moment, change in enumerate(changes):
        if isinstance(change, ObservedJob):
            present[change.resource.id] = change
            incremental.update(change)
        elif isinstance(change, int):
            present.pop(f"team.job-{change}", None)
            incremental.remove(f"team.job-{change}")
        else:
            nodes = change
            incremental.set_resources(nodes, ())
        # Long enough for a decision about new measurements.
        decide(incremental, NOW + 1000 * moment, present)
    found = {job_id: incremental.decision(job_id) for job_id in present}
    incremental.set_resources(nodes, ())
    for each in present.values():
        incremental.update(each)
    incremental.decide_again()
    decide(incremental, NOW + 1_000_000, present)
    for job_id, before in found.items():
        after = incremental.decision(job_id)
        assert before is not None
        assert after is not None
        assert (before.replicas, before.waiting) == (after.replicas, after.waiting)


def test_a_job_does_not_grow_into_what_another_keeps_because_it_was_edited_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decided = {"team.job-0": 4, "team.job-1": 2}
    monkeypatch.setattr(
        DecisionProblem,
        "decide",
        lambda problem, now: {
            each.job.id: Decision(decided[each.job.id], "by the test") for each in problem.queue
        },
    )
    scheduler = Scheduler()
    scheduler.set_resources([node("node0", 4), node("node1", 2)], ())
    scheduler.update(training(0, None, None, 4, measured=True))
    scheduler.update(training(1, None, None, 2, measured=True))
    decide(scheduler, NOW)
    decided |= {"team.job-0": 2, "team.job-1": 4}
    scheduler.decide_again()
    late = scheduler.solve(scheduler.decision_input())
    scheduler.update(training(0, 3, None, 4, measured=True))
    scheduler.adopt(late, NOW + 100)
    found = [scheduler.decision(name) for name in decided]
    assert [each.replicas for each in found if each is not None] == [3, 2]
    assert scheduler.is_due(NOW + 200), "both are decided about again"
    decide(scheduler, NOW + 200)
    found = [scheduler.decision(name) for name in decided]
    assert [each.replicas for each in found if each is not None] == [2, 4]


def test_nothing_is_decided_again_if_nothing_has_changed() -> None:
    scheduler = Scheduler()
    scheduler.set_resources((), ())
    first = training(0, None, None, 2, measured=True)
    scheduler.update(first)
    decide(scheduler, NOW)
    scheduler.update(first)
    assert not scheduler.is_due(NOW + 1000)
    scheduler.update(replace(first, resource=waiting(0, 1, None).resource))
    assert scheduler.is_due(NOW), "an edit"
    assert scheduler.is_due(NOW - 1), "the clock was set back"


@given(costs=st.lists(st.floats(0.001, 3.0), min_size=20, max_size=60), set_back=st.integers(0, 59))
def test_decisions_about_changes_are_made_at_once_and_take_half_of_the_time_after_a_burst(
    costs: Sequence[float], set_back: int
) -> None:
    scheduler = Scheduler()
    scheduler.set_resources((), ())
    scheduler.update(waiting(0, None, None))
    now, begun, used = NOW, NOW, 0.0
    for number, cost in enumerate(costs):
        if number == set_back:
            now = begun = now - 1e6
            used = 0.0
        else:
            now = max(now, scheduler.due_at(now))
            assert used + cost <= MAX_CHANGE_SHARE * (now + cost - begun) + BURST + max(costs)
        result = scheduler.solve(scheduler.decision_input())
        now, used = now + cost, used + cost
        scheduler.adopt(replace(result, cost=cost), now)
        scheduler.decide_again()
    assert scheduler.due_at(now) <= now + max(costs) / MAX_CHANGE_SHARE, "it never waits for longer"
    assert scheduler.is_due(now + sum(costs) / MAX_CHANGE_SHARE), "nothing is left of the burst's use"


def test_a_job_that_has_become_what_was_decided_is_not_decided_about_at_once() -> None:
    scheduler = Scheduler()
    scheduler.set_resources([node("node0", 1)], ())
    scheduler.update(waiting(0, None, None))
    decide(scheduler, NOW)
    decision = scheduler.decision("team.job-0")
    assert decision is not None
    assert decision.replicas == 1
    scheduler.update(training(0, None, None, 1, measured=False))
    assert scheduler.due_at(NOW) >= NOW + MIN_INTERVAL


def test_a_decision_for_another_type_does_not_hold_for_a_job_that_has_begun_on_one() -> None:
    """Otherwise it would be stopped for that type, and resumed by the decision made meanwhile, and so on."""
    scheduler = Scheduler()
    scheduler.set_resources(nodes_of_types("h200", "l4"), ())
    scheduler.update(waiting(0, None, None))
    decide(scheduler, NOW)
    first = scheduler.decision("team.job-0")
    assert first is not None
    assert first.accelerator == Accelerator("h200", required=True)
    scheduler.update(_on_type(training(0, None, None, 1, measured=False), "l4"))
    assert scheduler.decision("team.job-0") == Decision(1, "unchanged")
    decide(scheduler, NOW + 1)
    second = scheduler.decision("team.job-0")
    assert second is not None
    assert second.accelerator is not None
    assert second.accelerator.type == "l4"


def test_a_decision_that_holds_again_is_followed_though_it_is_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(problem: DecisionProblem, _now: float) -> dict[str, Decision]:
        return {utility.job.id: Decision(0, "by the test") for utility in problem.queue}

    monkeypatch.setattr(DecisionProblem, "decide", stop)
    scheduler = Scheduler()
    scheduler.set_resources(nodes_of_types("h200", "l4"), ())
    scheduler.update(_on_type(training(0, None, None, 1, measured=False), "h200"))
    decide(scheduler, NOW, ["team.job-0"])
    scheduler.update(training(0, None, None, 0, measured=False))
    assert scheduler.decision("team.job-0") is None, "without replicas it may get another type"
    decide(scheduler, NOW + 1, ["team.job-0"])
    assert scheduler.decision("team.job-0") == Decision(
        0, "by the test", accelerator=Accelerator("h200", True)
    )


def test_all_new_decisions_are_explained_without_another_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_SHARE", inf)
    scheduler = Scheduler()
    scheduler.set_resources(None, ())
    for number in range(3 * MAX_EXPLAINED - 1):
        scheduler.update(waiting(number, None, None))
    scheduler.adopt(scheduler.solve(scheduler.decision_input()), NOW)
    batches = [[each.job for each in scheduler.explain()] for _ in range(4)]
    assert [len(jobs) for jobs in batches] == [MAX_EXPLAINED, MAX_EXPLAINED, MAX_EXPLAINED - 1, 0]
    assert len({job for jobs in batches for job in jobs}) == 3 * MAX_EXPLAINED - 1
    assert not scheduler.is_due(NOW + 60)


def test_explanations_take_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_SHARE", 1e-9)
    scheduler = Scheduler()
    scheduler.set_resources(None, ())
    for number in range(MAX_EXPLAINED + 1):
        scheduler.update(waiting(number, None, None))
    scheduler.adopt(scheduler.solve(scheduler.decision_input()), NOW)
    assert [len(scheduler.explain()) for _ in range(3)] == [MAX_EXPLAINED, 0, 0]


@pytest.mark.parametrize(
    ("cluster", "fairness", "weights"),
    [
        (None, None, [0.5, 1.5]),
        (None, 0.0, [0.5, 1.5]),
        (None, 1.0, [1.0, 1.0]),
        (nodes_of_types("h200", "l4"), None, [0.75, 1.25]),
        (nodes_of_types("h200", "l4"), 0.0, [0.5, 1.5]),
        (nodes_of_types("h200", "l4"), 1.0, [1.0, 1.0]),
    ],
)
def test_the_weights_of_jobs_follow_the_fairness_of_the_operator(
    cluster: Nodes | None, fairness: float | None, weights: Sequence[float]
) -> None:
    scheduler = Scheduler(fairness=fairness)
    scheduler.set_resources(cluster, ())
    for number, accelerator in enumerate(("h200", "l4")):
        scheduler.update(_on_type(training(number, 2, None, 1, measured=True), accelerator))
    result = scheduler.solve(scheduler.decision_input())
    found = [utility.weight for problem in result.solution.problems for utility in problem.queue]
    assert sorted(found) == weights
