"""A job of a metrics service, with agents and trainers as processes."""

import json
from pathlib import Path
from typing import Any

from support.launch import AgentProcess, Journal, wait_until
from support.service import Service

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
        """Wait until all ranks of a generation have trained `steps` steps in it."""

        def trained(rank: int) -> bool:
            return any(
                attempt.header["generation"] == generation and len(attempt.steps) >= steps
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

    def replica(self, index: int) -> dict[str, Any]:
        replicas = {each["replica"]: each for each in self.service.job()["replicas"]}
        found: dict[str, Any] = replicas[index]
        return found

    def trainer_pid(self, rank: int) -> int:
        return int(self.journal.attempts(rank)[-1].header["pid"])

    def end(self) -> None:
        for agent in self.agents:
            agent.end()

    def saved_step(self) -> int:
        """Return the step of the newest checkpoint."""
        manifests = sorted((self.folder / "checkpoints").glob("*.json"))
        step: int = json.loads(manifests[-1].read_text())["step"]
        return step
