"""The Indexed Job of an AdaScaleJob: its fields, its changes, and the digest of its template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.job_definition import CheckpointSettings
from adascale_controller.operator.apply.indexed_job import (
    indexed_job_manifest,
    resize_patch,
)
from adascale_controller.operator.types.workload import (
    ELASTIC_JOB,
    QUEUE_NAME,
    PodSettings,
    Queueing,
    Workload,
    template_digest,
)
from adascale_core import names
from adascale_core.failures import IGNORED_EXIT_CODES
from support.pod_templates import OWNER, SPEC, container, template, workload

# -- the Job -----------------------------------------------------------------------------------------------


def test_the_indexed_job_has_the_name_of_the_job_and_no_backoff_limit() -> None:
    made = indexed_job_manifest(workload(), 3, suspend=False, single_node=False)
    assert (made["apiVersion"], made["kind"]) == ("batch/v1", "Job")
    assert made["metadata"]["name"] == "digits"
    assert made["metadata"]["namespace"] == "team"
    assert made["metadata"]["ownerReferences"] == [OWNER]
    assert made["metadata"]["labels"][names.LABEL_JOB] == "digits"
    assert made["metadata"]["annotations"] == {
        names.ANNOTATION_TEMPLATE: template_digest(workload(), single_node=False)
    }
    spec = made["spec"]
    del spec["template"]
    assert spec == {
        "completionMode": "Indexed",
        "completions": 3,
        "parallelism": 3,
        "suspend": False,
        "backoffLimit": 2147483647,
        "backoffLimitPerIndex": 2147483647,
        "podReplacementPolicy": "Failed",
        "successPolicy": {"rules": [{"succeededCount": 1}]},
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "Ignore",
                    "onExitCodes": {
                        "containerName": "worker",
                        "operator": "In",
                        "values": list(IGNORED_EXIT_CODES),
                    },
                },
            ]
        },
    }


def test_the_indexed_job_has_the_deadline() -> None:
    made = indexed_job_manifest(workload(active_deadline_seconds=60), 1, suspend=False, single_node=False)
    assert made["spec"]["activeDeadlineSeconds"] == 60


def test_the_failure_policy_names_the_worker_container() -> None:
    made = indexed_job_manifest(
        workload(template(container("main"), container("logs"))), 1, suspend=False, single_node=False
    )
    rule = made["spec"]["podFailurePolicy"]["rules"][1]
    assert rule["onExitCodes"]["containerName"] == "main"


@pytest.mark.parametrize(("replicas", "size"), [(0, 1), (1, 1), (4, 4)])
def test_completions_and_parallelism_change_together_and_are_never_zero(replicas: int, size: int) -> None:
    made = indexed_job_manifest(workload(), replicas, suspend=True, single_node=False)["spec"]
    patch = resize_patch(replicas, suspend=True)["spec"]
    assert patch == {"completions": size, "parallelism": size, "suspend": True, "activeDeadlineSeconds": None}
    assert {name: value for name, value in patch.items() if value is not None}.items() <= made.items()


def test_the_resize_patch_has_the_deadline() -> None:
    assert resize_patch(2, suspend=False, active_deadline_seconds=60)["spec"]["activeDeadlineSeconds"] == 60


# -- the digest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of_job",
    [
        {"spec": replace(SPEC, max_batch_size=512)},
        {"spec": replace(SPEC, local_bsz_bounds=(4, 32))},
        {"spec": replace(SPEC, batch_size=8)},
        {"spec": replace(SPEC, max_replicas=8, efficiency_target=0.7, scale_invariant_steps=5)},
        {"suspend": True, "backoff_limit": 9, "active_deadline_seconds": 5, "ttl_seconds_after_finished": 5},
        {"checkpoint": CheckpointSettings(storage="9Gi")},
    ],
)
def test_changes_without_new_pods_keep_the_digest(of_job: dict[str, Any]) -> None:
    assert template_digest(workload(**of_job), single_node=False) == template_digest(
        workload(), single_node=False
    )


@pytest.mark.parametrize(
    "made",
    [
        workload(template(container(image="trainer:2", command=["python", "train.py"]))),
        workload(checkpoint=CheckpointSettings(claim_name="shared")),
        workload(checkpoint=CheckpointSettings(path="/data")),
        workload(checkpoint=CheckpointSettings(interval_seconds=5.0)),
        workload(step_timeout_seconds=60),
        replace(workload(), settings=PodSettings("http://elsewhere")),
    ],
)
def test_changes_that_need_new_pods_change_the_digest(made: Workload) -> None:
    assert template_digest(made, single_node=False) != template_digest(workload(), single_node=False)


def test_sharing_a_node_changes_the_digest() -> None:
    assert template_digest(workload(), single_node=True) != template_digest(workload(), single_node=False)


def test_the_digest_is_the_same_as_in_earlier_versions() -> None:
    """Jobs of an operator before an upgrade carry it; another value here would restart them all."""
    assert template_digest(workload(), single_node=False) == "9e9aa2eeed5f97d5796c8bdbfc5767c2"


def test_the_indexed_job_of_a_queued_job_has_the_labels_and_annotations_of_kueue() -> None:
    queueing = Queueing.read(
        {
            "labels": {QUEUE_NAME: "gpus", "kueue.x-k8s.io/priority-class": "low", "team": "vision"},
            "annotations": {ELASTIC_JOB: "true", "note": "mine"},
        }
    )
    manifest = indexed_job_manifest(
        replace(workload(), queueing=queueing), 2, suspend=True, single_node=False
    )
    meta = manifest["metadata"]
    assert meta["labels"].items() >= {QUEUE_NAME: "gpus", "kueue.x-k8s.io/priority-class": "low"}.items()
    assert (
        meta["annotations"].items() >= {ELASTIC_JOB: "true", names.ANNOTATION_QUEUE: "gpus,elastic"}.items()
    )
    assert not {"team", "note"} & (meta["labels"].keys() | meta["annotations"].keys())
    plain = indexed_job_manifest(workload(), 2, suspend=False, single_node=False)["metadata"]
    assert plain["annotations"].keys() == {names.ANNOTATION_TEMPLATE}


@pytest.mark.parametrize("suspend", [True, False, None])
def test_a_resize_leaves_suspension_as_it_is_unless_it_is_meant(suspend: bool | None) -> None:
    patch = resize_patch(2, suspend=suspend)
    assert patch["spec"].get("suspend") is suspend
    mark = {True: "true", False: None}
    annotations = patch.get("metadata", {}).get("annotations", {})
    assert annotations == ({} if suspend is None else {names.ANNOTATION_SUSPENDED: mark[suspend]})
