"""The whole operator in a small world where anything may happen between any two of its writes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

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

from adascale_controller.operator.runtime import error_isolation
from adascale_controller.operator.schedule import scheduler
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core.decision import Decision
from adascale_core.job_state import JobState
from adascale_core.messages import ReplicaState
from support.world import World

COUNTS = st.integers(0, 4)


class Life(RuleBasedStateMachine):
    """A job, from one mishap to the next; in the end it must be as it was wished for last.

    The decision is the test's: `wish` stands for gain and room.
    """

    wish = 0

    def __init__(self) -> None:
        super().__init__()
        Life.wish = 1
        self.world = World()
        self.random = random.Random(0)

    @initialize(count=COUNTS, seed=st.integers(0, 999))
    def begin(self, count: int, seed: int) -> None:
        Life.wish = count
        self.random.seed(seed)
        self.world.meanwhile = self._meanwhile
        self.world.submit()
        self.world.settle(self.random.randint(0, 6))

    # -- what is wished for -----------------------------------------------------------------------------

    @rule(count=COUNTS)
    def decide_for(self, count: int) -> None:
        Life.wish = count

    @precondition(lambda self: self.world.job is not None)
    @rule(suspend=st.booleans())
    def suspend(self, suspend: bool) -> None:
        self.world.edit(suspend=suspend)

    @precondition(lambda self: self.world.job is not None)
    @rule(most=st.integers(4, 8))
    def edit_bounds(self, most: int) -> None:
        self.world.edit(maxReplicas=most)

    @precondition(lambda self: self.world.job is not None)
    @rule(tag=st.integers(1, 3))
    def edit_template(self, tag: int) -> None:
        worker = {"name": "worker", "image": f"trainer:{tag}"}
        self.world.edit(template={"spec": {"containers": [worker]}})

    @rule()
    def delete_or_submit(self) -> None:
        if self.world.job is None:
            self.world.submit()
        else:
            self.world.delete(Resource.ADASCALEJOBS, "digits")

    # -- what the operator does -------------------------------------------------------------------------

    @rule(heard=st.integers(0, 9), kill_before=st.none() | st.integers(0, 5), seed=st.integers(0, 999))
    def have_a_cycle(self, heard: int, kill_before: int | None, seed: int) -> None:
        self.random.seed(seed)
        self.world.tell_operator(heard)
        self.world.kill_before = kill_before
        self.world.cycle()
        self.world.kill_before = None

    @rule()
    def start_another_operator(self) -> None:
        self.world.start_operator()

    # -- what goes on -----------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 999), steps=st.integers(1, 8))
    def go_on(self, seed: int, steps: int) -> None:
        self.random.seed(seed)
        for _ in range(steps):
            self._meanwhile()

    @rule(cycles=st.integers(1, 6))
    def be_left_alone(self, cycles: int) -> None:
        self.world.settle(cycles)

    @precondition(lambda self: self.world.agents)
    @rule(seed=st.integers(0, 999))
    def lose_a_pod(self, seed: int) -> None:
        self.world.remove_pod(random.Random(seed).choice(sorted(self.world.agents)))

    @precondition(lambda self: self.world.agents)
    @rule(seed=st.integers(0, 999))
    def evict_a_pod(self, seed: int) -> None:
        self.world.end_pod(random.Random(seed).choice(sorted(self.world.agents)))

    @precondition(lambda self: self.world.indexed_job is not None)
    @rule()
    def delete_the_job_of_the_job(self) -> None:
        self.world.delete(Resource.JOBS, "digits")

    @rule()
    def lose_what_the_service_knows(self) -> None:
        self.world.service.lose_everything()

    def _meanwhile(self) -> None:
        world = self.world
        others: list[Callable[[], None]] = [
            world.collect_garbage,
            world.control_jobs,
            world.kubelet,
            world.miss_the_silent,
        ]
        agents: list[Callable[[], None]] = [partial(world.step, name) for name in world.agents]
        for act in self.random.choices([*others, *agents], k=self.random.randint(0, 6)):
            act()

    # -- what must hold ---------------------------------------------------------------------------------

    @invariant()
    def never_two_generations_are_active(self) -> None:
        assert len(self.world.current) <= 1

    def teardown(self) -> None:
        self.world.meanwhile = lambda: None
        self.world.settle()
        self.world.settle(1)
        assert self.world.writes == [], "a write is repeated for ever"
        if self.world.job is None:
            assert self.world.indexed_job is None
            left = self.world.service.list_jobs()
            assert not any(one.spec or one.desired or one.replicas for one in left)
            return
        spec, status = self.world.job["spec"], self.world.job["status"]
        count = 0 if spec.get("suspend") else Life.wish
        running = [one for one in self.world.agents.values() if one.state is ReplicaState.RUNNING]
        assert sorted(one.rank for one in running) == list(range(count))
        assert status["replicas"] == status["desiredReplicas"] == count
        assert len(self.world.objects[Resource.PODS]) == count
        desired = self.world.service.state.desired
        if desired is not None:
            assert status["allocation"] == {"generation": desired.generation, "replicas": desired.replicas}


def _loudly(*_: object) -> None:
    """The operator goes on where something is wrong with one job; the test does not."""
    raise


def test_whatever_happens_the_job_comes_to_be_as_it_is_wished_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def decided(states: list[JobState], *_: object) -> dict[str, Decision]:
        return {state.id: Decision(Life.wish, "as the test says") for state in states}

    monkeypatch.setattr(scheduler, "decide", decided)
    monkeypatch.setattr(error_isolation.logger, "exception", _loudly)
    run_state_machine_as_test(Life, settings=settings(max_examples=50, stateful_step_count=25, deadline=None))
