"""The actions for each observed state and decision: the rules of docs/operator.md."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from adascale_controller.job.placement_backoff import FailedPlacement
from adascale_controller.job.reasons import Reason
from adascale_controller.operator.observe.observed_job import (
    REGISTRATION_TIMEOUT,
    CheckpointClaim,
    ObservedJob,
)
from adascale_controller.operator.observe.pods import PodExit
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import next_deadline
from adascale_controller.operator.reconcile.status import is_urgent
from adascale_controller.operator.runtime.control_loop import is_waited_for
from adascale_controller.operator.types.actions import Actions, NewPod, Stop, StoppedPod
from adascale_controller.operator.types.kubernetes import ConditionType
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.views.jobs import JobView
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    condition,
    events,
    job,
    observed,
    own_claim,
    pending_pod,
    pod,
    replica,
    report,
    training_job,
    view,
    with_status,
    writes,
)

OF_A_JOB = ("Job", "digits", "uid-of-the-job")
RUNNING, RESCALING, SUSPENDED = ConditionType.RUNNING, ConditionType.RESCALING, ConditionType.SUSPENDED
WIDER = JobSpec(4, 128, (4, 16), 1, 8, 1000)


def test_a_pod_that_its_node_rejects_can_not_start_until_another_one_does() -> None:
    end = PodExit(None, "OutOfcpu", "Node didn't have enough resource: cpu")
    rejected = pod(1, phase="Failed", exit=end)
    grows = observed(job((2, 2)), view((2, 2), (1, 1)), [pod(0), rejected])
    rescaling = condition(actions_for(grows, 2), RESCALING)
    assert rescaling.reason == Reason.UNSCHEDULABLE
    assert "node node1 rejects the pod: OutOfcpu: Node didn't have enough resource: cpu" in rescaling.message
    assert grows.placement_problem(range(2)) is not None
    again = replace(grows, pods=[*grows.pods, pod(1, uid="next", created_at=NOW, attempt=1)])
    assert again.placement_problem(range(2)) is None


# -- starting, growing, shrinking ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed_job", "replicas", "expected"),
    [
        pytest.param(
            observed(job(), view(spec=None)),
            2,
            {"declare": SPEC, "allocate": Allocation(1, 2), "create": [0, 1]},
            id="start",
        ),
        pytest.param(observed(job(), view()), 0, {}, id="no capacity to start"),
        pytest.param(
            observed(job(), view(), claim=own_claim(exists=False)),
            1,
            {"allocate": Allocation(1, 1), "create": [0]},
            id="start with the operator's claim",
        ),
        pytest.param(
            observed(job(), view(latest=report(generation=7))),
            1,
            {"allocate": Allocation(8, 1), "create": [0]},
            id="start after somebody has posted a report of this name",
        ),
        pytest.param(training_job((3, 2)), 2, {}, id="stay"),
        pytest.param(training_job((3, 2)), 4, {"allocate": Allocation(4, 4), "create": [2, 3]}, id="grow"),
        pytest.param(
            observed(job((4, 4)), view((4, 4), (3, 2)), 4),
            4,
            {},
            id="grow: wait for the new replicas",
        ),
        pytest.param(
            observed(job((4, 4)), view((4, 4), (3, 2)), 4),
            2,
            {"allocate": Allocation(5, 2), "delete": ["digits-2", "digits-3"]},
            id="give up growing",
        ),
        pytest.param(
            training_job((3, 4)), 2, {"allocate": Allocation(4, 2)}, id="shrink: the metrics service first"
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (3, 4)), 4),
            2,
            {},
            id="shrink: all replicas still run",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (4, 2), running=[0, 1, 3]), 4),
            2,
            {},
            id="shrink: rank 3 saves",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (4, 2), running=[0, 1, 2]), 4),
            2,
            {"delete": ["digits-3"]},
            id="shrink: ranks that have left are removed",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (4, 2)), 4),
            2,
            {"delete": ["digits-2", "digits-3"]},
            id="shrink: all have left",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (3, 4), broken=True), 4),
            2,
            {},
            id="shrink: a broken generation keeps its state in the pods",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (3, 4), broken=True, replicas=()), 4),
            2,
            {"delete": ["digits-2", "digits-3"]},
            id="shrink: no replica has state",
        ),
        pytest.param(training_job((3, 2)), 0, {"allocate": Allocation(4, 0)}, id="give up all replicas"),
        pytest.param(
            observed(job((4, 0)), view((4, 0), (4, 0)), 2),
            0,
            {"delete": ["digits-0", "digits-1"]},
            id="give up all replicas: they have left",
        ),
        pytest.param(
            observed(job((4, 0)), view((4, 0), (4, 0)), ()),
            0,
            {},
            id="wait for capacity",
        ),
        pytest.param(
            observed(job((4, 0)), view((4, 0), (4, 0)), ()),
            1,
            {"allocate": Allocation(5, 1), "create": [0]},
            id="resume",
        ),
        pytest.param(
            observed(job((5, 1)), view((5, 1), (4, 0)), ()),
            1,
            {"create": [0]},
            id="killed before the pod was created",
        ),
        pytest.param(
            observed(job((1, 2)), view()),
            2,
            {"allocate": Allocation(1, 2), "create": [0, 1]},
            id="killed after the status was written",
        ),
    ],
)
def test_changes_of_size(observed_job: ObservedJob, replicas: int, expected: dict[str, object]) -> None:
    assert writes(actions_for(observed_job, replicas)) == expected


# -- the metrics service ------------------------------------------------------------------------------------


def test_a_generation_that_the_metrics_service_used_for_another_count_is_skipped() -> None:
    """The metrics service has restored 4 replicas; the operator recorded 2, which it could not request."""
    raced = observed(job((5, 2)), view((5, 4), (5, 4)), 4)
    assert actions_for(raced, 2).allocate == Allocation(6, 2)
    assert actions_for(raced, 4).status["allocation"] == {"generation": 5, "replicas": 4}


def test_pods_that_are_about_to_enter_a_generation_stay_until_it_has_ended() -> None:
    entering = observed(job((3, 4)), view((3, 4), (3, 4), running=[0, 1]), 4)
    assert writes(actions_for(entering, 2)) == {"allocate": Allocation(4, 2)}
    left = observed(job((4, 2)), view((4, 2), (4, 2), running=[]), 4)
    assert writes(actions_for(left, 2)) == {"delete": ["digits-2", "digits-3"]}


def test_a_newer_generation_of_the_metrics_service_is_adopted() -> None:
    lost_one = observed(job((3, 4)), view((4, 2), (3, 2), broken=True), [pod(0), pod(1)])
    actions = actions_for(lost_one, 2)
    assert actions.status["allocation"] == {"generation": 4, "replicas": 2}
    assert writes(actions) == {}


@pytest.mark.parametrize("known", [view(spec=None), view((2, 1), (2, 1))], ids=["all", "the newest"])
def test_an_allocation_that_the_metrics_service_has_lost_is_requested_again(known: JobView) -> None:
    lost = replace(training_job((3, 2)), service=known)
    actions = actions_for(lost, 2)
    assert actions.allocate == Allocation(3, 2)
    assert actions.status["allocation"] == {"generation": 3, "replicas": 2}
    assert (actions.create_pods, actions.stop_pods) == ((), ())


@pytest.mark.parametrize(
    ("known", "pods", "expected"),
    [
        pytest.param(view(), {}, None, id="no registration"),
        pytest.param(view(running=[0, 1]), {}, None, id="rank 2 is missing"),
        pytest.param(view((4, 1), (3, 1)), {}, None, id="a generation was adopted without them"),
        pytest.param(view(running=[0, 2]), {}, None, id="rank 2 has state"),
        pytest.param(view(), {2: {"has_started": False}}, ["digits-2"], id="rank 2 has never started"),
        pytest.param(view(), {2: {"created_at": NOW}}, ["digits-2"], id="rank 2 is newer than the loss"),
        pytest.param(view(), {2: {"deletion_deadline": NOW}}, None, id="rank 2 is being deleted"),
        pytest.param(
            view(replicas=tuple(replica(rank, ReplicaState.WAITING, 0) for rank in range(3))),
            {},
            ["digits-1", "digits-2"],
            id="nobody has state",
        ),
    ],
)
def test_pods_of_which_a_metrics_service_without_data_knows_nothing_stay(
    known: JobView, pods: dict[int, dict[str, Any]], expected: list[str] | None
) -> None:
    present = tuple(pod(rank, **pods.get(rank, {})) for rank in range(3))
    lost = observed(job((3, 3)), replace(known, created_at=NOW - 10), present)
    assert writes(actions_for(lost, 1)).get("delete") == expected


def test_pods_that_do_not_register_with_a_metrics_service_without_data_are_removed_in_the_end() -> None:
    lost = observed(job((3, 3)), view(created_at=NOW - 10), 3)
    due = NOW - 10 + REGISTRATION_TIMEOUT
    assert next_deadline(lost, assess(lost)) == due
    overdue = replace(lost, now=due)
    assert writes(actions_for(overdue, 1))["delete"] == ["digits-1", "digits-2"]
    assert next_deadline(overdue, assess(overdue)) == inf


def test_new_bounds_start_one_new_generation() -> None:
    edited = training_job((3, 2), spec=WIDER)
    actions = actions_for(edited, 2)
    assert writes(actions) == {"declare": WIDER, "allocate": Allocation(4, 2)}
    assert "SpecChanged" in events(actions)
    killed = with_status(edited, actions)
    assert writes(actions_for(killed, 2)) == {"declare": WIDER, "allocate": Allocation(4, 2)}
    assert actions_for(killed, 2).status["allocation"]["generation"] == 4, "it does not rise with each try"


def test_nothing_changes_while_the_metrics_service_does_not_answer() -> None:
    before = actions_for(training_job((3, 2)), 2).status
    silent = observed(job((3, 2), status=before, suspend=True), None, 2)
    actions = actions_for(silent)
    assert writes(actions) == {}
    assert condition(actions, RUNNING).reason == Reason.METRICS_SERVICE_UNAVAILABLE
    assert (actions.status["replicas"], actions.status["state"]) == (2, "Running")


# -- suspending, replacing all pods --------------------------------------------------------------------------


def test_a_step_that_does_not_end_is_shown_with_the_replica_that_is_behind() -> None:
    training = training_job()
    assert training.service is not None
    stalls = ("waits for the others", "is at train.py, line 41, in load")
    replicas = tuple(replace(replica(rank), stall=stall) for rank, stall in enumerate(stalls))
    actions = actions_for(replace(training, service=replace(training.service, replicas=replicas)), 2)
    running = condition(actions, RUNNING)
    assert (running.status, running.reason) == (True, Reason.STALLED)
    assert running.message == (
        "Training on 2 replicas, but no step ends: replica 1 is at train.py, line 41, in load; "
        "replica 0 waits for the others"
    )
    assert Reason.STALLED in events(actions)
    assert condition(actions_for(training, 2), RUNNING).reason == Reason.TRAINING


@pytest.mark.parametrize(
    ("spec", "reason"), [({"suspend": True}, Reason.SUSPENDED), ({"replica_limit": 0}, Reason.SCALED_TO_ZERO)]
)
def test_a_job_is_suspended_once_its_state_is_saved(spec: dict[str, object], reason: Reason) -> None:
    observed_job = training_job((3, 2), **spec)
    actions = actions_for(observed_job)
    assert writes(actions) == {"allocate": Allocation(4, 0)}
    assert not condition(actions, SUSPENDED).status
    saving = replace(with_status(observed_job, actions), service=view((4, 0), (4, 0), running=[1]))
    assert writes(actions_for(saving)) == {}
    saved = replace(saving, service=view((4, 0), (4, 0)))
    actions = actions_for(saved)
    assert writes(actions) == {"delete": ["digits-0", "digits-1"]}
    assert (condition(actions, SUSPENDED).status, condition(actions, SUSPENDED).reason) == (True, reason)
    assert actions.status["state"] == "Suspended"
    still = replace(with_status(saved, actions), pods=())
    assert writes(actions_for(still)) == {}
    assert events(actions_for(still)) == []


def test_a_changed_template_of_a_job_that_can_not_spare_a_pod_replaces_all_after_the_state_is_saved() -> None:
    spec = replace(SPEC, min_replicas=2, processes_per_replica=2)
    observed_job = replace(training_job((3, 2), spec=spec), digest="changed")
    actions = actions_for(observed_job)
    assert writes(actions) == {"allocate": Allocation(4, 0)}
    saved = replace(with_status(observed_job, actions), service=view((4, 0), (4, 0)))
    assert writes(actions_for(saved)) == {"delete": ["digits-0", "digits-1"]}
    going = replace(saved, pods=[replace(each, deletion_deadline=NOW + 30) for each in saved.pods])
    assert "create" not in writes(actions_for(going, 2)), "the old pods still run"
    gone = writes(actions_for(replace(going, pods=()), 2))
    assert (gone["allocate"], gone["create"]) == (Allocation(5, 2), [0, 1])


@pytest.mark.parametrize(
    ("observed_job", "reason"),
    [
        (observed(job(), view(), others=[pod(-1, controller=OF_A_JOB)]), Reason.NAME_CONFLICT),
        (observed(job(), view(), others=[pod(0)]), Reason.CLEANING_UP),
        (observed(job(), None), Reason.METRICS_SERVICE_UNAVAILABLE),
        (
            observed(job(), view(), claim=CheckpointClaim("mine", False, False, False)),
            Reason.VOLUME_NOT_FOUND,
        ),
    ],
)
def test_a_job_that_can_not_start_shows_the_reason(observed_job: ObservedJob, reason: Reason) -> None:
    actions = actions_for(observed_job, 1)
    assert writes(actions) == {}
    assert (condition(actions, RUNNING).status, condition(actions, RUNNING).reason) == (False, reason)
    assert actions.status["state"] == "Pending"
    assert "allocation" not in actions.status


# -- conditions and status------------------------------------------------------------------------------------


def test_an_unschedulable_pod_is_in_the_rescaling_condition_while_training_continues() -> None:
    pods = [pod(0), pod(1), pending_pod(2), pending_pod(3)]
    growing = observed(job((4, 4)), view((4, 4), (3, 2)), pods)
    actions = actions_for(growing, 4)
    told_of = condition(actions, RESCALING)
    assert (told_of.status, told_of.reason) == (True, Reason.UNSCHEDULABLE)
    assert told_of.message == "2 -> 4: message of Unschedulable; training continues on 2 replicas"
    assert actions.status["state"] == "Rescaling"
    assert Reason.UNSCHEDULABLE in events(actions)
    assert events(actions_for(with_status(growing, actions), 4)) == []


def test_a_failed_placement_is_in_the_rescaling_condition() -> None:
    refused = FailedPlacement(4, 2, Reason.QUOTA_EXCEEDED, "no more", NOW + 60, 9, 60.0)
    found = condition(actions_for(training_job((5, 2)), 2, failed_placement=refused), RESCALING)
    assert (found.status, found.reason) == (False, Reason.QUOTA_EXCEEDED)


def test_the_status_is_urgent_only_if_more_than_reported_fields_has_changed() -> None:
    observed_job = training_job((3, 2))
    actions = actions_for(observed_job, 2)
    after = with_status(observed_job, actions)
    assert is_urgent(observed_job.resource.status, actions.status)
    later = replace(after, now=NOW + 500)
    assert not is_urgent(after.resource.status, actions_for(later, 2).status)
    assert events(actions_for(later, 2)) == []
    grown = replace(later, service=replace(view((3, 2), (3, 2)), latest=report(3, 2, 600.0)))
    assert not is_urgent(after.resource.status, actions_for(grown, 2).status), "numbers wait for their time"
    assert actions_for(grown, 2).status != after.resource.status
    assert is_urgent(after.resource.status, actions_for(later, 4).status)


def test_conditions_of_others_do_not_change_the_status() -> None:
    observed_job = training_job((3, 2))
    after = with_status(observed_job, actions_for(observed_job, 2))
    foreign = {"type": "example.com/Admitted", "status": "True", "reason": "Yes", "lastTransitionTime": "t"}
    conditions = [foreign, *reversed(after.resource.status["conditions"])]
    status = {**after.resource.status, "conditions": conditions}
    other = replace(after, resource=replace(after.resource, status=status))
    assert not is_urgent(status, actions_for(other, 2).status)


def test_a_rescale_counts_once() -> None:
    observed_job = training_job((3, 2))
    first = actions_for(observed_job, 2)
    assert (first.status["rescales"], events(first)) == (0, ["Running"])
    grown = replace(
        with_status(observed_job, first), service=view((4, 4), (4, 4)), pods=tuple(map(pod, range(4)))
    )
    second = actions_for(grown, 4)
    assert (second.status["rescales"], second.status["attempts"]["trained"]) == (1, 4)
    assert "Rescaled" in events(second)
    assert actions_for(with_status(grown, second), 4).status["rescales"] == 1


def test_waiting_replicas_do_not_keep_their_pods() -> None:
    waiting = tuple(replica(rank, ReplicaState.WAITING, 0) for rank in range(4))
    starting = observed(job((1, 4)), view((1, 4), replicas=waiting), 4)
    assert writes(actions_for(starting, 2)) == {
        "allocate": Allocation(2, 2),
        "delete": ["digits-2", "digits-3"],
    }


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        pytest.param({"create_pods": (NewPod(0, 0),)}, True, id="a new job"),
        pytest.param({"stop_pods": (StoppedPod("digits-0", "uid", Stop.FORCE),)}, True, id="a lost pod"),
        pytest.param({"status": {"observedGeneration": 2}}, True, id="an edit"),
        pytest.param({"delete_job": True}, True, id="the end of a job"),
        pytest.param({"allocate": Allocation(2, 4)}, False, id="another replica count"),
    ],
)
def test_what_someone_waits_for_comes_before_changes_of_replica_counts(
    actions: dict[str, Any], expected: bool
) -> None:
    observed_job = observed(job((1, 1), status={"observedGeneration": 1}), view(), 1)
    assert (
        is_waited_for(observed_job, Actions(**{"status": {"observedGeneration": 1}, **actions})) is expected
    )


# -- objects of earlier jobs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("observed_job", "named"),
    [
        (observed(job(), view(), others=[pod(-1, controller=OF_A_JOB)]), "kubectl delete job digits"),
        (
            observed(job(), view(), others=[pod(0), pod(1)]),
            "2 pods of an earlier AdaScaleJob digits to end (digits-0, ...); if that was deleted with "
            "--cascade=orphan, delete the pods: kubectl delete pods --selector adascale.dev/job=digits",
        ),
    ],
)
def test_a_job_names_what_an_earlier_job_of_its_name_has_left(observed_job: ObservedJob, named: str) -> None:
    assert named in condition(actions_for(observed_job), RUNNING).message
