"""Jobs on simulated nodes (KWOK) in queues of a real Kueue: extra pods, and flavors as types."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

from adascale_core import names
from cluster import system
from cluster.simulated import PATIENCE, POOL, Place, place_at_work
from cluster.test_kueue import GROUP, QUEUE_NAME, VERSION, Queue, other_job

# CI does not build Kueue: see test_kueue.py.
pytestmark = [pytest.mark.cluster, pytest.mark.release, pytest.mark.timeout(600)]

wait_until = partial(system.wait_until, patience=PATIENCE)


@pytest.fixture
def place(
    api_client: client.ApiClient, kubeconfig: str, crd: dict[str, Any], tmp_path: Path
) -> Iterator[Place]:
    with place_at_work(api_client, kubeconfig, tmp_path) as made:
        yield made


def test_extra_pods_grow_within_the_quota_of_their_queue(place: Place) -> None:
    api, jobs, name = place.api, place.jobs, place.namespace
    place.pool.add(gpus=8)
    scheduling: Any = client.SchedulingV1Api(api)
    scheduling.create_priority_class({"metadata": {"name": name}, "value": -10, "preemptionPolicy": "Never"})
    queue = Queue(api, name)
    queue.create()
    try:
        jobs.submit("digits", opportunistic={"priorityClassName": name, "queueName": name})
        wait_until(
            lambda: jobs.condition("digits", "Rescaling")["reason"] == "Queued",
            "extra pods that wait for quota",
        )
        assert "waiting for Kueue to reserve quota" in jobs.condition("digits", "Rescaling")["message"]
        assert jobs.trains_on("digits", 1)
        core = set(jobs.pods("digits"))
        queue.set_quota(1)
        wait_until(lambda: jobs.trains_on("digits", 2), "an extra pod")
        queue.set_quota(3)
        wait_until(lambda: jobs.trains_on("digits", 4), "three extra pods")
        assert jobs.status("digits")["extraReplicas"] == 3
        wait_until(lambda: queue.reserved() == 3, "the quota of three pods")
        assert core < set(jobs.pods("digits"))
    finally:
        queue.delete()
        scheduling.delete_priority_class(name)


def test_the_flavor_that_kueue_chooses_is_the_type_of_accelerator(place: Place) -> None:
    jobs, name = place.jobs, place.namespace
    label = names.DEFAULT_ACCELERATOR_LABEL
    types = {"-small": "T4", "-large": "H100"}
    for accelerator in types.values():
        place.pool.add(8, **{label: accelerator})
    queue = Queue(place.api, name, {suffix: {label: each} for suffix, each in types.items()})
    queue.create()
    queue.set_quota(0, small=1, large=3)
    marks = {"labels": {QUEUE_NAME: name}}
    try:
        jobs.submit("digits", marks, minReplicas=2)
        wait_until(lambda: jobs.trains_on("digits", 2), "training on the flavor that has quota for it")
        assert jobs.status("digits")["accelerator"] == "H100"
        queue.set_quota(0, small=1, large=4)
        wait_until(lambda: jobs.trains_on("digits", 4), "growth on the same flavor")
        nodes = {pod.spec.node_name for pod in jobs.pods("digits").values()}
        assert nodes == {place.pool.nodes[1]}
        assert (jobs.status("digits")["accelerator"], jobs.status("digits")["disruptions"]) == ("H100", 0)
    finally:
        queue.delete()


def test_a_job_that_kueue_evicts_with_more_than_its_smallest_count_is_admitted_again(
    place: Place,
) -> None:
    api, jobs, name = place.api, place.jobs, place.namespace
    place.pool.add(8)
    queue = Queue(api, name)
    queue.create()
    queue.set_quota(2)
    objects: Any = client.CustomObjectsApi(api)
    batch: Any = client.BatchV1Api(api)
    priority = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "WorkloadPriorityClass", "value": 1000}
    objects.create_cluster_custom_object(
        GROUP, VERSION, "workloadpriorityclasses", {**priority, "metadata": {"name": name}}
    )
    try:
        jobs.submit("digits", {"labels": {QUEUE_NAME: name}}, maxReplicas=2)
        wait_until(lambda: jobs.trains_on("digits", 2), "training on 2 replicas")
        other = other_job(queue, name)
        other["spec"]["template"]["spec"] |= {
            "nodeSelector": {POOL: name},
            "tolerations": [{"operator": "Exists"}],
        }
        batch.create_namespaced_job(name, other)
        wait_until(lambda: jobs.condition("digits")["reason"] == "Queued", "the eviction")
        wait_until(lambda: "quota" in jobs.condition("digits")["message"], "Kueue's reason")
        batch.delete_namespaced_job("other", name, propagation_policy="Background")
        wait_until(lambda: jobs.trains_on("digits", 2), "training on 2 replicas again")
        assert jobs.status("digits")["failures"] == 0
    finally:
        queue.delete()
        objects.delete_cluster_custom_object(GROUP, VERSION, "workloadpriorityclasses", name)
