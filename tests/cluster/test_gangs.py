"""Jobs whose smallest counts Kubernetes places as gangs, where the API server serves PodGroups."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException

from adascale_controller.operator.types.settings import POD_GROUP_VERSION
from adascale_core import names
from cluster.devices import Devices
from cluster.system import JobUnderTest, System, Workspace, job_manifest, wait_until

pytestmark = pytest.mark.timeout(600)

GROUP, VERSION = POD_GROUP_VERSION.split("/")


@pytest.fixture(autouse=True)
def pod_groups(system: System) -> None:
    """PodGroups are served."""
    try:
        served: Any = client.CustomObjectsApi(system.api).get_api_resources(GROUP, VERSION)
    except ApiException as error:
        if error.status != 404:
            raise
        pytest.skip(f"needs an API server that serves {POD_GROUP_VERSION}")
    assert "podgroups" in {each.name for each in served.resources}


def gangs(job: JobUnderTest) -> list[str | None]:
    """Return the PodGroups of the pods of a job that stay, by rank."""
    found = json.loads(job.kubectl("get", "pods", f"--selector={names.LABEL_JOB}={job.name}", "-o", "json"))
    live = [raw for raw in found["items"] if raw["status"]["phase"] in ("Pending", "Running")]
    live = [raw for raw in live if "deletionTimestamp" not in raw["metadata"]]
    live.sort(key=lambda raw: int(raw["metadata"]["labels"][names.LABEL_REPLICA]))
    return [(raw["spec"].get("schedulingGroup") or {}).get("podGroupName") for raw in live]


def by_rank(job: JobUnderTest) -> list[Any]:
    """Return the pods of a job, by rank."""
    return [pod for _, pod in sorted(job.pods().items())]


def test_two_jobs_of_two_replicas_never_hold_one_of_three_devices_each(
    workspace: Workspace, devices: Devices
) -> None:
    """They request nodes, so both have their pods although only one of them fits."""
    near, _ = devices.nodes
    spec = {"minReplicas": 2, "maxReplicas": 2, "requestNodes": True, "scaleInvariantSteps": 100000}
    with devices.taken(workspace, near):
        jobs = [
            workspace.submit(job_manifest(name, container=devices.container(), **spec))
            for name in ("first", "second")
        ]
        wait_until(lambda: any(job.status().get("replicas") == 2 for job in jobs), "one that trains")
        (waits,) = (job for job in jobs if job.status().get("replicas") != 2)
        (trains,) = (job for job in jobs if job is not waits)
        wait_until(lambda: len(waits.pods()) == 2, "the pods of the other one")
        for job in jobs:
            gang, *others = gangs(job)
            assert (others, gang is not None) == ([gang], True)
            group = json.loads(job.kubectl("get", "podgroup", str(gang), "-o", "json"))
            assert group["spec"]["schedulingPolicy"] == {"gang": {"minCount": 2}}

        def is_refused() -> bool:
            conditions = [each for pod in by_rank(waits) for each in pod.status.conditions or ()]
            return [each.reason for each in conditions if each.type == "PodScheduled"] == [
                "Unschedulable"
            ] * 2

        wait_until(is_refused, "the scheduler to refuse both")
        assert {pod.spec.node_name for pod in by_rank(waits)} == {None}
        trains.edit(suspend=True)
        waits.wait_until_training(2)
        # Another pod of a gang that was placed needs no other.
        waits.kubectl("delete", "pod", waits.pods()[1].metadata.name, "--wait=false")
        wait_until(lambda: gangs(waits)[1:] == [None], "another pod")
        waits.wait_until_training(2)
        assert gangs(waits)[0] is not None
        # A gang that has ended starts again, with the PodGroup that it had.
        waits.edit(suspend=True)
        trains.edit(suspend=False)
        trains.wait_until_training(2)
        assert len(set(gangs(trains))) == 1
