"""The operator after the end of a job: what it writes to the metrics service, and what an edit does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from adascale_controller.operator.observe.observed_job import CheckpointClaim
from adascale_controller.operator.reconcile.status import REPORTED_FIELDS
from adascale_controller.operator.types.actions import StatusChange, Stop
from adascale_core.messages.allocation import Allocation
from support.fake_cluster import FakeCluster
from support.observed_jobs import (
    SPEC,
    actions_for,
    finished_pod,
    job,
    observed,
    own_claim,
    report,
    view,
    with_status,
)

TRUE = {"status": "True", "lastTransitionTime": "2027-01-15T08:00:00Z"}
COMPLETE = {"conditions": [{"type": "Complete", "reason": "Finished", **TRUE}]}
FOUR = Allocation(4, 0, failed=True)
FAILED = {"conditions": [{"type": "Failed", "reason": "BackoffLimitExceeded", **TRUE}]}


@pytest.mark.parametrize(
    ("status", "recorded", "desired", "parallelism", "allocated"),
    [
        pytest.param(COMPLETE, (3, 2), None, None, None, id="complete, and the service has dropped it"),
        pytest.param(COMPLETE, (3, 2), (2, 1), None, None, id="complete, and the service has older data"),
        pytest.param(FAILED, (3, 2), (3, 2), 2, None, id="failed: its pods are stopped first"),
        pytest.param(FAILED, (3, 2), (3, 2), None, FOUR, id="failed"),
        pytest.param(FAILED, (3, 0), (3, 0), None, FOUR, id="failed without replicas"),
        pytest.param(FAILED, (4, 0), (3, 2), None, FOUR, id="failed, and killed before the write"),
        pytest.param(FAILED, (3, 2), (2, 1), 2, None, id="failed before the service had its allocation"),
        pytest.param(FAILED, (3, 2), (2, 1), None, FOUR, id="the same, without pods"),
        pytest.param(
            FAILED, (3, 2), (5, 2), None, replace(FOUR, generation=6), id="failed; the service is ahead"
        ),
        pytest.param(FAILED, (3, 2), None, None, None, id="failed, and the service has dropped it"),
        pytest.param(FAILED, (4, 0), None, None, None, id="the same, after its last allocation"),
    ],
)
def test_the_metrics_service_gets_no_job_that_has_ended_and_no_replicas_for_one_that_has_failed(
    status: dict[str, Any],
    recorded: tuple[int, int],
    desired: tuple[int, int] | None,
    parallelism: int | None,
    allocated: Allocation | None,
) -> None:
    pods = () if parallelism is None else parallelism
    actions = actions_for(observed(job(recorded, status=status), view(desired), pods))
    assert actions.allocate == allocated
    ended = [f"digits-{rank}" for rank in range(parallelism or 0)]
    assert [each.name for each in actions.stop_pods if each.how is Stop.END] == ended
    assert actions.declare is None
    assert not actions.events


def test_a_failed_job_stays_as_it_is_while_the_metrics_service_does_not_answer() -> None:
    actions = actions_for(observed(job((3, 2), status=FAILED), None))
    assert actions.allocate is None
    assert actions.status["allocation"] == {"generation": 3, "replicas": 2}


CLAIM = CheckpointClaim("shared", own=False, exists=True, single_node=False)
NOT_CONTINUED = "A complete AdaScaleJob is not continued: to train further, delete it and apply it again"


@pytest.mark.parametrize(
    ("steps", "edited", "claim", "message"),
    [
        (1000, {"spec": replace(SPEC, scale_invariant_steps=2000)}, CLAIM, NOT_CONTINUED),
        (1000, {"spec": replace(SPEC, scale_invariant_steps=1001)}, CLAIM, NOT_CONTINUED),
        (None, {"spec": replace(SPEC, scale_invariant_steps=2000)}, CLAIM, NOT_CONTINUED),
        (1000, {"spec": replace(SPEC, scale_invariant_steps=2000)}, own_claim(), NOT_CONTINUED),
        (
            1000,
            {"spec": replace(SPEC, scale_invariant_steps=None, train_samples=2000 * SPEC.batch_size)},
            CLAIM,
            NOT_CONTINUED,
        ),
        (1000, {"spec": replace(SPEC, scale_invariant_steps=500)}, CLAIM, None),
        (1000, {"spec": replace(SPEC, scale_invariant_steps=None)}, CLAIM, None),
        (1000, {"ttl_seconds_after_finished": 60}, CLAIM, None),
        (5000, {"spec": replace(SPEC, scale_invariant_steps=5000), "backoff_limit": 9}, CLAIM, None),
    ],
)
def test_more_steps_of_a_complete_job_are_answered_by_an_event_and_its_progress_stays(
    steps: int | None, edited: dict[str, Any], claim: CheckpointClaim, message: str | None
) -> None:
    service = view((3, 1), (3, 1), complete=True, latest=report(3, 1, progress=1000.5))
    spec = replace(SPEC, scale_invariant_steps=steps)
    ended = observed(job((3, 1), spec=spec), service, [finished_pod(0)], claim=claim)
    ended = with_status(ended, actions_for(ended))
    changed = replace(job(status=ended.resource.status, **edited), generation=2)
    actions = actions_for(replace(ended, resource=changed))
    assert {each: actions.status[each] for each in REPORTED_FIELDS} == {
        each: ended.resource.status[each] for each in REPORTED_FIELDS
    }
    events = [event for event in actions.events if event.reason == "NotContinued"]
    assert [event.warning for event in events] == ([] if message is None else [True])
    if message is not None:
        assert events[0].message.startswith(message)
        assert ("are deleted with it" in events[0].message) == claim.own
    again = actions_for(with_status(replace(ended, resource=changed), actions))
    assert again.status_change is not StatusChange.URGENT
    assert not again.events


def test_the_last_report_of_a_job_may_arrive_after_its_end() -> None:
    service = view((3, 1), (3, 1), complete=True, latest=report(3, 1, progress=950.0))
    ended = observed(job((3, 1)), service, [finished_pod(0)])
    ended = with_status(ended, actions_for(ended))
    assert ended.resource.status["progressText"] == "95%"
    last = replace(service, latest=report(3, 1, progress=1000.0))
    assert actions_for(replace(ended, service=last)).status["progressText"] == "100%"


@pytest.mark.parametrize(("replicas", "decided"), [(0, 0), (0, 2)])
def test_a_corrected_job_is_no_longer_failed_in_the_metrics_service(replicas: int, decided: int) -> None:
    invalid = {"conditions": [{"type": "Failed", "reason": "InvalidSpec", **TRUE}]}
    desired = Allocation(4, replicas, failed=True)
    corrected = observed(job((4, replicas), status=invalid), view(desired=(4, replicas)))
    assert corrected.service is not None
    corrected = replace(corrected, service=replace(corrected.service, desired=desired))
    assert actions_for(corrected, decided).allocate == Allocation(5, decided)


def complete(cluster: FakeCluster) -> None:
    """Have the program of the job finish, and its pods end."""
    cluster.service.state = replace(cluster.service.state, complete=True)
    for name in list(cluster.agents):
        cluster.end_pod(name, {"exitCode": 0, "reason": "Completed"}, phase="Succeeded")
    _look(cluster)


def exceed_deadline(cluster: FakeCluster) -> None:
    """Let the active deadline pass."""
    cluster.now += 3600
    _look(cluster)


def _look(cluster: FakeCluster) -> None:
    for _ in range(3):
        cluster.full = True
        cluster.expire_missing()
        cluster.deliver()
        cluster.cycle()
        cluster.run_kubelet()
    cluster.deliver()
    cluster.cycle()


@pytest.mark.parametrize("end", [complete, exceed_deadline])
def test_an_ended_job_is_not_created_again_in_a_metrics_service_that_has_dropped_it(
    end: Callable[[FakeCluster], None],
) -> None:
    cluster = FakeCluster()
    cluster.submit(maxReplicas=1, activeDeadlineSeconds=3600)
    cluster.run_cycles(10)
    end(cluster)
    cluster.service.lose_data()
    for _ in range(3):
        cluster.full = True
        cluster.deliver()
        cluster.cycle()
        assert set(cluster.writes) <= {"status"}
    assert cluster.service.list_jobs() == []
