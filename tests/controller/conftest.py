"""Fixtures of several files: a world of the operator whose decisions the test makes."""

from __future__ import annotations

from typing import Any

import pytest

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.schema import Opportunistic
from adascale_core import names
from adascale_core.decision.decide import Decision, DecisionProblem
from support.world import World

Object = dict[str, Any]
SPOT = {"priorityClassName": "spot"}
SETTINGS = Opportunistic.model_validate({"priorityClassName": "spot"})


class Cluster:
    """A world with PriorityClasses."""

    def __init__(self, decided: DecidedCount) -> None:
        self.decided = decided
        self.priorities = {None: 100, "spot": -10}
        self.world = World(admit=self._admit)

    def _admit(self, pod: Object) -> Object:
        name = pod["spec"].get("priorityClassName")
        if name not in self.priorities:
            raise ApiServerError("rejected", 403, f"no PriorityClass with name {name} was found")
        return {**pod, "spec": pod["spec"] | {"priority": self.priorities[name]}}

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of live pods of the smallest count, and of extra pods."""
        extra = len(self.extra_pods())
        return len(self.world.live_pods) - extra, extra

    def decide(self, count: int) -> None:
        self.decided.count = count
        self.world.full = True
        self.world.run_cycles(10)

    def extra_pods(self) -> list[str]:
        return [
            raw["metadata"]["name"]
            for raw in self.world.live_pods
            if names.LABEL_EXTRA in raw["metadata"]["labels"]
        ]


class DecidedCount:
    """The replica count that is decided for each job, within its limits."""

    def __init__(self) -> None:
        self.count = 4

    def decide(self, problem: DecisionProblem, _now: float) -> dict[str, Decision]:
        states = [utility.job for utility in problem.queue]
        limits = {each.id: self.count if each.limit is None else each.limit for each in states}
        return {
            each.id: Decision(min(self.count, each.max_replicas, limits[each.id]), "by the test")
            for each in states
        }


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> DecidedCount:
    made = DecidedCount()
    monkeypatch.setattr(DecisionProblem, "decide", lambda problem, now: made.decide(problem, now))
    return made


@pytest.fixture
def cluster(decided: DecidedCount) -> Cluster:
    return Cluster(decided)
