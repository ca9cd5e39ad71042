"""A state machine around the real operator: anything may happen between any two of its writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from adascale_controller.job.placement_backoff import MAX_PAUSE
from adascale_controller.operator.runtime import work_queue
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core import names
from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.registration import ReplicaState
from support.examples import examples
from support.fake_cluster import FakeCluster

COUNTS = st.integers(0, 4)
SEEDS = st.integers(0, 999)


class OperatorMachine(RuleBasedStateMachine):
    """One job and its operator. In the end the job has reached the state that was requested last.

    The test decides the replica count (`decided`), within the limit of the placement backoff.
    """

    decided = 0
    types: Sequence[str] = ()
    """The types of accelerators of the cluster; none if the operator may not read nodes."""

    def __init__(self) -> None:
        super().__init__()
        OperatorMachine.decided = 1
        self.cluster = FakeCluster(types=self.types)
        self.random = random.Random(0)

    @initialize(count=COUNTS, seed=SEEDS, serves_gangs=st.booleans())
    def submit_the_job(self, count: int, seed: int, serves_gangs: bool) -> None:
        OperatorMachine.decided = count
        self.cluster.pod_groups = {} if serves_gangs else None
        self.random.seed(seed)
        self.cluster.meanwhile = self._meanwhile
        self.cluster.submit()
        self.cluster.run_cycles(self.random.randint(0, 6))

    # -- decisions and edits ----------------------------------------------------------------------------

    @rule(count=COUNTS)
    def decide(self, count: int) -> None:
        OperatorMachine.decided = count
        # The decision of the test depends on nothing that the operator knows.
        self.cluster.full = True

    @precondition(lambda self: self.cluster.job is not None)
    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.cluster.edit(suspend=suspend)

    @precondition(lambda self: self.cluster.job is not None)
    @rule(most=st.integers(4, 8))
    def edit_bounds(self, most: int) -> None:
        self.cluster.edit(maxReplicas=most)

    @precondition(
        lambda self: self.cluster.job is not None and "opportunistic" not in self.cluster.job["spec"]
    )
    @rule(spares=st.integers(0, 2))
    def edit_spares(self, spares: int) -> None:
        self.cluster.edit(spareReplicas=spares)

    @precondition(lambda self: self.cluster.job is not None)
    @rule(tag=st.integers(1, 3))
    def edit_template(self, tag: int) -> None:
        self.cluster.edit(template={"spec": {"containers": [self.cluster.worker(tag)]}})

    @rule()
    def delete_or_submit(self) -> None:
        if self.cluster.job is None:
            self.cluster.submit()
        else:
            self.cluster.remove(Resource.ADASCALEJOBS, "digits")

    # -- the operator -----------------------------------------------------------------------------------

    @rule(delivered=st.integers(0, 9), kill_before=st.none() | st.integers(0, 5), seed=SEEDS)
    def run_a_cycle(self, delivered: int, kill_before: int | None, seed: int) -> None:
        self.random.seed(seed)
        self.cluster.deliver(delivered)
        self.cluster.kill_before = kill_before
        self.cluster.cycle()
        self.cluster.kill_before = None

    @rule()
    def restart_the_operator(self) -> None:
        self.cluster.start_operator()

    # -- the cluster ------------------------------------------------------------------------------------

    @rule(seed=SEEDS, steps=st.integers(1, 8))
    def let_others_act(self, seed: int, steps: int) -> None:
        self.random.seed(seed)
        for _ in range(steps):
            self._meanwhile()

    @rule(cycles=st.integers(1, 6))
    def run_undisturbed(self, cycles: int) -> None:
        self.cluster.run_cycles(cycles)

    @rule()
    def miss_nothing(self) -> None:
        """A look at everything finds nothing to do where a look at what has changed found nothing."""
        self.cluster.deliver()
        self.cluster.cycle()
        if self.cluster.writes:
            return
        self.cluster.now -= 1
        self.cluster.full = True
        self.cluster.cycle()
        assert self.cluster.writes == []

    @rule(slots=st.integers(0, 4))
    def fill_the_node(self, slots: int) -> None:
        self.cluster.node_slots = slots

    @precondition(lambda self: self.cluster.agents)
    @rule(seed=SEEDS)
    def lose_a_pod(self, seed: int) -> None:
        self.cluster.remove_pod(self._pick_pod(seed))

    @precondition(lambda self: self.cluster.agents)
    @rule(seed=SEEDS)
    def delete_a_pod(self, seed: int) -> None:
        self.cluster.terminate_pod(self._pick_pod(seed))

    @precondition(lambda self: self.cluster.agents)
    @rule(seed=SEEDS)
    def evict_a_pod(self, seed: int) -> None:
        self.cluster.evict_pod(self._pick_pod(seed))

    @precondition(lambda self: self.cluster.agents)
    @rule(seed=SEEDS)
    def exceed_the_memory_of_a_pod(self, seed: int) -> None:
        self.cluster.end_pod(self._pick_pod(seed), {"exitCode": 137, "reason": "OOMKilled"})

    @precondition(lambda self: self.cluster.agents)
    @rule(seed=SEEDS)
    def fail_the_program_in_a_pod(self, seed: int) -> None:
        self.cluster.fail_program(self._pick_pod(seed))

    @rule()
    def lose_the_data_of_the_metrics_service(self) -> None:
        self.cluster.service.lose_data()

    def _pick_pod(self, seed: int) -> str:
        return random.Random(seed).choice(sorted(self.cluster.agents))

    def _meanwhile(self) -> None:
        cluster = self.cluster
        controllers: list[Callable[[], None]] = [
            cluster.collect_garbage,
            cluster.schedule_pods,
            cluster.run_kubelet,
            cluster.expire_missing,
        ]
        agents: list[Callable[[], None]] = [partial(cluster.run_agent, name) for name in cluster.agents]
        for act in self.random.choices([*controllers, *agents], k=self.random.randint(0, 6)):
            act()

    # -- invariants -------------------------------------------------------------------------------------

    @invariant()
    def at_most_one_generation_is_active(self) -> None:
        """A generation whose members all run in it, so that they can make steps, and which is not over.

        A member that runs alone in a generation whose other members have left it waits for them. Without its
        data, the metrics service does not know that this generation is over.
        """
        view = self.cluster.service.state.view(1)
        running = [agent for agent in self.cluster.agents.values() if agent.state is ReplicaState.RUNNING]
        there = {(agent.generation, agent.instance) for agent in running}
        active = {
            agent.generation
            for agent in running
            if not view.has_ended(agent.generation)
            and all((agent.generation, member) in there for member in agent.members)
        }
        assert len(active) <= 1

    @invariant()
    def only_failures_of_the_program_are_counted(self) -> None:
        if self.cluster.job is not None and self.cluster.job.get("status"):
            assert self.cluster.status["failures"] <= self.cluster.program_failures

    def teardown(self) -> None:
        cluster = self.cluster
        cluster.meanwhile = lambda: None
        cluster.node_slots = 100
        for name in self.types:
            cluster.add_node(name)
        cluster.run_cycles()
        cluster.now += MAX_PAUSE
        cluster.run_cycles()
        cluster.run_cycles(1)
        assert cluster.writes == [], "a write is repeated without end"
        cluster.full = True
        cluster.run_cycles(1)
        assert cluster.writes == [], "a change was missed: a look at everything finds more to do"
        if cluster.job is None:
            assert not cluster.objects[Resource.PODS]
            jobs = cluster.service.list_jobs()
            assert not any(job.spec or job.desired or job.replicas for job in jobs)
            return
        spec, status = cluster.job["spec"], cluster.status
        failed = status["state"] == "Failed"
        assert failed == (status["failures"] > 3), "backoffLimit is 3"
        count = 0 if spec.get("suspend") or failed else OperatorMachine.decided
        running = [agent for agent in cluster.agents.values() if agent.state is ReplicaState.RUNNING]
        spares = spec.get("spareReplicas", 0) if count else 0
        assert len({agent.rank for agent in running} & set(range(count + spares))) == len(running) == count
        assert status["replicas"] == status["desiredReplicas"] == count
        assert status.get("spareReplicas", 0) == spares
        assert len(cluster.live_pods) == count + spares
        images = {raw["spec"]["containers"][0]["image"] for raw in cluster.live_pods}
        assert images <= {spec["template"]["spec"]["containers"][0]["image"]}
        desired = cluster.service.state.desired
        if desired is not None:
            recorded = {"generation": desired.generation, "replicas": desired.replicas}
            assert status["allocation"] == recorded | ({"spares": spares} if spares else {})
            assert (desired.spares, desired.failed) == (spares, failed)


class OperatorMachineWithTypes(OperatorMachine):
    """As `OperatorMachine`, in a cluster with two types of accelerators whose nodes come and go."""

    types = ("h200", "l4")

    @rule(name=st.sampled_from(types))
    def add_a_node(self, name: str) -> None:
        self.cluster.add_node(name)

    @rule(name=st.sampled_from(types))
    def remove_a_node(self, name: str) -> None:
        self.cluster.remove_node(name)

    @invariant()
    def pods_that_are_kept_on_one_type_are_on_one_type(self) -> None:
        # If there was one type when they were created, a pod may be scheduled on another before the operator
        # knows of it.
        pods = self.cluster.live_pods
        if all(names.ANNOTATION_ACCELERATOR in raw["metadata"]["annotations"] for raw in pods):
            assert len(self.cluster.nodes_of_pods()) <= 1

    def teardown(self) -> None:
        super().teardown()
        cluster = self.cluster
        if cluster.job is not None:
            on = {raw["spec"]["nodeName"] for raw in cluster.live_pods}
            assert on in (set(), {cluster.status.get("accelerator")})


class OperatorMachineWithExtraPods(OperatorMachine):
    """As `OperatorMachine`, for a job of which one replica is its core."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster.admit = self._admit
        self.cluster.spec = {"opportunistic": {"priorityClassName": "spot"}}

    @staticmethod
    def _admit(pod: dict[str, Any]) -> dict[str, Any]:
        is_extra = pod["spec"].get("priorityClassName") == "spot"
        return {**pod, "spec": {**pod["spec"], "priority": -10 if is_extra else 0}}

    @precondition(lambda self: self.cluster.job is not None)
    @rule(fewest=st.integers(1, 2))
    def edit_the_size_of_the_core(self, fewest: int) -> None:
        self.cluster.edit(minReplicas=fewest)

    @rule()
    def take_all_extra_pods(self) -> None:
        for name, raw in list(self.cluster.objects[Resource.PODS].items()):
            if raw["spec"].get("priority") == -10 and name in self.cluster.agents:
                self.cluster.evict_pod(name)

    @invariant()
    def pods_beyond_the_core_have_the_lower_priority(self) -> None:
        for raw in self.cluster.live_pods:
            assert (raw["spec"]["priority"] == -10) == (names.LABEL_EXTRA in raw["metadata"]["labels"])

    def teardown(self) -> None:
        if self.cluster.job is not None:
            fewest = self.cluster.job["spec"].get("minReplicas", 1)
            OperatorMachine.decided = max(OperatorMachine.decided, fewest)
            self.cluster.full = True
        super().teardown()
        if self.cluster.job is None:
            return
        core = [raw for raw in self.cluster.live_pods if raw["spec"]["priority"] == 0]
        fewest = self.cluster.job["spec"].get("minReplicas", 1)
        assert len(core) == (fewest if self.cluster.live_pods else 0)


