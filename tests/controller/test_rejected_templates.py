"""A spec whose Indexed Job the API server rejects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from adascale_controller.operator.observe.adascalejob import AdaScaleJob, SpecReader
from adascale_controller.operator.types.conditions import ConditionType, Reason
from support.observed_jobs import actions_for, condition, indexed_job, job, observed, view

REJECTION = 'spec.template: spec.containers[0].volumeMounts[0].name: Not found: "data"'


def raw(generation: int) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "digits",
            "namespace": "team",
            "uid": "5a0d",
            "generation": generation,
            "creationTimestamp": "2026-03-01T10:00:00Z",
        },
        "spec": {
            "batchSize": 4,
            "maxReplicas": 1,
            "template": {"spec": {"containers": [{"name": "worker", "image": "trainer:1"}]}},
        },
    }


def test_a_rejected_spec_is_invalid_until_it_is_edited() -> None:
    specs = SpecReader()
    accepted = AdaScaleJob.read(raw(1), specs)
    assert accepted.job is not None
    specs.reject(accepted, REJECTION)
    rejected = AdaScaleJob.read(raw(1), specs)
    assert (rejected.job, rejected.invalid) == (None, REJECTION)
    assert AdaScaleJob.read(raw(2), specs).job is not None


def test_a_job_without_pods_fails_and_starts_once_the_spec_is_corrected() -> None:
    rejected = replace(job((1, 2)), job=None, invalid=REJECTION)
    actions = actions_for(observed(rejected, view((1, 2))))
    failed = condition(actions, ConditionType.FAILED)
    assert (failed.status, failed.reason, failed.message) == (True, Reason.INVALID_SPEC, REJECTION)
    assert actions.create_indexed_job is None

    right = job((1, 2), status=actions.status)
    again = actions_for(observed(right, view((1, 2))), 2)
    assert again.create_indexed_job == 2
    assert again.status["state"] == "Starting"
    assert "completionTime" not in again.status


def test_a_job_with_pods_continues_with_its_previous_spec() -> None:
    rejected = replace(job((1, 2)), job=None, invalid=REJECTION)
    actions = actions_for(observed(rejected, view((1, 2), (1, 2)), indexed_job(2)))
    running = condition(actions, ConditionType.RUNNING)
    assert (running.status, running.reason, running.message) == (True, Reason.INVALID_SPEC, REJECTION)
    assert (actions.resize, actions.delete_indexed_job) == (None, False)
