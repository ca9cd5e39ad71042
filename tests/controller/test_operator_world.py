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
from support.world import World

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
        self.world = World(types=self.types)
        self.random = random.Random(0)

    @initialize(count=COUNTS, seed=SEEDS)
    def submit_the_job(self, count: int, seed: int) -> None:
        OperatorMachine.decided = count
        self.random.seed(seed)
        self.world.meanwhile = self._meanwhile
        self.world.submit()
        self.world.run_cycles(self.random.randint(0, 6))

    # -- decisions and edits ----------------------------------------------------------------------------

    @rule(count=COUNTS)
    def decide(self, count: int) -> None:
        OperatorMachine.decided = count
        # The decision of the test depends on nothing that the operator knows.
        self.world.full = True

    @precondition(lambda self: self.world.job is not None)
    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.world.edit(suspend=suspend)

    @precondition(lambda self: self.world.job is not None)
    @rule(most=st.integers(4, 8))
    def edit_bounds(self, most: int) -> None:
        self.world.edit(maxReplicas=most)

    @precondition(lambda self: self.world.job is not None and "opportunistic" not in self.world.job["spec"])
    @rule(spares=st.integers(0, 2))
    def edit_spares(self, spares: int) -> None:
        self.world.edit(spareReplicas=spares)

    @precondition(lambda self: self.world.job is not None)
    @rule(tag=st.integers(1, 3))
    def edit_template(self, tag: int) -> None:
        self.world.edit(template={"spec": {"containers": [self.world.worker(tag)]}})

    @rule()
    def delete_or_submit(self) -> None:
        if self.world.job is None:
            self.world.submit()
        else:
            self.world.delete(Resource.ADASCALEJOBS, "digits")

    # -- the operator -----------------------------------------------------------------------------------

    @rule(delivered=st.integers(0, 9), kill_before=st.none() | st.integers(0, 5), seed=SEEDS)
    def run_a_cycle(self, delivered: int, kill_before: int | None, seed: int) -> None:
        self.random.seed(seed)
        self.world.deliver(delivered)
        self.world.kill_before = kill_before
        self.world.cycle()
        self.world.kill_before = None

    @rule()
    def restart_the_operator(self) -> None:
        self.world.start_operator()

    # -- the cluster ------------------------------------------------------------------------------------

    @rule(seed=SEEDS, steps=st.integers(1, 8))
    def let_others_act(self, seed: int, steps: int) -> None:
        self.random.seed(seed)
        for _ in range(steps):
            self._meanwhile()

    @rule(cycles=st.integers(1, 6))
    def run_undisturbed(self, cycles: int) -> None:
        self.world.run_cycles(cycles)

    @rule()
    def miss_nothing(self) -> None:
        """A look at everything finds nothing to do where a look at what has changed found nothing."""
        self.world.deliver()
        self.world.cycle()
        if self.world.writes:
            return
        self.world.now -= 1
        self.world.full = True
        self.world.cycle()
        assert self.world.writes == []

    @rule(slots=st.integers(0, 4))
    def fill_the_node(self, slots: int) -> None:
        self.world.node_slots = slots

    @precondition(lambda self: self.world.agents)
    @rule(seed=SEEDS)
    def lose_a_pod(self, seed: int) -> None:
        self.world.delete_pod(self._pick_pod(seed))

    @precondition(lambda self: self.world.agents)
    @rule(seed=SEEDS)
    def delete_a_pod(self, seed: int) -> None:
        self.world.terminate_pod(self._pick_pod(seed))

    @precondition(lambda self: self.world.agents)
    @rule(seed=SEEDS)
    def evict_a_pod(self, seed: int) -> None:
        self.world.evict_pod(self._pick_pod(seed))

    @precondition(lambda self: self.world.agents)
    @rule(seed=SEEDS)
    def exceed_the_memory_of_a_pod(self, seed: int) -> None:
        self.world.exceed_memory(self._pick_pod(seed))

    @precondition(lambda self: self.world.agents)
    @rule(seed=SEEDS)
    def fail_the_program_in_a_pod(self, seed: int) -> None:
        self.world.fail_program(self._pick_pod(seed))

    @rule()
    def lose_the_data_of_the_metrics_service(self) -> None:
        self.world.service.lose_data()

    def _pick_pod(self, seed: int) -> str:
        return random.Random(seed).choice(sorted(self.world.agents))

    def _meanwhile(self) -> None:
        world = self.world
        controllers: list[Callable[[], None]] = [
            world.collect_garbage,
            world.schedule_pods,
            world.run_kubelet,
            world.expire_missing,
        ]
        agents: list[Callable[[], None]] = [partial(world.run_agent, name) for name in world.agents]
        for act in self.random.choices([*controllers, *agents], k=self.random.randint(0, 6)):
            act()

    # -- invariants -------------------------------------------------------------------------------------

    @invariant()
    def at_most_one_generation_is_active(self) -> None:
        assert len(self.world.current_generations) <= 1

    @invariant()
    def only_failures_of_the_program_are_counted(self) -> None:
        if self.world.job is not None and self.world.job.get("status"):
            assert self.world.status["failures"] <= self.world.program_failures

    def teardown(self) -> None:
        world = self.world
        world.meanwhile = lambda: None
        world.node_slots = 100
        for name in self.types:
            world.add_node(name)
        world.run_cycles()
        world.now += MAX_PAUSE
        world.run_cycles()
        world.run_cycles(1)
        assert world.writes == [], "a write is repeated without end"
        world.full = True
        world.run_cycles(1)
        assert world.writes == [], "a change was missed: a look at everything finds more to do"
        if world.job is None:
            assert not world.objects[Resource.PODS]
            jobs = world.service.list_jobs()
            assert not any(job.spec or job.desired or job.replicas for job in jobs)
            return
        spec, status = world.job["spec"], world.status
        failed = status["state"] == "Failed"
        assert failed == (status["failures"] > 3), "backoffLimit is 3"
        count = 0 if spec.get("suspend") or failed else OperatorMachine.decided
        running = [agent for agent in world.agents.values() if agent.state is ReplicaState.RUNNING]
        spares = spec.get("spareReplicas", 0) if count else 0
        assert len({agent.rank for agent in running} & set(range(count + spares))) == len(running) == count
        assert status["replicas"] == status["desiredReplicas"] == count
        assert status.get("spareReplicas", 0) == spares
        assert len(world.live_pods) == count + spares
        images = {raw["spec"]["containers"][0]["image"] for raw in world.live_pods}
        assert images <= {spec["template"]["spec"]["containers"][0]["image"]}
        desired = world.service.state.desired
        if desired is not None:
            recorded = {"generation": desired.generation, "replicas": desired.replicas}
            assert status["allocation"] == recorded | ({"spares": spares} if spares else {})
            assert (desired.spares, desired.failed) == (spares, failed)