def _raise(*_: object) -> None:
    """Raise the error that the operator isolates."""
    raise


@pytest.mark.parametrize("machine", [OperatorMachine, OperatorMachineWithTypes, OperatorMachineWithExtraPods])
def test_the_job_reaches_the_requested_state_whatever_happens(
    monkeypatch: pytest.MonkeyPatch, machine: type[OperatorMachine]
) -> None:
    def decide(problem: DecisionProblem, _now: float) -> dict[str, Decision]:
        decided = OperatorMachine.decided
        states = [utility.job for utility in problem.queue]
        limits = {state.id: decided if state.limit is None else state.limit for state in states}
        return {job: Decision(min(decided, limit), "by the test") for job, limit in limits.items()}

    monkeypatch.setattr(DecisionProblem, "decide", decide)
    monkeypatch.setattr(work_queue.logger, "exception", _raise)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples(8), stateful_step_count=25))


@pytest.mark.parametrize("serves_gangs", [False, True])
@pytest.mark.parametrize("before", range(7))
def test_an_operator_that_is_killed_before_any_write_makes_no_second_replica_and_stops_none_that_trains(
    before: int, serves_gangs: bool
) -> None:
    """The cluster of the test refuses both."""
    cluster = FakeCluster(pod_groups={} if serves_gangs else None)
    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: cluster.submit(minReplicas=2), 2),
        (lambda: cluster.edit(minReplicas=4), 4),
        (lambda: cluster.evict_pod(min(cluster.agents)), 4),
        (lambda: cluster.fail_program(max(cluster.agents)), 4),
        (lambda: cluster.edit(template={"spec": {"containers": [cluster.worker(2)]}}), 4),
        (lambda: cluster.edit(minReplicas=1, maxReplicas=1), 1),
        (lambda: cluster.edit(suspend=True), 0),
        (lambda: cluster.edit(suspend=False, minReplicas=2, maxReplicas=2), 2),
    ]
    for change, replicas in changes:
        change()
        for _ in range(40):
            cluster.kill_before = before
            cluster.run_cycles(1)
        cluster.kill_before = None
        cluster.run_cycles(20)
        assert (cluster.status["replicas"], len(cluster.live_pods)) == (replicas, replicas)
    assert bool(cluster.pod_groups) == serves_gangs


