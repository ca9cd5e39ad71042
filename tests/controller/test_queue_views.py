"""What is read of Kueue's Workloads and ClusterQueues."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from decimal import Decimal
from typing import Any

import pytest

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.observe.observed_job import QueueView
from adascale_controller.operator.runtime import lookup_fetcher
from adascale_controller.operator.runtime.lookup_fetcher import QueueReader, confirmed
from adascale_controller.operator.schedule.quota import of_job, read_queues, unused_quota
from support.fake_api_server import FakeApiServer
from support.fake_cluster import FakeCluster

GPU = "nvidia.com/gpu"
FLAVOR = ("h100", GPU)


def workload(
    name: str, *conditions: tuple[str, str, str], count: int | None = None, created: int = 1, per_pod: int = 2
) -> dict[str, Any]:
    """Return a Workload of a pod, with conditions (type, status, message) and an admission."""
    status: dict[str, Any] = {
        "conditions": [{"type": kind, "status": value, "message": text} for kind, value, text in conditions]
    }
    if count is not None:
        assigned = {
            "name": "main",
            "count": count,
            "flavors": {"cpu": "cpus", GPU: "h100"},
            "resourceUsage": {"cpu": f"{500 * count}m", GPU: str(per_pod * count)},
        }
        status["admission"] = {"clusterQueue": "team", "podSetAssignments": [assigned]}
    meta = {
        "name": name,
        "creationTimestamp": f"2027-01-15T08:00:0{created}Z",
        "ownerReferences": [{"kind": "Pod", "uid": name}],
    }
    return {"metadata": meta, "status": status}


def cluster_queue(
    name: str,
    nominal: object,
    reserved: object = 0,
    *,
    cohort: str | None = None,
    key: str = "cohortName",
    **limits: object,
) -> dict[str, Any]:
    """Return a ClusterQueue with a quota of GPUs, and with 8 CPUs of another flavor."""
    gpus = {"name": GPU, "nominalQuota": nominal, **limits}
    cpus = {"name": "cpu", "nominalQuota": "8"}
    groups = [
        {"flavors": [{"name": flavor, "resources": [quota]}]}
        for flavor, quota in (("h100", gpus), ("cpus", cpus))
    ]
    used = [{"name": "h100", "resources": [{"name": GPU, "total": str(reserved)}]}]
    return {
        "metadata": {"name": name},
        "spec": {"resourceGroups": groups, **({key: cohort} if cohort else {})},
        "status": {"flavorsReservation": used},
    }


RESERVED = ("QuotaReserved", "True", "Quota reserved in ClusterQueue team")
PENDING = ("QuotaReserved", "False", "insufficient unused quota for nvidia.com/gpu")
QUEUES = [cluster_queue("team", "10", 4)]


@pytest.mark.parametrize(
    ("workloads", "queues", "expected"),
    [
        pytest.param([], QUEUES, QueueView(), id="no Workload"),
        pytest.param([workload("a", PENDING)], QUEUES, QueueView(message=PENDING[2]), id="waits"),
        pytest.param([workload("a", RESERVED, count=1)], QUEUES, QueueView(1, 3, "team"), id="admitted"),
        pytest.param(
            [workload("a", RESERVED, count=1)], None, QueueView(1, None, "team"), id="without rights"
        ),
        pytest.param(
            [workload("a", RESERVED, count=1), workload("b", PENDING)],
            QUEUES,
            QueueView(1, 3, "team", PENDING[2]),
            id="one of two waits",
        ),
        pytest.param(
            [workload("a", RESERVED, count=1), workload("b", RESERVED, count=1)],
            QUEUES,
            QueueView(2, 3, "team"),
            id="both admitted",
        ),
        pytest.param(
            [workload("a", PENDING, ("Evicted", "True", "Preempted by another workload"))],
            QUEUES,
            QueueView(message="Preempted by another workload"),
            id="evicted",
        ),
    ],
)
def test_what_kueue_says_about_the_pods_of_a_job(
    workloads: list[dict[str, Any]], queues: list[dict[str, Any]] | None, expected: QueueView
) -> None:
    assert of_job(read_queues(workloads, queues).values()) == expected


def test_the_workload_of_a_group_is_that_of_each_of_its_pods() -> None:
    group = workload("a", RESERVED, count=2)
    group["metadata"]["ownerReferences"] = [{"kind": "Pod", "uid": each} for each in "abc"]
    found = read_queues([group], QUEUES)
    assert found == dict.fromkeys("abc", QueueView(1, 3, "team"))
    assert of_job(found[each] for each in "ab") == QueueView(2, 3, "team")


def test_the_scarcest_resource_decides() -> None:
    many = [workload("a", RESERVED, count=2, per_pod=1)]
    # 500 millicores each: 16 more by the CPUs, 96 by the GPUs.
    assert read_queues(many, [cluster_queue("team", "100", 4)])["a"].room == 16


@pytest.mark.parametrize(
    ("queues", "unused"),
    [
        pytest.param([cluster_queue("a", "4", 1)], 3, id="its own quota"),
        pytest.param([cluster_queue("a", "4", 6)], 0, id="never negative"),
        pytest.param([cluster_queue("a", "4"), cluster_queue("b", "9")], 4, id="no cohort"),
        pytest.param(
            [cluster_queue("a", "4", 1, cohort="c"), cluster_queue("b", "9", 2, cohort="c")], 10, id="borrows"
        ),
        pytest.param(
            [cluster_queue("a", "4", 1, cohort="c", key="cohort"), cluster_queue("b", "9", cohort="c")],
            12,
            id="v1beta1",
        ),
        pytest.param(
            [cluster_queue("a", "4", 1, cohort="c"), cluster_queue("b", "2", 4, cohort="c")], 1, id="lends"
        ),
        pytest.param(
            [cluster_queue("a", "4", 1, cohort="c", borrowingLimit="2"), cluster_queue("b", "9", cohort="c")],
            5,
            id="borrowing limit",
        ),
        pytest.param(
            [
                cluster_queue("a", "4", 1, cohort="c"),
                cluster_queue("b", "9", cohort="c", lendingLimit="3"),
            ],
            6,
            id="lending limit",
        ),
    ],
)
def test_unused_quota(queues: list[dict[str, Any]], unused: int) -> None:
    assert unused_quota(queues)["a"][FLAVOR] == Decimal(unused)


@pytest.mark.parametrize(
    "error", [ApiServerError("no answer"), ValueError("an object that no schema rules out")]
)
def test_a_read_that_fails_is_not_repeated_at_once(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(FakeApiServer, "list_kueue", fail)
    reader = QueueReader(FakeApiServer())
    with suppress(ValueError):
        asyncio.run(reader.read({"team"}))
    assert not reader.is_due()


def test_the_queues_of_jobs_that_have_ended_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []

    async def read(_: FakeApiServer, plural: str, namespace: str | None = None) -> list[Any]:
        reads.append(plural)
        return []

    monkeypatch.setattr(FakeApiServer, "list_kueue", read)
    monkeypatch.setattr(lookup_fetcher, "QUEUE_INTERVAL", 0.0)
    cluster = FakeCluster()
    cluster.submit(activeDeadlineSeconds=60)
    cluster.enter_queue()
    cluster.run_cycles(5)
    assert reads
    cluster.now += 60
    cluster.full = True
    cluster.run_cycles(5)
    assert cluster.status["state"] == "Failed"
    reads.clear()
    cluster.run_cycles(5)
    assert reads == []


@pytest.mark.parametrize(
    ("view", "last", "room"),
    [
        pytest.param(QueueView(1, 4), QueueView(), 0, id="read for the first time"),
        pytest.param(QueueView(1, 3), QueueView(1, 3), 3, id="read twice"),
        pytest.param(QueueView(3, 3), QueueView(1, 3), 1, id="reserved and not yet counted"),
        pytest.param(QueueView(3, 1), QueueView(1, 3), 1, id="reserved and counted"),
        pytest.param(QueueView(1, 0), QueueView(3, 0), 0, id="given back and not yet counted"),
        pytest.param(QueueView(1), QueueView(1, 3), None, id="not known"),
    ],
)
def test_more_room_counts_once_it_is_read_twice(view: QueueView, last: QueueView, room: int | None) -> None:
    assert confirmed(view, last).room == room
