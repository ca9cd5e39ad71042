"""Fixtures of several files: a cluster with an operator whose decisions the test makes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from adascale_client import MetricsServiceClient
from adascale_controller.schema import Opportunistic
from adascale_core import names
from adascale_core.decision.decide import Decision, DecisionProblem
from adascale_core.decision.explanation import explain
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from api.client import TOKEN
from support.fake_cluster import FakeCluster
from support.job_states import NOW, solved
from support.job_states import job as job_state
from support.service import Service

Object = dict[str, Any]
SPOT = {"priorityClassName": "spot"}
SETTINGS = Opportunistic.model_validate({"priorityClassName": "spot"})


class ClusterWithPriorities(FakeCluster):
    """A cluster with PriorityClasses."""

    def __init__(self, decided: DecidedCount) -> None:
        super().__init__(priorities={None: 100, "spot": -10})
        self.decided = decided

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of live pods of the smallest count, and of extra pods."""
        extra = len(self.extra_pods())
        return len(self.live_pods) - extra, extra

    def decide(self, count: int) -> None:
        self.decided.count = count
        self.full = True
        self.run_cycles(10)

    def extra_pods(self) -> list[str]:
        return [
            raw["metadata"]["name"]
            for raw in self.live_pods
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


REPORT = {
    "generation": 1, "step": 1200, "progress": 4512.5, "epoch": 3, "replicas": 2, "local_bsz": 16,
    "accumulation": 1, "scale": 8.0, "gain": 6.25, "grad_sqr": 0.01, "grad_var": 0.25, "step_time": 0.004,
    "loss": 0.2134, "goodput": 1450.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A metrics service with a job that has a report and a decision, and a job without."""
    started = Service(tmp_path_factory.mktemp("service"), job="default.digits")
    client = MetricsServiceClient(started.url, TOKEN)
    client.declare_job("default.digits", JobSpec(4, 256, (4, 64), 1, 4, 12_000))
    client.declare_job("default.silent", JobSpec(4))
    client.allocate("default.digits", Allocation(1, 2))
    started.call("POST", "/gain", {**REPORT, "time": time.time()})
    solution = solved([job_state("default.digits", 2)], 8)
    client.put_decision(explain(solution, NOW, time.time(), ["default.digits"])["default.digits"])
    client.close()
    yield started
    started.stop()


@pytest.fixture
def decided(monkeypatch: pytest.MonkeyPatch) -> DecidedCount:
    made = DecidedCount()
    monkeypatch.setattr(DecisionProblem, "decide", lambda problem, now: made.decide(problem, now))
    return made


@pytest.fixture
def cluster(decided: DecidedCount) -> ClusterWithPriorities:
    return ClusterWithPriorities(decided)