@pytest.mark.parametrize(
    ("edit", "count"), [({"minReplicas": 1, "maxReplicas": 1}, 1), ({"suspend": True}, 0)]
)
def test_a_pod_stays_until_a_metrics_service_that_has_lost_its_data_knows_its_trainer(
    edit: dict[str, Any], count: int
) -> None:
    cluster = FakeCluster()
    cluster.submit(minReplicas=2)
    cluster.run_cycles(15)
    last = max(cluster.agents)
    assert (cluster.agents[last].rank, cluster.agents[last].state) == (1, ReplicaState.RUNNING)
    cluster.service.lose_data()
    cluster.edit(**edit)
    cluster.deliver()
    cluster.meanwhile = lambda: cluster.run_agent(last)
    cluster.cycle()
    assert not [write for write in cluster.writes if write.startswith("delete pod")]
    cluster.meanwhile = lambda: None
    cluster.run_cycles(20)
    assert [agent.state for agent in cluster.agents.values()] == [ReplicaState.RUNNING] * count
    assert len(cluster.live_pods) == count


def test_a_job_moves_to_another_type_of_accelerator_when_the_nodes_of_its_own_are_gone() -> None:
    cluster = FakeCluster(types=("h200", "l4"))
    cluster.submit(minReplicas=2)
    cluster.run_cycles(15)
    assert (cluster.status["accelerator"], cluster.status["replicas"]) == ("h200", 2)
    cluster.remove_node("h200")
    cluster.run_cycles(15)
    assert (cluster.status["accelerator"], cluster.status["replicas"]) == ("l4", 2)
    assert {raw["spec"]["nodeName"] for raw in cluster.live_pods} == {"l4"}
    cluster.add_node("h200")
    cluster.edit(suspend=True)
    cluster.run_cycles(15)
    assert "accelerator" not in cluster.status
    cluster.edit(suspend=False)
    cluster.run_cycles(15)
    assert cluster.status["accelerator"] == "h200", "without replicas it may get another type"


