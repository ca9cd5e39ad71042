"""Replicas beyond the smallest count run as pods of a lower priority."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.local.local_command import resolve_command
from adascale_controller.operator.observe.observed_job import Admission, ObservedJob
from adascale_controller.operator.runtime.lookup_fetcher import ADMISSION_RETRY_INTERVAL
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.kubernetes import Resource
from adascale_controller.validation import validate_document
from adascale_core import names
from adascale_core.messages.allocation import Allocation
from adascale_core.views.decision import LimitKind, LimitView
from controller.conftest import SETTINGS, SPOT, ClusterWithPriorities
from support.definitions import define
from support.observed_jobs import (
    NOW,
    ON_GPU,
    SPEC,
    actions_for,
    decided,
    job,
    node,
    observed,
    pod,
    view,
    writes,
)

Object = dict[str, Any]


# -- pods --------------------------------------------------------------------------------------------------


def test_a_job_grows_by_extra_pods_and_gives_them_back(cluster: ClusterWithPriorities) -> None:
    cluster.submit(minReplicas=2, opportunistic=SPOT)
    cluster.run_cycles(15)
    assert cluster.sizes == (2, 2)
    assert (cluster.status["replicas"], cluster.status["extraReplicas"]) == (4, 2)
    core = {raw["metadata"]["uid"] for raw in cluster.live_pods if raw["spec"]["priority"] == 100}
    cluster.decide(3)
    assert cluster.sizes == (2, 1)
    cluster.decide(2)
    assert cluster.sizes == (2, 0)
    assert (cluster.status["replicas"], cluster.status["extraReplicas"]) == (2, 0)
    assert {raw["metadata"]["uid"] for raw in cluster.live_pods} == core
    cluster.decide(4)
    assert cluster.sizes == (2, 2)
    assert (cluster.status["disruptions"], cluster.status["failures"]) == (0, 0)


# -- losses ------------------------------------------------------------------------------------------------


def test_extra_pods_that_are_taken_leave_the_core_as_it_is(cluster: ClusterWithPriorities) -> None:
    cluster.submit(opportunistic=SPOT)
    cluster.run_cycles(15)
    cluster.node_slots = 1
    for name in cluster.extra_pods():
        cluster.terminate_pod(name)
    cluster.run_cycles(5)
    assert cluster.sizes[0] == 1
    assert cluster.status["replicas"] == 1
    reasons = [event.reason for event in cluster.events]
    assert "ExtraPodsTaken" in reasons
    assert "ReplicaLost" not in reasons
    cluster.decide(1)
    assert cluster.sizes == (1, 0)
    cluster.node_slots = 4
    cluster.decide(4)
    assert (cluster.status["replicas"], cluster.status["failures"]) == (4, 0)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lost_core_pod_is_replaced_while_extra_pods_train(
    cluster: ClusterWithPriorities, restarts: bool
) -> None:
    cluster.submit(opportunistic=SPOT)
    cluster.run_cycles(15)
    extra = set(cluster.extra_pods())
    cluster.evict_pod(next(name for name in cluster.agents if name not in extra))
    if restarts:
        cluster.start_operator()
    cluster.run_cycles(15)
    assert cluster.status["replicas"] == 4
    assert set(cluster.extra_pods()) == extra
    assert [event.reason for event in cluster.events].count("ReplicaLost") == 1


def test_an_edit_of_the_smallest_count_replaces_the_pods_with_another_priority(
    cluster: ClusterWithPriorities,
) -> None:
    cluster.submit(opportunistic=SPOT)
    cluster.run_cycles(15)
    assert cluster.sizes == (1, 3)
    before = set(cluster.uids)
    cluster.edit(minReplicas=2)
    cluster.run_cycles(30)
    assert cluster.sizes == (2, 2)
    assert len(before & set(cluster.uids)) == 3
    assert (cluster.status["replicas"], cluster.status["failures"]) == (4, 0)


def test_no_pod_is_removed_before_its_trainer_has_left_when_extra_pods_are_introduced() -> None:
    made, pods = job((2, 0), opportunistic=SETTINGS), [pod(rank, template="before") for rank in range(3)]
    stopping = observed(made, view((2, 0), (1, 3)), pods)
    assert writes(actions_for(stopping)) == {}
    left = writes(actions_for(replace(stopping, service=view((2, 0)))))
    assert left == {"delete": ["digits-0", "digits-1", "digits-2"]}


def test_a_failed_job_keeps_its_ended_pods_and_a_suspended_job_has_none(
    cluster: ClusterWithPriorities,
) -> None:
    cluster.submit(opportunistic=SPOT, backoffLimit=0)
    cluster.run_cycles(15)
    cluster.edit(suspend=True)
    cluster.run_cycles(15)
    assert (cluster.status["state"], cluster.sizes) == ("Suspended", (0, 0))
    cluster.edit(suspend=False)
    cluster.run_cycles(15)
    assert cluster.status["replicas"] == 4
    cluster.fail_program(cluster.extra_pods()[0])
    cluster.run_cycles(15)
    assert (cluster.status["state"], cluster.live_pods) == ("Failed", [])
    assert len(cluster.objects[Resource.PODS]) == 4, "with their logs"


def test_a_count_is_recorded_with_the_first_extra_pods() -> None:
    actions = actions_for(observed(job(opportunistic=SETTINGS), view()), 3)
    assert actions.allocate == Allocation(1, 3)
    assert [(each.rank, each.extra) for each in actions.create_pods] == [(0, False), (1, True), (2, True)]


# -- PriorityClasses ---------------------------------------------------------------------------------------


def test_without_its_priority_class_a_job_trains_on_its_core_and_says_why(
    cluster: ClusterWithPriorities,
) -> None:
    del cluster.priorities["spot"]
    cluster.submit(opportunistic=SPOT)
    cluster.run_cycles(15)
    assert cluster.sizes == (1, 0)
    rescaling = cluster.condition("Rescaling")
    assert (rescaling["status"], rescaling["reason"]) == ("False", "ExtraPodsRejected")
    assert rescaling["message"] == (
        "No extra pods are made: the API server rejects extra pods: no PriorityClass with name spot was "
        "found. Create PriorityClass spot, or change spec.opportunistic.priorityClassName"
    )
    assert [event.reason for event in cluster.events].count("ExtraPodsRejected") == 1
    cluster.priorities["spot"] = -10
    cluster.now += ADMISSION_RETRY_INTERVAL
    cluster.run_cycles(15)
    assert cluster.sizes == (1, 3)


def test_a_priority_that_is_not_lower_than_that_of_the_core_is_an_error(
    cluster: ClusterWithPriorities,
) -> None:
    cluster.priorities["spot"] = 100
    cluster.submit(opportunistic=SPOT)
    cluster.run_cycles(15)
    assert cluster.sizes == (1, 0)
    assert cluster.condition("Rescaling")["message"] == (
        "No extra pods are made: PriorityClass spot of extra pods has the priority 100, which is not lower "
        "than that of the other pods, 100: name a lower one in spec.opportunistic.priorityClassName, or a "
        "higher one in spec.template.spec.priorityClassName"
    )


def test_extra_pods_that_run_stay_when_their_priority_class_is_deleted(
    cluster: ClusterWithPriorities,
) -> None:
    cluster.submit(opportunistic=SPOT)
    cluster.run_cycles(15)
    running = set(cluster.extra_pods())
    del cluster.priorities["spot"]
    cluster.start_operator()
    cluster.run_cycles(15)
    assert cluster.condition("Rescaling")["reason"] == "ExtraPodsRejected"
    assert set(cluster.extra_pods()) == running
    assert cluster.status["replicas"] == 4


# -- the decision ------------------------------------------------------------------------------------------


def test_a_job_waits_for_the_extra_pods_of_a_job_whose_core_has_a_higher_priority() -> None:
    def admitted(priority: int, extra: int | None = None) -> Admission:
        return Admission({**ON_GPU["spec"], "priority": priority}, extra_priority=extra)

    def opportunistic(*ranks: int) -> ObservedJob:
        return observed(
            job((1, 2), opportunistic=SETTINGS, template=ON_GPU),
            view((1, 2), (1, 2)),
            [pod(rank, is_extra=rank > 0) for rank in ranks],
            admission=admitted(1000, -10),
        )

    later = job(name="later", spec=replace(SPEC, max_replicas=1), template=ON_GPU)
    later = replace(later, created_at=int(NOW) + 1)
    scheduler = Scheduler()
    jobs = opportunistic(0, 1), observed(later, admission=admitted(500))
    decided(scheduler, *jobs, nodes=[node("node1", 2)])
    first, second = (scheduler.decision(f"team.{name}") for name in ("digits", "later"))
    assert first is not None
    assert second is not None
    assert first.replicas == 1, "the smallest count of a job comes before the extra pods of another"
    assert second.reason.startswith("Waiting for replicas of team.digits, which has a lower priority")
    explained = next(each for each in scheduler.explain() if each.job == "team.digits")
    assert explained.limits[-1] == LimitView(
        LimitKind.PRIORITY,
        "beyond 1 replica it has extra pods, of PriorityClass spot, which pods of higher priority may take "
        "at any time",
    )
    scheduler.update(opportunistic(0))
    after = scheduler.decision("team.later")
    assert after is not None
    assert after.replicas == 1


# -- fields ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "opportunistic", "message"),
    [
        ("a", {"priorityClassName": "spot", "queueName": "team"}, None),
        ("a", None, None),
        ("a", {}, "spec.opportunistic.priorityClassName: is required"),
        (
            "a",
            {"priorityClassName": "Spot"},
            "spec.opportunistic.priorityClassName: must match ",
        ),
        (
            "a",
            {**SPOT, "queue": "team"},
            "spec.opportunistic.queue: unknown field; did you mean queueName?",
        ),
    ],
)
def test_fields_are_checked(name: str, opportunistic: Object | None, message: str | None) -> None:
    content = {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {
            "batchSize": 4,
            "maxReplicas": 2,
            "opportunistic": opportunistic,
            "template": {"spec": {"containers": [{"name": "worker", "image": "trainer:1"}]}},
        },
    }
    found = validate_document(content)
    errors = "; ".join(map(str, found)) if isinstance(found, list) else None
    if message is None:
        assert errors is None
    else:
        assert errors is not None
        assert errors.startswith(message)


def test_one_machine_says_that_it_has_no_extra_pods(tmp_path: Any) -> None:
    made = define("default.digits", SPEC, ("python", "-V"), opportunistic=SETTINGS)
    command = resolve_command(made, tmp_path, {}, threads=1)
    assert command.ignored == ("spec.opportunistic, since there are extra pods on a cluster only",)
