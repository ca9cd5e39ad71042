"""One table of what happens to a job, on pods and on processes: its state, its counts and the reasons."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rich.console import Console

from adascale_client import MetricsServiceClient
from adascale_controller.formatting import capitalized
from adascale_controller.job.phase import JobPhase
from adascale_controller.job.placement_backoff import FIRST_PAUSE, TIMEOUT_TRAINING
from adascale_controller.local.control_loop import LocalControlLoop
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.local_jobs import state_in_run
from adascale_controller.local.processes import StopSignals
from adascale_controller.local.replica_limit import ReplicaLimit, ScaleRequests
from adascale_controller.local.replicas import AgentExit, RunResult
from adascale_controller.local.runner import RunOptions, run_job
from adascale_controller.local.service_process import ServiceSupervisor
from adascale_controller.local.state_dir import StateDir
from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_controller.operator.reconcile.job_phase import assess
from adascale_controller.operator.reconcile.reconciler import reconcile
from adascale_controller.operator.schedule.scheduler import Scheduler
from adascale_controller.operator.types.kubernetes import ConditionType, condition_of
from adascale_controller.schema import JobDefinition
from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_INVALID_PROGRAM,
    EXIT_REENTRY,
    EXIT_SINGLE_REPLICA,
    TerminationMessage,
)
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import ReplicaState
from adascale_core.messages.reports import StepTime
from adascale_core.views.decision import DecisionView
from adascale_core.views.job_summary import JobStateName
from adascale_core.views.jobs import JobView
from controller.test_local_replicas import Run
from support.definitions import define
from support.observed_jobs import NOW, ON_CPU, SPEC, decided, job, observed, pod, replica, report, view


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
PAUSED = view((2, 0), (2, 0))
SAID = "replica 2 does not join: device cpu has failed its check"


def measured(*counts: int) -> JobView:
    return replace(AT_TWO, step_times=tuple(StepTime(count, 4, 1, 0.1) for count in counts))


TWICE = [Ended(0, 3, 1), Ended(0, 3, 2)]
AFTER_TWO = view((3, 2))
GROWING = replace(view((2, 3), (1, 1)), latest=report(1))
CHECK = Ended(2, EXIT_CHECK_FAILED, log=SAID)


@dataclass(frozen=True)
class Case:
    """What happens to a job."""

    ends: Sequence[Ended] = ()
    service: JobView = AT_TWO  # what the metrics service knows
    spec: dict[str, Any] = field(default_factory=dict)
    times: Sequence[float] = (100.0,)  # when it is looked at, in seconds after its start
    is_continued: bool = False  # on this machine, another run continues it

    @property
    def job(self) -> JobDefinition:
        return define("team.digits", **{"spec": SPEC, **self.spec})


class Outcome(NamedTuple):
    """What becomes of a job."""

    state: JobStateName
    failures: int = 0
    end: str = ""  # the reason and message of its end or stop; empty if it goes on
    request: tuple[int, int] | None = None  # the generation and the replicas that are requested
    change: str = ""  # from which count to which, and why
    slow: str = ""  # what is said about a slow replica


def without_pods(text: str) -> str:
    return re.sub(r"pod digits-\d: | \(pod [^)]*\)", "", text)


def on_pods(case: Case) -> Outcome:
    """Return what becomes of a job on a cluster."""
    desired = case.service.desired
    assert desired is not None
    recorded = {"generation": desired.generation, "replicas": desired.replicas, "spares": desired.spares}
    status = {
        "allocation": recorded,
        "startTime": "2027-01-15T08:00:00Z",
        "attempts": {"trained": desired.replicas},
    }
    resource = job(template=ON_CPU, status=status, **case.spec)
    pods: list[Pod] = [
        pod(
            end.rank,
            uid=f"ended-{number}",
            phase="Failed" if end.code else "Succeeded",
            created_at=NOW - 50 + number,
            exit=PodExit(end.code, termination=TerminationMessage(end.generation, end.code, end.log)),
        )
        for number, end in enumerate(case.ends)
    ]
    ended = {end.rank for end in case.ends}
    pods += [pod(rank) for rank in desired.indices if rank not in ended]
    scheduler = Scheduler()
    for moment in case.times:
        seen = replace(observed(resource, case.service, pods), now=NOW + moment)
        found = assess(seen)
        if found.phase is JobPhase.RUNNABLE:
            decided(scheduler, seen)
        actions = reconcile(seen, found, scheduler.schedule(seen))
    changes = [event.message for event in actions.events if event.reason == "Rescaling"]
    slow = condition_of(actions.status, ConditionType.SLOW_REPLICA)
    allocated = actions.allocate
    end = {JobPhase.FAILED: f"{found.reason}: {found.message}", JobPhase.STOPPING: found.message}
    return Outcome(
        JobStateName(actions.status["state"]),
        found.failures.count.count,
        without_pods(end.get(found.phase, "")),
        None if allocated is None else (allocated.generation, allocated.replicas),
        "" if case.is_continued else without_pods("".join(changes)),
        "" if slow is None else without_pods(slow.message),
    )


class KnownService(ServiceSupervisor):
    """The supervisor of a metrics service that knows one thing."""

    def __init__(self, known: JobView) -> None:
        self.known = known

    def restart_if_exited(self, now: float) -> None:
        pass

    def get_job(self) -> JobView:
        return self.known


class KnownClient(MetricsServiceClient):
    """The client of such a service, which keeps what is requested."""

    def __init__(self, service: KnownService) -> None:
        self._service = service
        self.requested: Allocation | None = None

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        pass

    def get_job(self, job_id: str) -> JobView:
        return self._service.known

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        self.requested = allocation
        if allocation.replicas:
            # Without replicas, those that are there save their state first.
            self._service.known = replace(self._service.known, desired=allocation)
        known = self._service.known
        return AllocationView(known.version, known.desired, known.active, known.broken, known.complete)

    def put_decision(self, decision: DecisionView) -> None:
        pass


def on_processes(case: Case, path: Path) -> Outcome:
    """Return what becomes of a job on this machine."""
    run, desired = Run(path / "state", case.job), case.service.desired
    assert desired is not None
    run.replicas.agents.start = lambda rank: None  # type: ignore[method-assign]
    service = KnownService(case.service)
    client = KnownClient(service)
    scale = ScaleRequests(StateDir(path / "state"), case.job, [], run.display)
    limit = ReplicaLimit(case.job.spec.max_replicas, desired.spares)
    loop = LocalControlLoop(
        *(case.job, service, client, run.replicas, limit, None, run.display, StopSignals(), scale, 0)
    )
    end, state, shown = "", None, 0
    if case.is_continued:
        loop.start()
    elif case.job.spec.suspend or case.job.spec.replica_limit == 0:
        end = refused(case.job, path)
        loop.request_pause()
    else:
        for moment in case.times:
            service.known, client.requested, shown = case.service, None, len(run.output)
            result = look(case, run, service, loop, moment)
        if result is not None:
            end = "" if result.end is None else f"{result.end.reason}: {result.end}"
            state = JobStateName.COMPLETE if result.finished else JobStateName.FAILED
    run.close()
    requested, output = client.requested, run.output[shown:]
    change = re.search(r"Rescaling \d+ -> \d+: .*", output)
    slow = capitalized(case.service.slowness)
    return Outcome(
        state or state_in_run(service.known),
        run.replicas._counted.count,
        end,
        None if requested is None else (requested.generation, requested.replicas),
        "" if change is None else change[0],
        slow if slow in output else "",
    )


def look(
    case: Case, run: Run, service: KnownService, loop: LocalControlLoop, moment: float
) -> RunResult | None:
    """Let a run look at its job after each end, and return its result if it ends."""
    for end in case.ends or [Ended(0, EXIT_REENTRY)]:
        run.log(end.rank, end.log)
        if end.generation or end.code == 3:
            failed = replace(replica(end.rank, ReplicaState.FAILED, end.generation), log=end.log)
            others = [each for each in service.known.replicas if each.replica != end.rank]
            service.known = replace(service.known, replicas=(*others, failed))
        run.collect(AgentExit(end.rank, end.code, requested=False))
        result = loop._iterate(loop._started_at + moment)
        if result is not None:
            return result
    return None


def refused(job: JobDefinition, path: Path) -> str:
    """Return the reason that `adascale run` prints for a job that it does not run."""
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    assert run_job(job, RunOptions(state_dir=path / "refused"), display) == 0
    assert not (path / "refused").exists()
    return output.getvalue().rpartition("team.digits is not run: ")[2].strip()


RUNNING, STARTED, FAILED = JobStateName.RUNNING, JobStateName.STARTING, JobStateName.FAILED
BACKOFF = "The program has failed {}, backoffLimit ({}) exceeded. Replica {} failed: "
AGAIN = "ProgramFailed: ValueError: no. The program is not restarted, because it would fail again"
REPEATED = "ProgramFailed: ValueError: no. The program has failed twice in the same way before"
SLOW = replace(report(1, 2), slow_replica=1, slow_factor=1.5)


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        pytest.param(Case([Ended(0, 3, 1)]), Outcome(RUNNING, 1), id="a replica fails"),
        pytest.param(
            Case([Ended(0, 137, 1)], spec={"backoff_limit": 0}), Outcome(RUNNING), id="a replica is lost"
        ),
        pytest.param(
            Case([Ended(0, 3, 1), Ended(1, 3, 1)], replace(AT_TWO, broken=True), {"backoff_limit": 1}),
            Outcome(STARTED, 1),
            id="both fail at once",
        ),
        pytest.param(
            Case([Ended(0, 3, 1)], spec={"backoff_limit": 0}),
            Outcome(
                FAILED,
                1,
                f"BackoffLimitExceeded: ValueError: no. {BACKOFF.format('1 time', 0, 0)}exit code 3:",
            ),
            id="a replica fails too often",
        ),
        pytest.param(
            Case([Ended(1, EXIT_INVALID_PROGRAM, 1)]),
            Outcome(FAILED, 1, AGAIN),
            id="the program must be changed",
        ),
        pytest.param(
            Case([Ended(1, EXIT_SINGLE_REPLICA, 1)], measured(2)),
            Outcome(FAILED, 1, AGAIN),
            id="a growth fails, and the job has never trained on one",
        ),
        pytest.param(
            Case([Ended(1, EXIT_SINGLE_REPLICA, 1)], measured(1)),
            Outcome(
                JobStateName.RESCALING,
                1,
                request=(2, 1),
                change="Rescaling 2 -> 1: the program failed at once on 2 replicas (replica 1: exit code "
                "77), but trained on 1",
            ),
            id="a growth fails after one replica",
        ),
        pytest.param(
            Case([Ended(0, 3), Ended(0, 3)], STARTING),
            Outcome(FAILED, 2, REPEATED),
            id="the same failure before a step",
        ),
        pytest.param(
            Case([Ended(0, 3), Ended(0, 3, log="KeyError")], STARTING),
            Outcome(STARTED, 2),
            id="different failures",
        ),
        pytest.param(
            Case(TWICE, AFTER_TWO), Outcome(FAILED, 2, REPEATED), id="the same failure in two generations"
        ),
        pytest.param(
            Case(TWICE, replace(AFTER_TWO, latest=report(2))),
            Outcome(STARTED, 2),
            id="the same failure after a step",
        ),
        pytest.param(
            Case(TWICE, replace(AFTER_TWO, step_times=measured(1).step_times)),
            Outcome(STARTED, 2),
            id="the same failure, but it has trained on another count",
        ),
        pytest.param(
            Case(
                [Ended(2, 3), Ended(2, 3)],
                WITH_SPARE,
                {"spare_replicas": 1, "backoff_limit": 0},
            ),
            Outcome(RUNNING),
            id="a spare fails before it trained",
        ),
        pytest.param(
            Case([Ended(2, 3, 1)], WITH_SPARE, {"spare_replicas": 1, "backoff_limit": 0}),
            Outcome(
                FAILED,
                1,
                f"BackoffLimitExceeded: ValueError: no. {BACKOFF.format('1 time', 0, 2)}exit code 3:",
            ),
            id="a replica fails that is a spare now",
        ),
        pytest.param(
            Case(
                service=replace(AT_TWO, replicas=(LOST,), restarts_without_progress=3),
                spec={"max_restarts_without_progress": 2},
            ),
            Outcome(
                FAILED,
                end="NoProgress: The trainers were lost 3 times without a step in between, "
                "maxRestartsWithoutProgress (2) exceeded (killed by SIGKILL)",
            ),
            id="replicas are lost without a step",
        ),
        pytest.param(
            Case(
                service=replace(AT_TWO, restarts_without_progress=2),
                spec={"max_restarts_without_progress": 2, "backoff_limit": 0},
            ),
            Outcome(RUNNING),
            id="replicas are lost a few times without a step",
        ),
        pytest.param(
            Case([CHECK], GROWING, times=(0.0, TIMEOUT_TRAINING - 1)),
            Outcome(JobStateName.RESCALING),
            id="a replica fails its check",
        ),
        pytest.param(
            Case([CHECK], GROWING, times=(0.0, TIMEOUT_TRAINING)),
            Outcome(
                JobStateName.RESCALING,
                request=(3, 2),
                change=f"Rescaling 3 -> 2: 3 replicas can not train: {SAID}; next attempt after 1 min 0 s",
            ),
            id="a replica fails its check for long",
        ),
        pytest.param(
            Case([CHECK], GROWING, times=(0.0, TIMEOUT_TRAINING, TIMEOUT_TRAINING + FIRST_PAUSE)),
            Outcome(JobStateName.RESCALING),
            id="a replica fails its check, and is tried again",
        ),
        pytest.param(
            Case(service=replace(AT_TWO, latest=SLOW)),
            Outcome(
                RUNNING,
                slow="Replica 1 is slow: in each step it computes 1.50 times as long as the others, which "
                "wait for it",
            ),
            id="a replica is slow",
        ),
        pytest.param(
            Case(spec={"active_deadline_seconds": 101}), Outcome(RUNNING), id="a deadline has not passed yet"
        ),
        pytest.param(
            Case(spec={"active_deadline_seconds": 100}),
            Outcome(FAILED, end="DeadlineExceeded: activeDeadlineSeconds (100) exceeded"),
            id="a deadline passes",
        ),
        pytest.param(
            Case(spec={"suspend": True}),
            Outcome(RUNNING, end="spec.suspend is true", request=(2, 0)),
            id="it is suspended",
        ),
        pytest.param(
            Case(spec={"replica_limit": 0}),
            Outcome(RUNNING, end="spec.replicaLimit is 0", request=(2, 0)),
            id="it is scaled to zero",
        ),
        pytest.param(
            Case(service=PAUSED, is_continued=True), Outcome(STARTED, request=(3, 1)), id="it is resumed"
        ),
        pytest.param(
            Case(
                service=view((1, 4), (1, 4)),
                spec={"spec": replace(SPEC, max_replicas=2)},
                is_continued=True,
            ),
            Outcome(JobStateName.RESCALING, request=(2, 2)),
            id="its largest count is edited",
        ),
        pytest.param(Case([Ended(0, 0, 1)]), Outcome(JobStateName.COMPLETE), id="it ends"),
        pytest.param(
            Case(
                [Ended(0, 0, 1), Ended(1, EXIT_INVALID_PROGRAM, 1)],
                replace(AT_TWO, complete=True),
                {"backoff_limit": 0},
            ),
            Outcome(JobStateName.COMPLETE),
            id="a replica fails after the end",
        ),
    ],
)
def test_the_same_becomes_of_a_job_on_pods_and_on_processes(
    tmp_path: Path, case: Case, expected: Outcome
) -> None:
    for found in (on_pods(case), on_processes(case, tmp_path)):
        # An end has the last lines of the output too.
        assert found._replace(end=found.end[: len(expected.end)]) == expected
        assert bool(found.end) == bool(expected.end)


def test_a_run_without_room_for_its_spares_counts_each_failure(tmp_path: Path) -> None:
    """`adascale run` has fewer spares than the job where there are too few replicas."""
    found = on_processes(Case([Ended(0, 3), Ended(0, 3)], STARTING, {"spare_replicas": 1}), tmp_path)
    assert (found.failures, found.end.split(":")[0]) == (2, "ProgramFailed")