def test_a_job_that_was_decided_about_without_nodes_stays_where_its_pods_are() -> None:
    cluster = FakeCluster(types=("h200", "l4"))
    for name in ("h200", "l4"):
        cluster.remove_node(name)
    cluster.submit(minReplicas=3, maxReplicas=3)
    cluster.kill_before = 1
    cluster.cycle()
    for name in ("h200", "l4"):
        cluster.add_node(name)
    cluster.run_cycles(15)
    assert cluster.service.state.desired == Allocation(1, 3)
    assert [agent.state for agent in cluster.agents.values()] == [ReplicaState.RUNNING] * 3


def test_a_job_of_an_earlier_operator_whose_pods_are_on_two_types_is_moved_to_one() -> None:
    cluster = FakeCluster(types=("h200",), node_slots=2)
    cluster.submit(minReplicas=4)
    cluster.run_cycles(5)
    assert not any(map(is_kept_on_a_type, cluster.live_pods))
    cluster.add_node("l4")
    cluster.schedule_pods()
    assert len(cluster.nodes_of_pods()) == 2
    cluster.node_slots = 4
    cluster.run_cycles()
    assert (cluster.status["replicas"], len(cluster.nodes_of_pods())) == (4, 1)
    assert all(map(is_kept_on_a_type, cluster.live_pods))


def is_kept_on_a_type(raw: dict[str, Any]) -> bool:
    return names.ANNOTATION_ACCELERATOR in raw["metadata"]["annotations"]


def api_urls(cluster: FakeCluster) -> set[str]:
    """The addresses of the metrics service that pods have; with TLS, they have its authority too."""
    found = set()
    for pod in cluster.live_pods:
        variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        url = str(variables[names.ENV_API_URL])
        assert (names.ENV_CA_FILE in variables) == url.startswith("https://")
        found.add(url)
    return found


@pytest.mark.parametrize(("before", "after"), [("http", "https"), ("https", "http")])
def test_pods_are_replaced_when_tls_is_turned_on_or_off(before: str, after: str) -> None:
    cluster = FakeCluster(api_url=f"{before}://api")
    cluster.submit(minReplicas=2)
    cluster.run_cycles(15)
    assert api_urls(cluster) == {f"{before}://api"}
    cluster.api_url = f"{after}://api"
    cluster.start_operator()
    cluster.run_cycles()
    assert len(cluster.live_pods) == 2
    assert api_urls(cluster) == {f"{after}://api"}
    assert [agent.state for agent in cluster.agents.values()] == [ReplicaState.RUNNING] * 2
    assert cluster.status["failures"] == 0
