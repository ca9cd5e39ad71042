"""Metrics service and agents of two builds: of the release before, and of this clone.

The release before is taken from the history of this clone. Its programs are processes like those of this one,
with another PYTHONPATH.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.client import TOKEN
from support.launch import AgentProcess, wait_until
from support.service import Job, Service

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "programs" / "paced.py"
BEFORE = "30f46c5cc22280562414b548d93481538e538cb2"
"""The last commit of release 0.1.0."""
PACKAGES = ("core", "client", "worker", "api", "controller")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def python_path(tree: Path) -> str:
    return ":".join(str(tree / package) for package in PACKAGES)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the release before."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", BEFORE, *PACKAGES], capture_output=True, timeout=60, check=False
    )
    if archive.returncode:
        pytest.skip(f"the history of this clone does not have {BEFORE}: fetch it with git fetch --unshallow")
    subprocess.run(["tar", "--extract", "--directory", folder], input=archive.stdout, timeout=60, check=True)
    return folder


class ServiceOfBuild(Service):
    """A metrics service of a build, which can be continued by that of another one.

    Args:
        folder: of its database.
        tree: the sources of the first build.
    """

    def __init__(self, folder: Path, tree: Path) -> None:
        self.folder = folder
        self.tree = tree
        self.database = folder / "api.sqlite"
        self._started: subprocess.Popen[bytes] | None = None
        super().__init__(folder)

    def start(self) -> None:
        """Start the service of the build, on the same port as before."""
        port_file = self.folder / "port"
        port_file.unlink(missing_ok=True)
        options = ("--port", str(self.port), "--database", f"sqlite:///{self.database}")
        with (self.folder / "api.log").open("ab") as log:
            started = self._started = subprocess.Popen(
                [sys.executable, "-m", "adascale_api", *options, "--port-file", port_file],
                env={**os.environ, "ADASCALE_TOKEN": TOKEN, "PYTHONPATH": python_path(self.tree)},
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: port_file.exists() or started.poll() is not None, "the start of the service")
        assert started.poll() is None, self.log()
        self.port = int(port_file.read_text())

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send a signal, and wait for the service to exit."""
        if self._started is not None:
            self._started.send_signal(number)
            self._started.wait(30)
            self._started = None

    def log(self) -> str:
        """The output of all services so far."""
        return (self.folder / "api.log").read_text()

    def replaced_by(self, tree: Path, database: Path | None = None) -> None:
        """Stop the service, and start that of another build."""
        self.stop()
        self.tree = tree
        self.database = database or self.database
        self.start()

    def rescale(self, replicas: int) -> None:
        """Set an allocation as the controller does: with the generation after the present one."""

        def is_set() -> bool:
            try:
                found = self.call("GET", "/allocation")["desired"]
                self.allocate(found["generation"] + 1, replicas)
            except OSError:
                # A report of a newer generation was faster, or none has arrived.
                return False
            return True

        wait_until(is_set, "an allocation", pause=0.2)

    def newest(self) -> dict[str, Any]:
        """The newest report of the job."""
        report: dict[str, Any] = self.call("GET", "/gain")
        return report


class JobOfBuilds(Job):
    """A job whose agents are those of a build."""

    service: ServiceOfBuild

    def start_agents(self, tree: Path, replicas: int) -> None:
        """Start agents."""
        options = {
            "PYTHONPATH": python_path(tree),
            "PACE": "0.02",
            "ADASCALE_BATCH_SIZE": "4",
            "ADASCALE_MAX_BATCH_SIZE": "16",
            "ADASCALE_LOCAL_BSZ_BOUNDS": "4,4",
        }
        command = [sys.executable, str(PROGRAM)]
        for rank in range(replicas):
            agent = AgentProcess(rank, self.folder, self.service.environ, command, **options)
            self.agents.append(agent)

    def stop(self) -> None:
        """Stop the agents as a cluster does: the state of training is saved."""
        for agent in self.agents:
            agent.process.send_signal(signal.SIGTERM)
        for agent in self.agents:
            agent.wait()
        self.agents.clear()

    def trains_on(self, replicas: int) -> int:
        """Wait until steps after the present one are reported for these replicas. Returns the step."""

        def report() -> dict[str, Any] | None:
            assert all(agent.process.poll() is None for agent in self.agents), self.logs()
            try:
                found = self.service.newest()
            except OSError:
                return None
            return found if found["replicas"] == replicas else None

        first = wait_until(report, f"a report of {replicas} replicas", pause=0.2)["step"]
        wait_until(lambda: (found := report()) and found["step"] > first + 5, "more steps", pause=0.2)
        return int(first)

    def starts_of_training(self) -> int:
        """How often the first replica has begun without state."""
        logs = self.folder.glob("agent-0-*.log")
        return sum(len(re.findall(r" at step 0$", log.read_text(), re.MULTILINE)) for log in logs)


@pytest.fixture
def job(tmp_path: Path, before: Path) -> Iterator[JobOfBuilds]:
    service = ServiceOfBuild(tmp_path, before)
    made = JobOfBuilds(tmp_path, service)
    yield made
    made.end()
    service.stop()


def test_the_service_is_updated_under_running_agents_and_set_back_and_their_checkpoint_stays_theirs(
    job: JobOfBuilds, before: Path
) -> None:
    service = job.service
    service.allocate(1, 2)
    job.start_agents(before, 2)
    step = job.trains_on(2)
    processes = [agent.process.pid for agent in job.agents]

    service.replaced_by(ROOT)
    assert job.trains_on(2) > step
    service.rescale(1)
    job.trains_on(1)
    service.rescale(2)
    step = job.trains_on(2)

    service.stop()
    service.tree = before
    with pytest.raises(AssertionError, match="use the version of the service that created it"):
        service.start()
    service.replaced_by(before, service.folder / "api.sqlite.schema-13")
    service.rescale(1)
    assert job.trains_on(1) > step
    assert [agent.process.pid for agent in job.agents] == processes
    assert job.starts_of_training() == 1

    service.replaced_by(ROOT)
    step = job.trains_on(1)
    job.stop()
    # The state has another format since then.
    job.start_agents(ROOT, 1)
    (updated,) = job.agents
    assert updated.wait() != 0
    assert "use the version that wrote it" in updated.log.read_text()
    assert "Traceback" not in updated.log.read_text()
    job.agents.clear()
    job.start_agents(before, 1)
    assert job.trains_on(1) >= step
    assert job.starts_of_training() == 1, job.logs()
