"""One table of what happens to replicas, on pods and on processes: the job ends in the same way."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from adascale_controller.job.placement_backoff import FIRST_PAUSE, TIMEOUT_TRAINING
from adascale_controller.job.reasons import Reason
from adascale_controller.job_definition import JobDefinition
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.replicas import AgentExit
from adascale_controller.local.runner import RunOptions, run_job
from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_controller.operator.reconcile.job_phase import JobPhase, assess
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_INVALID_PROGRAM,
    EXIT_REENTRY,
    EXIT_SINGLE_REPLICA,
    TerminationMessage,
)
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import StepTime
from adascale_core.views.jobs import JobView
from controller.test_local_replicas import Run
from support.observed_jobs import NOW, ON_CPU, SPEC, job, observed, pod, replica, report, view


class Ended(NamedTuple):
    """A replica that has ended."""

    rank: int
    code: int
    generation: int = 0  # in which it trained last; 0 for none
    log: str = "ValueError: no"


AT_TWO = view((1, 2), (1, 2))
STARTING = view((1, 2))
WITH_SPARE = replace(AT_TWO, desired=Allocation(1, 2, spares=1))
LOST = replace(replica(0, ReplicaState.LOST, 1), exit_code=-9)


def measured(*counts: int) -> JobView:
    return replace(AT_TWO, step_times=tuple(StepTime(count, 4, 1, 0.1) for count in counts))


TWICE = [Ended(0, 3, 1), Ended(0, 3, 2)]
AFTER_TWO = view((3, 2))


Outcome = tuple[int, str]
"""The number of failures, and the reason and message of the end; empty if the job goes on."""


def of_pods(ends: Sequence[Ended], service: JobView, spec: dict[str, Any], now: float) -> Outcome:
    """Return what becomes of a job on a cluster."""
    desired = service.desired
    assert desired is not None
    resource = job((desired.generation, desired.replicas), **spec)
    resource.status["allocation"]["spares"] = desired.spares
    pods = [
        pod(
            end.rank,
            uid=f"ended-{number}",
            phase="Failed",
            created_at=NOW - 50 + number,
            exit=PodExit(end.code, termination=TerminationMessage(end.generation, end.code, end.log)),
        )
        for number, end in enumerate(ends)
    ]
    seen = replace(observed(resource, service, pods), now=NOW + now)
    found = assess(seen)
    message = re.sub(r" \(pod [^)]*\)", "", found.message)
    return found.failures.count.count, (
        f"{found.reason}: {message}" if found.phase is JobPhase.FAILED else ""
    )


def of_processes(
    path: Path, ends: Sequence[Ended], service: JobView, spec: dict[str, Any], now: float
) -> Outcome:
    """Return what becomes of a job on this machine."""
    run = Run(path, JobDefinition("team.digits", SPEC, **spec))
    result = None
    began = run._replicas._started_at
    for end in ends or [Ended(0, EXIT_REENTRY)]:
        run.log(end.rank, end.log)
        failed = replace(replica(end.rank, ReplicaState.FAILED, end.generation), log=end.log)
        others = [each for each in service.replicas if each.replica != end.rank or not ends]
        seen = replace(service, replicas=(*others, failed) if ends else tuple(others))
        result = result or run.handle_exit(AgentExit(end.rank, end.code, requested=False), seen, began + now)
    count = run._replicas._counted.count
    run.close()
    if result is None:
        return count, ""
    assert result.end is not None
    return count, f"{result.end.reason}: {result.end}"


def test_a_run_without_room_for_its_spares_counts_each_failure(tmp_path: Path) -> None:
    """`adascale run` has fewer spares than the job where there are too few replicas."""
    ends = [Ended(0, 3), Ended(0, 3)]
    count, end = of_processes(tmp_path, ends, STARTING, {"spare_replicas": 1}, 0.0)
    assert (count, end.split(":")[0]) == (2, "ProgramFailed")


@pytest.mark.parametrize(
    ("spec", "reason", "message"),
    [
        ({"suspend": True}, Reason.SUSPENDED, "spec.suspend is true"),
        ({"replica_limit": 0}, Reason.SCALED_TO_ZERO, "spec.replicaLimit is 0"),
    ],
    ids=["suspended", "scaled to zero"],
)
def test_a_job_that_is_not_to_run_has_no_replicas(
    tmp_path: Path, spec: dict[str, Any], reason: Reason, message: str
) -> None:
    on_pods = assess(observed(job(**spec), STARTING, []))
    assert (on_pods.phase, on_pods.reason, on_pods.message) == (JobPhase.STOPPING, reason, message)
    output = io.StringIO()
    on_processes = JobDefinition("team.digits", SPEC, **spec)
    display = PlainDisplay(Console(file=output, width=200))
    assert run_job(on_processes, RunOptions(state_dir=tmp_path / "state"), display) == 0
    assert output.getvalue().endswith(f"team.digits is not run: {message}\n")
    assert not (tmp_path / "state").exists()


BACKOFF = "The program has failed {}, backoffLimit ({}) exceeded. Replica {} failed: "


@pytest.mark.parametrize(
    ("ends", "service", "spec", "outcome"),
    [
        pytest.param([Ended(0, 3, 1)], AT_TWO, {}, (1, ""), id="a replica fails"),
        pytest.param([Ended(0, 137, 1)], AT_TWO, {"backoff_limit": 0}, (0, ""), id="a replica is lost"),
        pytest.param(
            [Ended(0, 3, 1), Ended(1, 3, 1)], AT_TWO, {"backoff_limit": 1}, (1, ""), id="both fail at once"
        ),
        pytest.param(
            [Ended(0, 3, 1)],
            AT_TWO,
            {"backoff_limit": 0},
            (1, f"BackoffLimitExceeded: ValueError: no. {BACKOFF.format('1 time', 0, 0)}exit code 3:"),
            id="a replica fails too often",
        ),
        pytest.param(
            [Ended(1, EXIT_INVALID_PROGRAM, 1)],
            AT_TWO,
            {},
            (1, "ProgramFailed: ValueError: no. The program is not restarted, because it would fail again"),
            id="the program must be changed",
        ),
        pytest.param(
            [Ended(1, EXIT_SINGLE_REPLICA, 1)],
            measured(2),
            {},
            (1, "ProgramFailed: ValueError: no. The program is not restarted, because it would fail again"),
            id="a growth fails, and the job has never trained on one",
        ),
        pytest.param(
            [Ended(1, EXIT_SINGLE_REPLICA, 1)],
            measured(1),
            {},
            (1, ""),
            id="a growth fails after one replica",
        ),
        pytest.param(
            [Ended(0, 3), Ended(0, 3)],
            STARTING,
            {},
            (
                2,
                "ProgramFailed: ValueError: no. The program has failed twice in the same way before",
            ),
            id="the same failure before a step",
        ),
        pytest.param(
            [Ended(0, 3), Ended(0, 3, log="KeyError")], STARTING, {}, (2, ""), id="different failures"
        ),
        pytest.param(
            TWICE,
            AFTER_TWO,
            {},
            (2, "ProgramFailed: ValueError: no. The program has failed twice in the same way before"),
            id="the same failure in two generations",
        ),
        pytest.param(
            TWICE, replace(AFTER_TWO, latest=report(2)), {}, (2, ""), id="the same failure after a step"
        ),
        pytest.param(
            TWICE,
            replace(AFTER_TWO, step_times=measured(1).step_times),
            {},
            (2, ""),
            id="the same failure, but it has trained on another count",
        ),
        pytest.param(
            [Ended(2, 3), Ended(2, 3)],
            WITH_SPARE,
            {"spare_replicas": 1, "backoff_limit": 0},
            (0, ""),
            id="a spare fails before it trained",
        ),
        pytest.param(
            [Ended(2, 3, 1)],
            WITH_SPARE,
            {"spare_replicas": 1, "backoff_limit": 0},
            (1, f"BackoffLimitExceeded: ValueError: no. {BACKOFF.format('1 time', 0, 2)}exit code 3:"),
            id="a replica fails that is a spare now",
        ),
        pytest.param(
            [],
            replace(AT_TWO, replicas=(LOST,), restarts_without_progress=3),
            {"max_restarts_without_progress": 2},
            (
                0,
                "NoProgress: The trainers were lost 3 times without a step in between, "
                "maxRestartsWithoutProgress (2) exceeded (killed by SIGKILL)",
            ),
            id="replicas are lost without a step",
        ),
        pytest.param(
            [],
            replace(AT_TWO, replicas=(LOST,), restarts_without_progress=2),
            {"max_restarts_without_progress": 2, "backoff_limit": 0},
            (0, ""),
            id="replicas are lost a few times without a step",
        ),
        pytest.param(
            [], AT_TWO, {"active_deadline_seconds": 101}, (0, ""), id="a deadline has not passed yet"
        ),
        pytest.param(
            [],
            AT_TWO,
            {"active_deadline_seconds": 100},
            (0, "DeadlineExceeded: activeDeadlineSeconds (100) exceeded"),
            id="a deadline passes",
        ),
        pytest.param(
            [Ended(1, EXIT_INVALID_PROGRAM, 1)],
            replace(AT_TWO, complete=True),
            {"backoff_limit": 0},
            (0, ""),
            id="a replica fails after the end",
        ),
    ],
)
def test_a_job_fails_for_the_same_reasons_on_pods_and_on_processes(
    tmp_path: Path, ends: list[Ended], service: JobView, spec: dict[str, Any], outcome: Outcome
) -> None:
    now = 100.0
    for count, end in (of_pods(ends, service, spec, now), of_processes(tmp_path, ends, service, spec, now)):
        assert count == outcome[0]
        assert end.startswith(outcome[1])
        assert bool(end) == bool(outcome[1])


SAID = "replica 1 does not join: device cpu has failed its check"


def fails_check(tmp_path: Path) -> Iterator[tuple[str, list[tuple[int | None, str]]]]:
    """Yield both kinds of replicas, and the limit and its reason as time passes."""
    growing = replace(view((2, 2), (1, 1)), latest=report(1))
    times = (0.0, TIMEOUT_TRAINING - 1, TIMEOUT_TRAINING, TIMEOUT_TRAINING + FIRST_PAUSE)
    failed = PodExit(EXIT_CHECK_FAILED, termination=TerminationMessage(0, EXIT_CHECK_FAILED, SAID))
    pods: list[Pod] = [pod(0), pod(1, phase="Failed", exit=failed)]
    scheduler = Scheduler()
    limits: list[tuple[int | None, str]] = []
    for now in times:
        seen = observed(job((2, 2), template=ON_CPU), growing, pods, now=NOW + now)
        scheduler.update(seen)
        found = scheduler.schedule(seen).failed_placement
        limits.append((None, "") if found is None else (found.limit, found.reason))
    yield "pods", limits
    run = Run(tmp_path, JobDefinition("team.digits", SPEC))
    run.log(1, SAID)
    limits = []
    for now in times:
        run.handle_exit(AgentExit(1, EXIT_CHECK_FAILED, requested=False), growing, now)
        limit, why = run.limit(now)
        limits.append((limit, Reason.REPLICA_CHECK_FAILED if SAID in why else why))
    run.close()
    yield "processes", limits


def test_a_count_is_given_up_for_a_pause_if_a_replica_that_it_needs_fails_its_check(tmp_path: Path) -> None:
    given_up = (1, Reason.REPLICA_CHECK_FAILED)
    for kind, limits in fails_check(tmp_path):
        assert limits == [(None, ""), (None, ""), given_up, (None, "")], kind
