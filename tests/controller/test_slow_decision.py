"""While a decision takes long, everything else goes on; what comes late is checked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Iterator

import pytest

from adascale_controller.operator.apply import applier
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.runtime import control_loop
from adascale_controller.operator.runtime.control_loop import OperatorLoop
from adascale_controller.operator.schedule import scheduler
from adascale_controller.operator.types.kubernetes import ApiObject, JobKey, Resource
from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.messages.allocation import Allocation, AllocationView
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster
from support.fake_service import FakeService
from support.observed_jobs import report


class SlowDecisions:
    """Decisions for as many replicas as a job may have, up to 4, that can be held back."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.may_end.set()
        self.begun = 0
        self.ended = 0
        self.keeps = False
        """Whether all jobs keep the replica count that the decision knows of."""

    def decide(self, problem: DecisionProblem, _now: float) -> dict[str, Decision]:
        self.begun += 1
        if self.keeps:
            present = {each.job.id: Decision(each.job.replicas, "unchanged") for each in problem.queue}
            assert self.may_end.wait(60)
            self.ended += 1
            return present
        limits = {utility.job.id: utility.job.limit or 4 for utility in problem.queue}
        assert self.may_end.wait(60)
        self.ended += 1
        return {job: Decision(min(4, limit), "by the test") for job, limit in limits.items()}


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDecisions]:
    found = SlowDecisions()
    monkeypatch.setattr(
        DecisionProblem, "decide", lambda problem, now: found.decide(problem, now), raising=True
    )
    monkeypatch.setattr(control_loop, "INTERVAL", 0.02)
    monkeypatch.setattr(control_loop, "PAUSE", 0.01)
    yield found
    found.may_end.set()


def training_on_four(decisions: SlowDecisions) -> FakeCluster:
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles(20)
    assert cluster.service.state.desired == Allocation(1, 4)
    assert cluster.status["replicas"] == 4
    cluster.writes = []
    return cluster


def shrink_during_a_decision(cluster: FakeCluster, decisions: SlowDecisions) -> Iterator[Callable[[], bool]]:
    """Have a decision begin, and limit the job to 2 replicas before it ends."""
    begun = decisions.begun
    decisions.may_end.clear()
    cluster.edit(maxReplicas=8)
    yield lambda: decisions.begun > begun
    cluster.edit(replicaLimit=2)
    yield desired(cluster, 2)


def desired(cluster: FakeCluster, replicas: int) -> Callable[[], bool]:
    def holds() -> bool:
        allocation = cluster.service.state.desired
        return allocation is not None and allocation.replicas == replicas

    return holds


def test_a_job_shrinks_and_lost_pods_are_replaced_while_a_decision_takes_long(
    decisions: SlowDecisions,
) -> None:
    cluster = training_on_four(decisions)
    begun = decisions.begun

    def steps() -> Iterator[Callable[[], bool]]:
        yield from shrink_during_a_decision(cluster, decisions)
        pod = next(iter(cluster.agents))
        cluster.evict_pod(pod)
        yield lambda: f"create pod {pod[:-1]}1" in cluster.writes
        assert decisions.ended == begun, "all this was done without a new decision"
        decisions.may_end.set()
        yield lambda: decisions.ended > begun

    run_steps(cluster, steps())


def test_the_metrics_service_knows_a_new_job_before_it_is_decided_about(decisions: SlowDecisions) -> None:
    cluster = FakeCluster()
    decisions.may_end.clear()

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.submit()
        yield lambda: cluster.service.spec is not None
        assert decisions.ended == 0
        assert cluster.service.state.desired is None
        assert cluster.job is not None
        assert "status" not in cluster.job
        decisions.may_end.set()
        yield desired(cluster, 4)

    run_steps(cluster, steps())


