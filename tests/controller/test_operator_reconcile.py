"""What is done about a job, for what is seen of it and decided: the rules of docs/operator.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adascale_controller.operator.observe.observed_job import CheckpointClaim, ObservedJob
from adascale_controller.operator.reconcile.reconciler import TERMINATION_OVERDUE
from adascale_controller.operator.reconcile.status import has_changed
from adascale_controller.operator.types.actions import Actions, FailedPlacement
from adascale_controller.operator.types.conditions import ConditionType, Reason
from adascale_core.messages import Allocation, JobSpec, ReplicaState
from adascale_core.views import JobView
from support.observed_jobs import (
    NOW,
    SPEC,
    actions_for,
    condition,
    failed_pod,
    indexed_job,
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
)

RUNNING, RESCALING, SUSPENDED = ConditionType.RUNNING, ConditionType.RESCALING, ConditionType.SUSPENDED
WIDER = JobSpec(4, 128, (4, 16), 1, 8, 1000)


def acts(done: Actions) -> dict[str, object]:
    """What is done besides writing the status and telling of it."""
    found = {
        "forget": done.deregister, "declare": done.declare, "want": done.allocate, "claim": done.create_claim,
        "create": done.create_indexed_job, "resize": done.resize, "remove": done.delete_indexed_job,
        "pods": done.delete_pods, "delete_job": done.delete_job,
    }  # fmt: skip
    return {
        name: value
        for name, value in found.items()
        if value is not None and value is not False and value != ()
    }


def events(done: Actions) -> list[str]:
    return [one.reason for one in done.events]


# -- beginning, growing, shrinking -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sighting", "replicas", "expected"),
    [
        pytest.param(
            observed(job(), view(spec=None)),
            2,
            {"declare": SPEC, "want": Allocation(1, 2), "create": 2},
            id="begin",
        ),
        pytest.param(observed(job(), view()), 0, {}, id="no room to begin"),
        pytest.param(
            observed(job(), view(), claim=own_claim(exists=False)),
            1,
            {"want": Allocation(1, 1), "claim": True, "create": 1},
            id="begin with a claim of its own",
        ),
        pytest.param(training_job((3, 2)), 2, {}, id="stay"),
        pytest.param(training_job((3, 2)), 4, {"want": Allocation(4, 4), "resize": 4}, id="grow"),
        pytest.param(
            observed(job((4, 4)), view((4, 4), (3, 2)), indexed_job(4)),
            4,
            {},
            id="grow: wait for those that come",
        ),
        pytest.param(
            observed(job((4, 4)), view((4, 4), (3, 2)), indexed_job(4)),
            2,
            {"want": Allocation(5, 2), "resize": 2},
            id="give up growing",
        ),
        pytest.param(training_job((3, 4)), 2, {"want": Allocation(4, 2)}, id="shrink: the service first"),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (3, 4)), indexed_job(4)), 2, {}, id="shrink: all run as before"
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (4, 2), running=[0, 1, 3]), indexed_job(4)),
            2,
            {},
            id="shrink: one saves",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (4, 2), running=[0, 1, 2]), indexed_job(4)),
            2,
            {"resize": 3},
            id="shrink: who has left goes",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (4, 2)), indexed_job(4)),
            2,
            {"resize": 2},
            id="shrink: all have left",
        ),
        pytest.param(
            observed(job((4, 2)), view((4, 2), (3, 4), broken=True), indexed_job(4)),
            2,
            {"resize": 2},
            id="shrink: a broken generation saves nothing",
        ),
        pytest.param(training_job((3, 2)), 0, {"want": Allocation(4, 0)}, id="make room"),
        pytest.param(
            observed(job((4, 0)), view((4, 0), (4, 0)), indexed_job(2)),
            0,
            {"resize": 0},
            id="make room: it has left",
        ),
        pytest.param(
            observed(job((4, 0)), view((4, 0), (4, 0)), indexed_job(2, suspended=True)),
            0,
            {},
            id="wait for room",
        ),
        pytest.param(
            observed(job((4, 0)), view((4, 0), (4, 0)), indexed_job(2, suspended=True)),
            1,
            {"want": Allocation(5, 1), "resize": 1},
            id="go on",
        ),
        pytest.param(
            observed(job((5, 1)), view((5, 1), (4, 0)), indexed_job(2, suspended=True)),
            1,
            {"resize": 1},
            id="killed before the Job was woken",
        ),
        pytest.param(
            observed(job((1, 2)), view()), 2, {"want": Allocation(1, 2), "create": 2}, id="killed at once"
        ),
    ],
)
def test_changes_of_size(sighting: ObservedJob, replicas: int, expected: dict[str, object]) -> None:
    assert acts(actions_for(sighting, replicas)) == expected


# -- the service --------------------------------------------------------------------------------------------


def test_where_the_service_came_to_the_recorded_number_by_itself_another_one_is_taken() -> None:
    """The lost count of 4 is desired again; the operator has recorded a 2 that it could not publish."""
    raced = observed(job((5, 2)), view((5, 4), (5, 4)), indexed_job(4))
    assert actions_for(raced, 2).allocate == Allocation(6, 2)
    assert actions_for(raced, 4).status["allocation"] == {"generation": 5, "replicas": 4}


def test_pods_that_are_about_to_enter_a_generation_stay_until_it_is_over() -> None:
    entering = observed(job((3, 4)), view((3, 4), (3, 4), running=[0, 1]), indexed_job(4))
    assert actions_for(entering, 2).resize is None
    left = observed(job((4, 2)), view((4, 2), (4, 2), running=[]), indexed_job(4))
    assert actions_for(left, 2).resize == 2


def test_what_is_as_it_should_be_is_left_alone() -> None:
    sighting = training_job()
    done = actions_for(sighting, 2)
    assert (done.allocate, done.resize, done.create_indexed_job, done.declare, done.delete_indexed_job) == (
        None,
    ) * 4 + (False,)


def test_a_newer_generation_of_the_service_is_taken_up() -> None:
    lost_one = observed(job((3, 4)), view((4, 2), (3, 2), broken=True), indexed_job(4), pods=[pod(0), pod(1)])
    done = actions_for(lost_one, 2)
    assert done.status["allocation"] == {"generation": 4, "replicas": 2}
    assert acts(done) == {"resize": 2}


@pytest.mark.parametrize("known", [view(spec=None), view((2, 1), (2, 1))], ids=["all", "the newest"])
def test_what_the_service_has_lost_is_published_again(known: JobView) -> None:
    lost = replace(training_job((3, 2)), service=known)
    done = actions_for(lost, 2)
    assert done.allocate == Allocation(3, 2)
    assert done.status["allocation"] == {"generation": 3, "replicas": 2}
    assert done.resize is None


def test_new_bounds_are_taken_up_by_a_generation_of_their_own_once() -> None:
    edited = training_job((3, 2), spec=WIDER)
    done = actions_for(edited, 2)
    assert acts(done) == {"declare": WIDER, "want": Allocation(4, 2)}
    assert "SpecChanged" in events(done)
    killed = with_status(edited, done)
    assert acts(actions_for(killed, 2)) == {"declare": WIDER, "want": Allocation(4, 2)}
    assert actions_for(killed, 2).status["allocation"]["generation"] == 4, "it does not rise with each try"


def test_nothing_is_decided_while_the_service_does_not_answer() -> None:
    before = actions_for(training_job((3, 2)), 2).status
    silent = observed(job((3, 2), status=before, suspend=True), None, indexed_job(2))
    done = actions_for(silent)
    assert acts(done) == {}
    assert condition(done, RUNNING).reason == Reason.METRICS_SERVICE_UNAVAILABLE
    assert (done.status["replicas"], done.status["state"]) == (2, "Running")


# -- suspending, and pods made anew -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "reason"), [({"suspend": True}, Reason.SUSPENDED), ({"replicas": 0}, Reason.SCALED_TO_ZERO)]
)
def test_a_job_is_suspended_once_its_state_is_saved(asked: dict[str, object], reason: Reason) -> None:
    sighting = training_job((3, 2), **asked)
    done = actions_for(sighting)
    assert acts(done) == {"want": Allocation(4, 0)}
    assert not condition(done, SUSPENDED).status
    saving = replace(with_status(sighting, done), service=view((4, 0), (4, 0), running=[1]))
    assert acts(actions_for(saving)) == {}
    saved = replace(saving, service=view((4, 0), (4, 0)))
    done = actions_for(saved)
    assert acts(done) == {"resize": 0}
    assert (condition(done, SUSPENDED).status, condition(done, SUSPENDED).reason) == (True, reason)
    assert done.status["state"] == "Suspended"
    still = replace(with_status(saved, done), indexed_job=indexed_job(2, suspended=True), pods=())
    assert acts(actions_for(still)) == {}
    assert events(actions_for(still)) == []


def test_a_changed_template_has_the_job_made_anew_with_the_state_saved() -> None:
    sighting = replace(training_job((3, 2)), digest="changed")
    done = actions_for(sighting)
    assert acts(done) == {"want": Allocation(4, 0)}
    saved = replace(with_status(sighting, done), service=view((4, 0), (4, 0)))
    assert acts(actions_for(saved)) == {"remove": True}
    going = replace(saved, indexed_job=indexed_job(2, deleting=True))
    assert acts(actions_for(going)) == {}
    ending = replace(saved, indexed_job=None)
    assert acts(actions_for(ending, 2)) == {}, "pods of the old Job are still there"
    gone = replace(ending, pods=())
    assert acts(actions_for(gone, 2)) == {"want": Allocation(5, 2), "create": 2}


@pytest.mark.parametrize(
    ("sighting", "reason"),
    [
        (observed(job(), view(), indexed_job(1, owner=None)), Reason.NAME_CONFLICT),
        (observed(job(), view(), indexed_job(1, owner="earlier")), Reason.CLEANING_UP),
        (observed(job(), view(), pods=[pod(0)]), Reason.CLEANING_UP),
        (observed(job(), None), Reason.METRICS_SERVICE_UNAVAILABLE),
        (
            observed(job(), view(), claim=CheckpointClaim("mine", False, False, False)),
            Reason.VOLUME_NOT_FOUND,
        ),
    ],
)
def test_what_keeps_a_job_from_beginning(sighting: ObservedJob, reason: Reason) -> None:
    done = actions_for(sighting, 1)
    assert acts(done) == {}
    assert (condition(done, RUNNING).status, condition(done, RUNNING).reason) == (False, reason)
    assert done.status["state"] == "Pending"
    assert "allocation" not in done.status


# -- the end ------------------------------------------------------------------------------------------------


def test_a_job_is_complete_when_its_job_is() -> None:
    done = actions_for(replace(training_job((3, 2)), indexed_job=indexed_job(2, complete=True)))
    assert acts(done) == {}
    assert done.status["state"] == "Complete"
    assert (done.status["replicas"], done.status["desiredReplicas"]) == (0, 0)
    assert "completionTime" in done.status


def test_a_program_that_fails_too_often_fails_the_job_with_its_last_words() -> None:
    pods = [failed_pod(0, 3), failed_pod(1, 3), failed_pod(0, 4, created_at=NOW - 40), pod(0)]
    sighting = replace(training_job((5, 1), backoff_limit=1), pods=pods)
    done = actions_for(sighting, 1)
    assert condition(done, ConditionType.FAILED).reason == Reason.BACKOFF_LIMIT_EXCEEDED
    assert "exit code 3" in condition(done, ConditionType.FAILED).message
    assert "ValueError: no" in condition(done, ConditionType.FAILED).message
    assert acts(done) == {"resize": 0}
    assert done.status["failures"] == 2
    assert actions_for(replace(sighting, job=job((5, 1), backoff_limit=2)), 1).status["failures"] == 2


def test_how_a_job_ended_is_kept_also_in_words_of_another_version() -> None:
    ended = {"type": "Failed", "status": "True", "reason": "Exploded", "message": "at 12:00"}
    done = actions_for(
        observed(job((3, 1), status={"conditions": [ended | {"lastTransitionTime": "t"}]}), view())
    )
    assert condition(done, ConditionType.FAILED).message == "at 12:00"


@pytest.mark.parametrize(("ttl", "age", "removed"), [(None, 99, False), (60, 59, False), (60, 60, True)])
def test_a_job_that_has_ended_is_removed_when_its_time_is_over(
    ttl: int | None, age: int, removed: bool
) -> None:
    sighting = replace(training_job(), indexed_job=indexed_job(2, complete=True))
    ended = with_status(sighting, actions_for(sighting))
    asked = replace(ended.job.valid_job, ttl_seconds_after_finished=ttl)
    later = replace(ended, job=replace(ended.job, job=asked), now=NOW + age)
    assert actions_for(later).delete_job == removed


@pytest.mark.parametrize(
    ("asked", "node", "now", "removed"),
    [
        (None, "node1", NOW, False),
        (NOW, "node1", NOW + TERMINATION_OVERDUE, False),
        (NOW, "node1", NOW + TERMINATION_OVERDUE + 1, True),
        (NOW + 30, "lost", NOW, True),
        (None, "lost", NOW, False),
    ],
)
def test_pods_that_nobody_ends_are_deleted_by_force(
    asked: float | None, node: str, now: float, removed: bool
) -> None:
    pods = [pod(0), pod(1, deletion_deadline=asked, node=node)]
    sighting = replace(training_job(), pods=pods, lost_nodes=frozenset({"lost"}), now=now)
    assert actions_for(sighting, 2).delete_pods == (("digits-1",) if removed else ())


# -- what is told -------------------------------------------------------------------------------------------


def test_what_cannot_be_placed_is_told_while_training_goes_on() -> None:
    pods = [pod(0), pod(1), pending_pod(2), pending_pod(3)]
    growing = observed(job((4, 4)), view((4, 4), (3, 2)), indexed_job(4), pods)
    done = actions_for(growing, 4)
    told_of = condition(done, RESCALING)
    assert (told_of.status, told_of.reason) == (True, Reason.UNSCHEDULABLE)
    assert told_of.message == "2 -> 4: message of Unschedulable; training continues on 2 replicas"
    assert done.status["state"] == "Rescaling"
    assert Reason.UNSCHEDULABLE in events(done)
    assert events(actions_for(with_status(growing, done), 4)) == []


def test_a_count_that_was_refused_is_told_of() -> None:
    refused = FailedPlacement(4, 2, Reason.QUOTA_EXCEEDED, "no more", NOW + 60, 9, 60.0)
    found = condition(actions_for(training_job((5, 2)), 2, failed_placement=refused), RESCALING)
    assert (found.status, found.reason) == (False, Reason.QUOTA_EXCEEDED)


def test_the_status_is_written_when_something_has_changed_and_only_then() -> None:
    sighting = training_job((3, 2))
    done = actions_for(sighting, 2)
    after = with_status(sighting, done)
    assert has_changed(sighting.job.status, done.status)
    later = replace(after, now=NOW + 500)
    assert not has_changed(after.job.status, actions_for(later, 2).status)
    assert events(actions_for(later, 2)) == []
    grown = replace(later, service=replace(view((3, 2), (3, 2)), latest=report(3, 2, 600.0)))
    assert not has_changed(after.job.status, actions_for(grown, 2).status), "numbers wait for their time"
    assert actions_for(grown, 2).status != after.job.status
    assert has_changed(after.job.status, actions_for(later, 4).status)


def test_what_others_add_to_a_status_is_no_reason_to_write_it() -> None:
    sighting = training_job((3, 2))
    after = with_status(sighting, actions_for(sighting, 2))
    foreign = {"type": "example.com/Admitted", "status": "True", "reason": "Yes", "lastTransitionTime": "t"}
    conditions = [foreign, *reversed(after.job.status["conditions"])]
    status = {**after.job.status, "conditions": conditions, "theirs": 1}
    other = replace(after, job=replace(after.job, status=status))
    assert not has_changed(status, actions_for(other, 2).status)


def test_counts_go_on_where_the_service_counts_from_zero() -> None:
    sighting = replace(training_job((3, 2)), service=view((3, 2), (3, 2), disruptions=2))
    first = actions_for(sighting, 2)
    assert first.status["disruptions"] == 2
    assert "ReplicaLost" in events(first)
    lost = replace(with_status(sighting, first), service=view())
    second = actions_for(lost, 2)
    again = replace(with_status(lost, second), service=view((3, 2), (3, 2), disruptions=1))
    assert actions_for(again, 2).status["disruptions"] == 3
    assert actions_for(replace(sighting, job=with_status(sighting, first).job), 2).status["disruptions"] == 2


def test_a_rescale_counts_once() -> None:
    sighting = training_job((3, 2))
    first = actions_for(sighting, 2)
    assert (first.status["rescales"], events(first)) == (0, ["Running"])
    grown = replace(with_status(sighting, first), service=view((4, 4), (4, 4)), indexed_job=indexed_job(4))
    second = actions_for(grown, 4)
    assert (second.status["rescales"], second.status["attempts"]["trained"]) == (1, 4)
    assert "Rescaled" in events(second)
    assert actions_for(with_status(grown, second), 4).status["rescales"] == 1


def test_a_trainer_that_only_waits_holds_no_pod() -> None:
    waiting = tuple(replica(rank, ReplicaState.WAITING, 0) for rank in range(4))
    starting = observed(job((1, 4)), view((1, 4), replicas=waiting), indexed_job(4))
    assert acts(actions_for(starting, 2)) == {"want": Allocation(2, 2), "resize": 2}
