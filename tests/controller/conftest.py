"""Fixtures of several files: a world of the operator whose decisions the test makes."""

from __future__ import annotations

from typing import Any

import pytest

from adascale_controller.operator.apply.cluster import ApiServerError
from adascale_controller.operator.types.kubernetes import Resource
from adascale_core import names
from adascale_core.decision.decide import Decision, DecisionProblem
from support.world import World

Object = dict[str, Any]


class Cluster:
    """PriorityClasses, and the count that is decided for the job."""

    def __init__(self) -> None:
        self.priorities = {None: 100, "spot": -10}
        self.count = 4
        self.world = World(admit=self._admit)

    def _admit(self, pod: Object) -> Object:
        name = pod["spec"].get("priorityClassName")
        if name not in self.priorities:
            raise ApiServerError("rejected", 403, f"no PriorityClass with name {name} was found")
        return {**pod, "spec": pod["spec"] | {"priority": self.priorities[name]}}

    @property
    def sizes(self) -> dict[str, int]:
        """The parallelism of the Indexed Jobs that are not being deleted."""
        jobs = self.world.objects[Resource.JOBS]
        present = {name: raw for name, raw in jobs.items() if "deletionTimestamp" not in raw["metadata"]}
        return {name: raw["spec"]["parallelism"] for name, raw in present.items()}

    @property
    def status(self) -> Object:
        assert self.world.job is not None
        status: Object = self.world.job["status"]
        return status

    def condition(self, kind: str) -> Object:
        found: Object = next(each for each in self.status["conditions"] if each["type"] == kind)
        return found

    def decide(self, count: int) -> None:
        self.count = count
        self.world.full = True
        self.world.run_cycles(10)

    def extra_pods(self) -> list[str]:
        return [
            raw["metadata"]["name"]
            for raw in self.world.live_pods
            if names.ANNOTATION_FIRST_REPLICA in raw["metadata"]["annotations"]
        ]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()

    def decide(problem: DecisionProblem, _now: float) -> dict[str, Decision]:
        states = [utility.job for utility in problem.queue]
        return {
            state.id: Decision(
                min(made.count, made.count if state.limit is None else state.limit), "by the test"
            )
            for state in states
        }

    monkeypatch.setattr(DecisionProblem, "decide", decide)
    return made
