"""A metrics service in a process of its own, with one job, its agents and their trainers."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from adascale_core.messages.allocation import Allocation
from api.client import TOKEN, ServiceProcess
from support.certificates import TlsFiles
from support.launch import AgentProcess, Journal, wait_until


class Service(ServiceProcess):
    """A metrics service with a job.

    Args:
        folder: the folder of its database and port file.
        job: the id of the job that the methods use. It may be changed.
        address: where it is reached; it listens on all addresses if this is not the default.
        tls: its certificate. None for a service without TLS.
    """

    def __init__(
        self,
        folder: Path,
        job: str = "default.test",
        *,
        address: str = "127.0.0.1",
        tls: TlsFiles | None = None,
    ) -> None:
        self._tls = tls
        self._address = address
        self.job_id = job
        listens = () if address == "127.0.0.1" else ("--host", "::")
        super().__init__(folder, *listens, *(() if tls is None else tls.options))

    @property
    def url(self) -> str:
        """The base URL."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        return f"{'https' if self._tls is not None else 'http'}://{host}:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """The variables that an agent needs to reach the service."""
        environ = {"ADASCALE_API_URL": self.url, "ADASCALE_TOKEN": TOKEN, "ADASCALE_JOB_ID": self.job_id}
        return environ if self._tls is None else {**environ, "ADASCALE_CA_FILE": str(self._tls.ca)}

    def restart_without_data(self) -> None:
        """Kill the service, remove its database, and start it again."""
        self.kill()
        for path in self.folder.glob("service.db*"):
            path.unlink()
        self.start()

    def allocate(self, generation: int, replicas: int, spares: int = 0) -> None:
        """Set an allocation, as the controller does."""
        self.call("PUT", "/allocation", Allocation(generation, replicas, spares=spares).to_json())

    def job(self) -> dict[str, Any]:
        """Return the stored job."""
        stored: dict[str, Any] = self.call("GET", "")
        return stored

    def call(self, method: str, path: str, body: object = None) -> Any:
        """Send a request for the job, and return the parsed answer."""
        request = urllib.request.Request(
            f"{self.url}/jobs/{self.job_id}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"authorization": f"Bearer {TOKEN}", "content-type": "application/json"},
        )
        context = ssl.create_default_context(cafile=self._tls.ca) if self._tls is not None else None
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return json.loads(answer.read())


BOUNDS = json.dumps({"batch_size": 8, "max_batch_size": 16, "local_bsz_bounds": [4, 8]})
LONG = {"BOUNDS": BOUNDS, "EPOCHS": 10**6, "STEP_SECONDS": 0.02, "ADASCALE_CHECKPOINT_INTERVAL": 0}
"""Options of a job that trains until the test ends it, with a checkpoint on every step."""


class Job:
    """A job of a service, its agents and the journal of its trainers."""

    def __init__(self, folder: Path, service: Service) -> None:
        self.folder = folder
        self.service = service
        self.journal = Journal(folder / "journal")
        self.agents: list[AgentProcess] = []

    def start(self, *ranks: int, **options: object) -> list[AgentProcess]:
        started = [AgentProcess(rank, self.folder, self.service.environ, **options) for rank in ranks]
        self.agents += started
        return started

    def wait_for_training(self, generation: int, replicas: int = 1, steps: int = 2) -> None:
        """Wait until all ranks have trained `steps` steps in a generation, or in a later one."""

        def trained(rank: int) -> bool:
            return any(
                attempt.generation >= generation and len(attempt.steps) >= steps
                for attempt in self.journal.attempts(rank)
            )

        wait_until(
            lambda: all(trained(rank) for rank in range(replicas)) or self.has_failed_agent(),
            f"training in generation {generation}",
        )
        assert not self.has_failed_agent(), self.logs()

    def has_failed_agent(self) -> bool:
        return any(agent.process.poll() not in (None, 0, 75) for agent in self.agents)

    def logs(self) -> str:
        return "\n".join(agent.log.read_text() for agent in self.agents)

    def generation(self) -> int:
        active = self.service.job()["active"]
        return active["generation"] if active else 0

    def state_of(self, index: int) -> str | None:
        states = {each["replica"]: each["state"] for each in self.service.job()["replicas"]}
        return states.get(index)

    def trainer_pid(self, rank: int) -> int:
        return self.journal.attempts(rank)[-1].pid

    def end(self) -> None:
        for agent in self.agents:
            agent.end()

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint."""
        manifests = sorted((self.folder / "checkpoints").glob("*.json"))
        step: int = json.loads(manifests[-1].read_text())["step"]
        return step