def test_reports_are_not_looked_at_while_a_decision_is_made(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = training_on_four(decisions)
    loops: list[OperatorLoop] = []
    looks: list[Collection[JobKey]] = []
    look = OperatorLoop._look

    async def recorded_look(loop: OperatorLoop, keys: Collection[JobKey]) -> set[JobKey]:
        loops.append(loop)
        looks.append(keys)
        return await look(loop, keys)

    def steps() -> Iterator[Callable[[], bool]]:
        yield from shrink_during_a_decision(cluster, decisions)
        monkeypatch.setattr(OperatorLoop, "_look", recorded_look)
        wanted = cluster.service.state.desired
        yield lambda: bool(loops) and (loops[-1]._views or {})["team.digits"].desired == wanted
        cluster.service.post(report(replicas=2))
        yield lambda: loops[-1]._queue.has_reported
        cycles = len(looks)
        yield lambda: len(looks) > cycles + 5
        assert not any(looks[cycles:])
        decisions.may_end.set()
        yield lambda: any(looks[cycles:]) and not loops[-1]._queue.has_reported

    run_steps(cluster, steps())


def test_a_late_decision_does_not_undo_an_edit(decisions: SlowDecisions) -> None:
    cluster = training_on_four(decisions)
    begun = decisions.begun

    def steps() -> Iterator[Callable[[], bool]]:
        yield from shrink_during_a_decision(cluster, decisions)
        cluster.writes = []
        decisions.may_end.set()
        yield lambda: decisions.ended >= begun + 2

    run_steps(cluster, steps())
    cluster.run_cycles(20)
    assert desired(cluster, 2)()
    assert not [write for write in cluster.writes if write.startswith("allocate")]
    assert cluster.status["replicas"] == 2


def hold_back_allocations(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Have the metrics service not answer requested allocations.

    Returns:
        the event that lets it answer, and the one that is set once it was asked.
    """
    may_answer, is_asked = threading.Event(), threading.Event()
    allocate = cluster.service.allocate

    def slow(job_id: str, allocation: Allocation) -> AllocationView:
        is_asked.set()
        assert may_answer.wait(60)
        return allocate(job_id, allocation)

    monkeypatch.setattr(cluster.service, "allocate", slow)
    return may_answer, is_asked


def test_a_decision_knows_of_replicas_that_are_being_requested(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that, a job alternates between two counts where requests take longer than decisions."""
    monkeypatch.setattr(control_loop, "APPLY_WAIT", 0.01)
    cluster = FakeCluster()
    may_answer, is_asked = hold_back_allocations(cluster, monkeypatch)

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.submit()
        yield is_asked.is_set
        decisions.keeps = True
        ended = decisions.ended
        cluster.submit("other")
        yield lambda: decisions.ended > ended
        decisions.may_end.clear()
        begun = decisions.begun
        cluster.submit("another")
        yield lambda: decisions.begun > begun
        may_answer.set()
        yield lambda: bool(cluster.live_pods)
        cluster.edit(backoffLimit=5)
        yield lambda: cluster.job is not None and cluster.status["observedGeneration"] == 2
        decisions.may_end.set()

    run_steps(cluster, steps())
    cluster.run_cycles(5)
    assert cluster.service.state.desired == Allocation(1, 4)


def test_what_is_planned_is_dropped_with_its_job(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_loop, "MAX_CONCURRENT", 1)
    cluster = training_on_four(decisions)
    may_answer, is_asked = hold_back_allocations(cluster, monkeypatch)

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.edit(replicaLimit=2)
        yield is_asked.is_set
        ended = decisions.ended
        cluster.submit("other")
        yield lambda: decisions.ended > ended
        yield lambda: "adascale_operator_pending_jobs 2.0" in cluster.metrics.text().decode()
        cluster.remove(Resource.ADASCALEJOBS, "other")
        yield lambda: "adascale_operator_pending_jobs 1.0" in cluster.metrics.text().decode()
        may_answer.set()
        yield desired(cluster, 2)

    run_steps(cluster, steps())
    assert not any(name.startswith("other") for name in cluster.objects[Resource.PODS])


def test_what_is_planned_for_a_job_is_not_begun_while_the_job_is_looked_at(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the actions of that look, for the state before, would be carried out after it."""
    monkeypatch.setattr(control_loop, "MAX_CONCURRENT", 1)
    cluster = training_on_four(decisions)
    may_answer, is_asked = hold_back_allocations(cluster, monkeypatch)
    looks: list[bool] = []
    look = OperatorLoop._look

    async def slow_look(loop: OperatorLoop, keys: Collection[JobKey]) -> set[JobKey]:
        looked_at = await look(loop, keys)
        other = ("team", "other")
        if other in keys and other in loop._urgent.planned:
            may_answer.set()
            while not all(task.done() for key, task in loop._applying.items() if key != other):
                await asyncio.sleep(0)
            looks.append(other in loop._applying)
        return looked_at

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.edit(replicaLimit=2)
        yield is_asked.is_set
        cluster.submit("other")
        yield lambda: "adascale_operator_pending_jobs 2.0" in cluster.metrics.text().decode()
        monkeypatch.setattr(OperatorLoop, "_look", slow_look)
        other = cluster.objects[Resource.ADASCALEJOBS]["other"]
        cluster.write(Resource.ADASCALEJOBS, {**other, "spec": {**other["spec"], "backoffLimit": 5}})
        yield lambda: bool(looks)

    run_steps(cluster, steps())
    assert looks == [False]


@pytest.mark.parametrize("call", ["put_decision", "delete_job"])
def test_a_slow_metrics_service_delays_no_reaction(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    cluster = training_on_four(decisions)
    may_answer, waiting = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        waiting.set()
        assert may_answer.wait(60)

    monkeypatch.setattr(FakeService, call, hang)

    def steps() -> Iterator[Callable[[], bool]]:
        if call == "put_decision":
            cluster.edit(replicaLimit=2)
        else:
            cluster.remove(Resource.ADASCALEJOBS, "digits")
            for name in list(cluster.agents):
                cluster.remove_pod(name)
        yield waiting.is_set
        cluster.submit("other", suspend=True)
        yield lambda: "status" in cluster.objects[Resource.ADASCALEJOBS]["other"]
        assert not may_answer.is_set()
        may_answer.set()

    try:
        run_steps(cluster, steps())
    finally:
        may_answer.set()


def test_a_status_is_written_beside_a_write_that_does_not_end(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(applier, "STATUS_INTERVAL", 0.0)
    cluster = training_on_four(decisions)
    written: list[float] = []
    waiting = threading.Event()
    apply_status = FakeApiServer.apply_status

    async def hang_for_other(self: FakeApiServer, job: AdaScaleJob, status: ApiObject) -> ApiObject:
        if job.name == "other":
            waiting.set()
            await asyncio.Event().wait()
        written.append(status["progress"])
        return await apply_status(self, job, status)

    monkeypatch.setattr(FakeApiServer, "apply_status", hang_for_other)

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.submit("other", suspend=True)
        yield waiting.is_set
        cluster.service.post(report(replicas=4))
        yield lambda: bool(written)

    run_steps(cluster, steps())


def test_a_list_of_all_objects_that_hangs_delays_no_reaction(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_loop, "RESYNC_INTERVAL", 0.0)
    cluster = training_on_four(decisions)
    listing = threading.Event()

    async def hang(*_: object) -> tuple[list[ApiObject], int]:
        listing.set()
        await asyncio.Event().wait()
        return [], 0

    monkeypatch.setattr(FakeApiServer, "list", hang)

    def steps() -> Iterator[Callable[[], bool]]:
        yield listing.is_set
        cluster.edit(replicaLimit=2)
        yield desired(cluster, 2)

    run_steps(cluster, steps())


def test_a_decision_that_fails_is_made_again(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control_loop, "DECISION_RETRY_INTERVAL", 0.1)
    cluster = training_on_four(decisions)
    decide, failures = decisions.decide, 0

    def fail_twice(problem: DecisionProblem, now: float) -> dict[str, Decision]:
        nonlocal failures
        if failures < 2:
            failures += 1
            raise ZeroDivisionError("a bug")
        return decide(problem, now)

    monkeypatch.setattr(decisions, "decide", fail_twice)

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.edit(maxReplicas=8)
        yield lambda: failures > 0
        pod = next(iter(cluster.agents))
        cluster.evict_pod(pod)
        yield lambda: f"create pod {pod[:-1]}1" in cluster.writes
        ended = decisions.ended
        yield lambda: decisions.ended > ended

    run_steps(cluster, steps())
    assert failures == 2
    assert caplog.text.count("No decision could be made; trying again") == 2


def test_a_decision_that_can_not_be_explained_is_tried_once(
    decisions: SlowDecisions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = training_on_four(decisions)
    attempts = 0

    def fail(*_: object, **__: object) -> None:
        nonlocal attempts
        attempts += 1
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(scheduler, "explain", fail)

    def steps() -> Iterator[Callable[[], bool]]:
        cluster.edit(replicaLimit=2)
        yield lambda: attempts > 0
        ended = cluster.now + 0.5
        yield lambda: cluster.now > ended
        cluster.edit(backoffLimit=9)
        cluster.writes = []
        yield lambda: "status" in cluster.writes

    run_steps(cluster, steps())
    assert attempts <= decisions.ended
    assert caplog.text.count("The last decision could not be explained") == attempts


def run_steps(cluster: FakeCluster, steps: Iterator[Callable[[], bool]]) -> None:
    """Run the operator until the condition of each step holds, one after the other."""
    current = next(steps)

    def done() -> bool:
        nonlocal current
        try:
            while current():
                current = next(steps)
        except StopIteration:
            return True
        return False

    cluster.run_until(done)
