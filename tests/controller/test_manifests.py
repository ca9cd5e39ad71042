"""The manifests of a job's pods: their names, their marks, and the digest of their template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.apply.manifests import pod_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob, template_digest
from adascale_controller.operator.observe.pods import read_pod
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.settings import POD_GROUP, QUEUE_NAME, OperatorSettings, Queueing
from adascale_controller.schema import Opportunistic
from adascale_core import names
from support.observed_jobs import checkpoint_settings
from support.pod_templates import OWNER, SPEC, container, template, workload


def test_a_pod_is_named_by_job_replica_and_attempt_and_owned_by_the_adascalejob() -> None:
    made = pod_manifest(workload(), NewPod(3, 2, accelerator="h200"))
    meta = made["metadata"]
    assert (made["kind"], meta["name"], meta["namespace"]) == ("Pod", "digits-3-2", "team")
    assert meta["ownerReferences"] == [OWNER]
    read = read_pod({**made, "metadata": {**meta, "uid": "1"}})
    assert (read.rank, read.attempt, read.controller) == (3, 2, ("AdaScaleJob", "digits", "b7d1"))
    assert (read.template, read.accelerator) == (template_digest(workload(), single_node=False), "h200")
    assert (read.is_extra, read.queue, read.group_size) == (False, None, 0)
    (worker,) = made["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in worker["env"]}
    assert (environment[names.ENV_REPLICA], environment[names.ENV_ACCELERATOR]) == ("3", "h200")


def test_extra_pods_have_the_priority_and_the_queue_of_their_settings() -> None:
    settings = Opportunistic.model_validate({"priorityClassName": "spot", "queueName": "team-queue"})
    spec = {"containers": [container()], "priorityClassName": "high", "preemptionPolicy": "Never"}
    made = workload({"spec": spec}, opportunistic=settings)
    core, extra = (pod_manifest(made, NewPod(rank, 0, extra=rank > 0)) for rank in range(2))
    assert (core["spec"]["priorityClassName"], core["spec"]["preemptionPolicy"]) == ("high", "Never")
    assert (extra["spec"]["priorityClassName"], "preemptionPolicy" in extra["spec"]) == ("spot", False)
    assert QUEUE_NAME not in core["metadata"]["labels"]
    assert (
        extra["metadata"]["labels"].items() >= {QUEUE_NAME: "team-queue", names.LABEL_EXTRA: "true"}.items()
    )


def test_queued_pods_have_the_labels_of_kueue_and_those_of_the_smallest_count_are_a_group() -> None:
    queueing = Queueing.read(
        {
            "labels": {QUEUE_NAME: "gpus", "kueue.x-k8s.io/priority-class": "low", "team": "vision"},
            "annotations": {"note": "mine"},
        }
    )
    queued = replace(workload(), queueing=queueing)
    flavor = {"nodeSelector": {"gpu": "h100"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}
    first = pod_manifest(queued, NewPod(0, 0, group_size=2))
    later = pod_manifest(queued, NewPod(2, 0, scheduling=flavor))
    for made in (first, later):
        labels = made["metadata"]["labels"]
        assert labels.items() >= {QUEUE_NAME: "gpus", "kueue.x-k8s.io/priority-class": "low"}.items()
        assert not {"team", "note"} & (labels.keys() | made["metadata"]["annotations"].keys())
    assert first["metadata"]["labels"][POD_GROUP] == queued.group_name == "digits-b7d1"
    assert read_pod({**first, "metadata": {**first["metadata"], "uid": "1"}}).group_size == 2
    assert POD_GROUP not in later["metadata"]["labels"]
    assert later["spec"]["nodeSelector"] == flavor["nodeSelector"]
    assert flavor["tolerations"] == later["spec"]["tolerations"][:1]


# -- the digest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "of_job",
    [
        {"spec": replace(SPEC, max_batch_size=512)},
        {"spec": replace(SPEC, local_bsz_bounds=(4, 32))},
        {"spec": replace(SPEC, batch_size=8)},
        {"spec": replace(SPEC, max_replicas=8, efficiency_target=0.7, scale_invariant_steps=5)},
        {"suspend": True, "backoff_limit": 9, "active_deadline_seconds": 5, "ttl_seconds_after_finished": 5},
        {"checkpoint": checkpoint_settings(storage="9Gi")},
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
        workload(checkpoint=checkpoint_settings(claim_name="shared")),
        workload(checkpoint=checkpoint_settings(path="/data")),
        workload(checkpoint=checkpoint_settings(interval_seconds=5.0)),
        workload(step_timeout_seconds=60),
        replace(workload(), settings=OperatorSettings("http://elsewhere")),
    ],
)
def test_changes_that_need_new_pods_change_the_digest(made: AdaScaleJob) -> None:
    assert template_digest(made, single_node=False) != template_digest(workload(), single_node=False)


def test_sharing_a_node_changes_the_digest() -> None:
    assert template_digest(workload(), single_node=True) != template_digest(workload(), single_node=False)


def test_the_digest_is_the_same_as_in_earlier_versions() -> None:
    """Pods of an operator before an upgrade have it; another value here would replace them all."""
    assert template_digest(workload(), single_node=False) == "04bb35e44f7e488a07d40fc1326944b1"