class OperatorMachineWithTypes(OperatorMachine):
    """As `OperatorMachine`, in a cluster with two types of accelerators whose nodes come and go."""

    types = ("h200", "l4")

    @rule(name=st.sampled_from(types))
    def add_a_node(self, name: str) -> None:
        self.world.add_node(name)

    @rule(name=st.sampled_from(types))
    def remove_a_node(self, name: str) -> None:
        self.world.remove_node(name)

    @invariant()
    def pods_that_are_kept_on_one_type_are_on_one_type(self) -> None:
        # If there was one type when they were created, a pod may be scheduled on another before the operator
        # knows of it.
        pods = self.world.live_pods
        if all(names.ANNOTATION_ACCELERATOR in raw["metadata"]["annotations"] for raw in pods):
            assert len(self.world.nodes_of_pods()) <= 1

    def teardown(self) -> None:
        super().teardown()
        world = self.world
        if world.job is not None:
            on = {raw["spec"]["nodeName"] for raw in world.live_pods}
            assert on in (set(), {world.status.get("accelerator")})


class OperatorMachineWithExtraPods(OperatorMachine):
    """As `OperatorMachine`, for a job of which one replica is its core."""

    def __init__(self) -> None:
        super().__init__()
        self.world.admit = self._admit
        self.world.spec = {"opportunistic": {"priorityClassName": "spot"}}

    @staticmethod
    def _admit(pod: dict[str, Any]) -> dict[str, Any]:
        is_extra = pod["spec"].get("priorityClassName") == "spot"
        return {**pod, "spec": {**pod["spec"], "priority": -10 if is_extra else 0}}

    @precondition(lambda self: self.world.job is not None)
    @rule(fewest=st.integers(1, 2))
    def edit_the_size_of_the_core(self, fewest: int) -> None:
        self.world.edit(minReplicas=fewest)

    @rule()
    def take_all_extra_pods(self) -> None:
        for name, raw in list(self.world.objects[Resource.PODS].items()):
            if raw["spec"].get("priority") == -10 and name in self.world.agents:
                self.world.evict_pod(name)

    @invariant()
    def pods_beyond_the_core_have_the_lower_priority(self) -> None:
        for raw in self.world.live_pods:
            assert (raw["spec"]["priority"] == -10) == (names.LABEL_EXTRA in raw["metadata"]["labels"])

    def teardown(self) -> None:
        if self.world.job is not None:
            fewest = self.world.job["spec"].get("minReplicas", 1)
            OperatorMachine.decided = max(OperatorMachine.decided, fewest)
            self.world.full = True
        super().teardown()
        if self.world.job is None:
            return
        core = [raw for raw in self.world.live_pods if raw["spec"]["priority"] == 0]
        fewest = self.world.job["spec"].get("minReplicas", 1)
        assert len(core) == (fewest if self.world.live_pods else 0)


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


