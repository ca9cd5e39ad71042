"""A spec whose pods the API server rejects."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import Observer
from adascale_controller.operator.runtime.work_queue import MAX_RETRY_INTERVAL
from adascale_controller.operator.types.kubernetes import ApiObject, ConditionType
from adascale_controller.operator.types.settings import OperatorSettings
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster
from support.observed_jobs import actions_for, condition, job, observed, view

REJECTION = 'spec.template: spec.containers[0].volumeMounts[0].name: Not found: "data"'


def test_a_rejected_spec_is_invalid_until_it_is_edited() -> None:
    observer, server = Observer(OperatorSettings("http://api")), FakeApiServer()
    server.submit()

    def read() -> AdaScaleJob:
        assert server.job is not None
        return observer.read(server.job, (), frozenset()).resource

    accepted = read()
    assert accepted.job is not None
    observer.reject(accepted, REJECTION)
    rejected = read()
    assert (rejected.job, rejected.invalid) == (None, REJECTION)
    server.edit(maxReplicas=1)
    assert read().job is not None


def test_a_job_without_pods_fails_and_starts_once_the_spec_is_corrected() -> None:
    rejected = replace(job((1, 2)), job=None, invalid=REJECTION)
    actions = actions_for(observed(rejected, view((1, 2))))
    failed = condition(actions, ConditionType.FAILED)
    assert (failed.status, failed.reason, failed.message) == (True, Reason.INVALID_SPEC, REJECTION)
    assert actions.create_pods == ()

    right = job((1, 2), status=actions.status)
    again = actions_for(observed(right, view((1, 2))), 2)
    assert [each.rank for each in again.create_pods] == [0, 1]
    assert again.status["state"] == "Starting"
    assert "completionTime" not in again.status


def test_a_job_with_pods_continues_with_its_previous_spec() -> None:
    rejected = replace(job((1, 2)), job=None, invalid=REJECTION)
    actions = actions_for(observed(rejected, view((1, 2), (1, 2)), 2))
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason, running.message) == (True, Reason.INVALID_SPEC, REJECTION)
    assert (actions.create_pods, actions.stop_pods) == ((), ())


# -- pods that the API server forbids, such as by a quota --------------------------------------------------

QUOTA = 'pods "digits-0-0" is forbidden: exceeded quota: few, requested: pods=1'


@pytest.mark.parametrize(
    ("reply", "reason"), [(QUOTA, "QuotaExceeded"), ("denied by a policy", "PodCreationFailed")]
)
def test_a_job_whose_pods_are_forbidden_says_so_until_it_is_allowed(
    reply: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbidden, create = ["digits-0-0"], FakeApiServer.create_pod

    async def refuse(fake: FakeApiServer, manifest: ApiObject) -> ApiObject | None:
        if manifest["metadata"]["name"] in forbidden:
            raise ApiServerError(f"rejects it: {reply}", 403, reply)
        return await create(fake, manifest)

    monkeypatch.setattr(FakeApiServer, "create_pod", refuse)
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles(10)
    assert running(cluster) == ("False", reason, reply)
    assert [event.reason for event in cluster.events].count(reason) == 1
    forbidden.clear()
    cluster.now += MAX_RETRY_INTERVAL
    cluster.run_cycles(10)
    assert running(cluster)[1] == "Training"


def test_a_refusal_whose_text_differs_is_no_news_and_is_tried_again_rarely_or_at_once_after_an_edit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[float] = []

    async def refuse(_: FakeApiServer, manifest: ApiObject) -> ApiObject | None:
        attempts.append(cluster.now)
        raise ApiServerError("rejects it", 403, f"denied by a policy, request {len(attempts)}")

    monkeypatch.setattr(FakeApiServer, "create_pod", refuse)
    cluster = FakeCluster()
    cluster.submit()
    cluster.run_cycles(300)
    assert 5 <= len(attempts) <= 12, attempts
    assert running(cluster) == ("False", "PodCreationFailed", "denied by a policy, request 1")
    cluster.edit(maxReplicas=8)
    edited_at = cluster.now
    cluster.run_cycles(2)
    assert edited_at < attempts[-1] <= edited_at + 2


def running(cluster: FakeCluster) -> tuple[str, str, str]:
    found = cluster.condition()
    return found["status"], found["reason"], found["message"]
