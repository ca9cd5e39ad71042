"""The control loop of a local run, with a real metrics service."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from rich.console import Console

from adascale_client import MetricsServiceClient, ServiceRefusedError
from adascale_controller.local.control_loop import LocalControlLoop
from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.local_command import LocalCommand
from adascale_controller.local.processes import StopSignals
from adascale_controller.local.replica_limit import ReplicaLimit, ScaleRequests
from adascale_controller.local.replicas import Agents, Replicas
from adascale_controller.local.state_dir import StateDir
from adascale_controller.schema import JobDefinition
from adascale_core.decision.deadline import Feasibility
from adascale_core.decision.decide import Decision
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from api.client import TOKEN
from support.definitions import changed, define
from support.observed_jobs import report
from support.service import Service

JOB = define("default.test", JobSpec(4, 64, (4, 16), 1, 4, 1000), ("python", "-c", "pass"))


class ContestedClient(MetricsServiceClient):
    """Before each of the first allocations, somebody else requests one."""

    contests = 0

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        if self.contests:
            self.contests -= 1
            super().allocate(job_id, Allocation(allocation.generation, 4))
        return super().allocate(job_id, allocation)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    yield service
    service.stop()


@pytest.fixture
def client(service: Service) -> Iterator[ContestedClient]:
    client = ContestedClient(service.url, TOKEN)
    yield client
    client.delete_job(JOB.id)
    client.close()


def start(client: MetricsServiceClient, path: Path, saved_generation: int = 0) -> int:
    """Start a run, and return the generation that it requests."""
    control_loop(client, path, saved_generation).start()
    return client.get_job(JOB.id).generation


def control_loop(
    client: MetricsServiceClient,
    path: Path,
    saved_generation: int = 0,
    job: JobDefinition = JOB,
    display: PlainDisplay | None = None,
) -> LocalControlLoop:
    """Return the loop of a run that has not started."""
    folder = StateDir(path / "state")
    folder.create()
    display = display or PlainDisplay(Console(file=io.StringIO()))
    agents = Agents(LocalCommand((), {}, path), {}, [], folder, 0)
    return LocalControlLoop(
        job,
        cast(Any, None),  # It supervises the service later.
        client,
        Replicas(agents, job, display),
        ReplicaLimit(2, job.spec.spare_replicas),
        None,
        display,
        StopSignals(),
        ScaleRequests(folder, JOB, [], display),
        saved_generation,
    )


@pytest.mark.parametrize(("reported", "saved", "first"), [(0, 0, 1), (7, 0, 8), (0, 5, 6), (3, 5, 6)])
def test_the_first_generation_follows_those_that_were_reported_and_saved(
    client: ContestedClient, tmp_path: Path, reported: int, saved: int, first: int
) -> None:
    """A report of a later generation would hide the new ones."""
    if reported:
        client.post_gain(JOB.id, [report(generation=reported)])
    assert start(client, tmp_path, saved) == first


def test_an_allocation_that_somebody_else_requests_at_the_same_time_is_followed_by_that_of_the_run(
    client: ContestedClient, tmp_path: Path
) -> None:
    client.contests = 2
    assert start(client, tmp_path) == 3
    client.contests = 100
    with pytest.raises(ServiceRefusedError, match="is out of date"):
        start(client, tmp_path)


def test_a_run_that_stops_requests_no_replicas_so_that_their_end_is_a_pause(
    client: ContestedClient, tmp_path: Path
) -> None:
    loop = control_loop(client, tmp_path)
    loop.start()
    loop.request_pause()
    view = client.get_job(JOB.id)
    assert view.desired == Allocation(2, 0)
    assert view.active is not None
    assert (view.active.generation, view.active.replicas) == (2, 0)
    client.contests = 1
    loop.request_pause()  # Somebody else has requested another allocation meanwhile.
    assert start(client, tmp_path) == 4


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (
            [(0, 2), (1, 1), (2, 2), (60, 1)],
            ["2 replicas or more, from now on, meet completionDeadlineSeconds (100), as predicted from its"],
        ),
        ([(0, 2), (1, None), (30, None), (31, 2), (32, None), (61, None)], ["2 replicas or more"]),
        (
            [(0, 2), (1, None), (31, None), (40, 2), (70, 2)],
            ["2 replicas or more", "No replica count m", "2 replicas or more"],
        ),
        ([(0, 3), (31, 3), (62, 4)], ["3 replicas or more would meet"]),
        ([(0, None), (10, 2), (101, 2), (102, None)], ["2 replicas or more", "Not complete within"]),
    ],
)
def test_whether_a_run_can_meet_its_deadline_is_shown_when_that_has_changed_for_some_time(
    tmp_path: Path, found: list[tuple[int, int | None]], shown: list[str]
) -> None:
    """At each time, the smallest count that is predicted to meet the deadline in 100 s."""
    output = io.StringIO()
    job = changed(JOB, completion_deadline_seconds=100)
    display = PlainDisplay(Console(file=output, width=200))
    loop = control_loop(cast(Any, None), tmp_path, job=job, display=display)
    begun = loop._started_at
    for seconds, count in found:
        feasibility = Feasibility(count, "its own step times")
        loop.report_deadline(Decision(1, "", feasibility=feasibility), begun + seconds)
    lines = [line for line in output.getvalue().splitlines() if "completionDeadlineSeconds (100)" in line]
    assert len(lines) == len(shown)
    assert all(text in line for text, line in zip(shown, lines, strict=True)), lines