@pytest.mark.parametrize("before", range(7))
def test_an_operator_that_is_killed_before_any_write_makes_no_second_replica_and_stops_none_that_trains(
    before: int,
) -> None:
    """The cluster of the test refuses both."""
    world = World()
    changes: list[tuple[Callable[[], object], int]] = [
        (lambda: world.submit(minReplicas=2), 2),
        (lambda: world.edit(minReplicas=4), 4),
        (lambda: world.evict_pod(min(world.agents)), 4),
        (lambda: world.fail_program(max(world.agents)), 4),
        (lambda: world.edit(template={"spec": {"containers": [world.worker(2)]}}), 4),
        (lambda: world.edit(minReplicas=1, maxReplicas=1), 1),
        (lambda: world.edit(suspend=True), 0),
        (lambda: world.edit(suspend=False, minReplicas=2, maxReplicas=2), 2),
    ]
    for change, replicas in changes:
        change()
        for _ in range(40):
            world.kill_before = before
            world.run_cycles(1)
        world.kill_before = None
        world.run_cycles(20)
        assert (world.status["replicas"], len(world.live_pods)) == (replicas, replicas)


@pytest.mark.parametrize(
    ("edit", "count"), [({"minReplicas": 1, "maxReplicas": 1}, 1), ({"suspend": True}, 0)]
)
def test_a_pod_stays_until_a_metrics_service_that_has_lost_its_data_knows_its_trainer(
    edit: dict[str, Any], count: int
) -> None:
    world = World()
    world.submit(minReplicas=2)
    world.run_cycles(15)
    last = max(world.agents)
    assert (world.agents[last].rank, world.agents[last].state) == (1, ReplicaState.RUNNING)
    world.service.lose_data()
    world.edit(**edit)
    world.deliver()
    world.meanwhile = lambda: world.run_agent(last)
    world.cycle()
    assert not [write for write in world.writes if write.startswith("delete pod")]
    world.meanwhile = lambda: None
    world.run_cycles(20)
    assert [agent.state for agent in world.agents.values()] == [ReplicaState.RUNNING] * count
    assert len(world.live_pods) == count


def test_a_job_moves_to_another_type_of_accelerator_when_the_nodes_of_its_own_are_gone() -> None:
    world = World(types=("h200", "l4"))
    world.submit(minReplicas=2)
    world.run_cycles(15)
    assert (world.status["accelerator"], world.status["replicas"]) == ("h200", 2)
    world.remove_node("h200")
    world.run_cycles(15)
    assert (world.status["accelerator"], world.status["replicas"]) == ("l4", 2)
    assert {raw["spec"]["nodeName"] for raw in world.live_pods} == {"l4"}
    world.add_node("h200")
    world.edit(suspend=True)
    world.run_cycles(15)
    assert "accelerator" not in world.status
    world.edit(suspend=False)
    world.run_cycles(15)
    assert world.status["accelerator"] == "h200", "without replicas it may get another type"


def test_a_job_that_was_decided_about_without_nodes_stays_where_its_pods_are() -> None:
    world = World(types=("h200", "l4"))
    for name in ("h200", "l4"):
        world.remove_node(name)
    world.submit(minReplicas=3, maxReplicas=3)
    world.kill_before = 1
    world.cycle()
    for name in ("h200", "l4"):
        world.add_node(name)
    world.run_cycles(15)
    assert world.service.state.desired == Allocation(1, 3)
    assert [agent.state for agent in world.agents.values()] == [ReplicaState.RUNNING] * 3


def test_a_job_of_an_earlier_operator_whose_pods_are_on_two_types_is_moved_to_one() -> None:
    world = World(types=("h200",), node_slots=2)
    world.submit(minReplicas=4)
    world.run_cycles(5)
    assert not any(map(is_kept_on_a_type, world.live_pods))
    world.add_node("l4")
    world.schedule_pods()
    assert len(world.nodes_of_pods()) == 2
    world.node_slots = 4
    world.run_cycles()
    assert (world.status["replicas"], len(world.nodes_of_pods())) == (4, 1)
    assert all(map(is_kept_on_a_type, world.live_pods))


def is_kept_on_a_type(raw: dict[str, Any]) -> bool:
    return names.ANNOTATION_ACCELERATOR in raw["metadata"]["annotations"]


def api_urls(world: World) -> set[str]:
    """The addresses of the metrics service that pods have; with TLS, they have its authority too."""
    found = set()
    for pod in world.live_pods:
        variables = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        url = str(variables[names.ENV_API_URL])
        assert (names.ENV_CA_FILE in variables) == url.startswith("https://")
        found.add(url)
    return found


@pytest.mark.parametrize(("before", "after"), [("http", "https"), ("https", "http")])
def test_pods_are_replaced_when_tls_is_turned_on_or_off(before: str, after: str) -> None:
    world = World(api_url=f"{before}://api")
    world.submit(minReplicas=2)
    world.run_cycles(15)
    assert api_urls(world) == {f"{before}://api"}
    world.api_url = f"{after}://api"
    world.start_operator()
    world.run_cycles()
    assert len(world.live_pods) == 2
    assert api_urls(world) == {f"{after}://api"}
    assert [agent.state for agent in world.agents.values()] == [ReplicaState.RUNNING] * 2
    assert world.status["failures"] == 0
