"""Communication of the program itself, and frameworks in it, under real agents and without."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from adascale_core.failures import EXIT_INVALID_PROGRAM
from adascale_core.names import LAUNCHER_VARIABLES
from support.fast_python import PYTHON
from support.launch import PROGRAM, AgentProcess, run_python, torchrun, wait_until
from support.service import Service

COMMUNICATES = PROGRAM.with_name("communicates.py")


def records(folder: Path, replica: int) -> list[dict[str, Any]]:
    """Return what the program has recorded on a replica."""
    path = folder / "journal" / f"{replica}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def require_right(found: list[dict[str, Any]], rank: int, *, metrics: bool = False) -> None:
    """Check what all replicas together have computed in each step."""
    for record in found:
        replicas, indices = record["replicas"], record["indices"]
        assert record["ranks"] == [rank] * 3, record
        assert record["sizes"] == [replicas] * 2, record
        assert record["total"] == sum(indices), record
        mean = pytest.approx(sum(indices) / len(indices)) if metrics else None
        assert record["mean"] == mean, record
        assert len(set(indices)) == len(indices) >= replicas, record
        assert record["framework"] == ["DistributedType.NO", 1], record


@pytest.mark.parametrize("metrics", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_program_communicates_on_1_and_2_and_1_replicas_under_agents(
    tmp_path: Path, service: Service, *, metrics: bool
) -> None:
    """Frameworks that look for a launcher find none: neither that of the agent, nor one around it."""
    finish = tmp_path / "finish"
    options = dict.fromkeys(LAUNCHER_VARIABLES, "2") | {
        "FINISH_FILE": str(finish),
        "METRICS": str(int(metrics)),
    }
    command = [*PYTHON, str(COMMUNICATES)]
    service.allocate(1, 1)
    agents = [AgentProcess(0, tmp_path, service.environ, command, **options)]

    def wait_for(replicas: int, replica: int, count: int = 3) -> None:
        def has_steps() -> bool:
            assert all(agent.process.poll() in (None, 75) for agent in agents), "\n".join(
                agent.log.read_text() for agent in agents
            )
            return [each["replicas"] for each in records(tmp_path, replica)][-count:] == [replicas] * count

        wait_until(has_steps, f"steps on {replicas} replicas")

    try:
        wait_for(1, 0)
        service.allocate(2, 2)
        agents.append(AgentProcess(1, tmp_path, service.environ, command, **options))
        wait_for(2, 0)
        wait_for(2, 1)
        service.allocate(3, 1)
        wait_for(1, 0)
        agents[1].process.terminate()
        assert agents[1].wait() == 75
        finish.touch()
        assert agents[0].wait() == 0, agents[0].log.read_text()
    finally:
        for agent in agents:
            agent.end()
    for replica in (0, 1):
        require_right(records(tmp_path, replica), replica, metrics=metrics)
    refusals = [each["refusal"] for each in records(tmp_path, 0) if each["refusal"]]
    assert len(refusals) == 2
    assert all("when trainer.generation has changed" in each for each in refusals)


def test_a_program_communicates_without_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    output = run_python(COMMUNICATES, JOURNAL=tmp_path / "journal", STEPS=5)
    found = records(tmp_path, 0)
    require_right(found, 0)
    assert len(found) == 5, output


def launched(tmp_path: Path, service: Service, *command: str, **options: object) -> tuple[int, str]:
    """Run the command of a job under an agent, and return its exit code and its output."""
    service.allocate(1, 1)
    agent = AgentProcess(0, tmp_path, service.environ, command, EPOCHS=2, **options)
    try:
        return agent.wait(), agent.log.read_text()
    finally:
        agent.end()


STARTS = PROGRAM.with_name("starts.py")
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=1"),
    *("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--cpu"),
]


def test_a_trainer_may_be_started_by_a_program_that_closes_descriptors(
    tmp_path: Path, service: Service
) -> None:
    code, log = launched(tmp_path, service, sys.executable, str(STARTS), "1", *PYTHON, str(PROGRAM))
    assert code == 0, log
    assert service.job()["complete"]


@pytest.mark.parametrize(
    "launcher", ["torchrun", pytest.param("accelerate", marks=[pytest.mark.slow, pytest.mark.release])]
)
def test_a_trainer_may_be_started_by_another_launcher(
    tmp_path: Path, service: Service, launcher: str
) -> None:
    """With the variables of torchrun, the framework initializes the default process group."""
    finish = tmp_path / "finish"
    finish.touch()
    command = {"torchrun": torchrun(1), "accelerate": ACCELERATE}[launcher]
    code, log = launched(tmp_path, service, *command, str(COMMUNICATES), FINISH_FILE=finish)
    assert code == 0, log
    assert service.job()["complete"]
    assert records(tmp_path, 0)[-1]["ranks"] == [0, 0, 0]


@pytest.mark.parametrize("launcher", ["a wrapper", "torchrun"])
def test_several_processes_of_one_replica_are_refused(
    tmp_path: Path, service: Service, launcher: str
) -> None:
    command = {"a wrapper": [sys.executable, str(STARTS), "2", *PYTHON], "torchrun": torchrun(2)}[launcher]
    code, log = launched(tmp_path, service, *command, str(PROGRAM))
    assert code == EXIT_INVALID_PROGRAM, log
    found = "has started a trainer already" if launcher == "a wrapper" else "starts 2 processes"
    assert re.search(rf"adascale: the command of the job {found}.* let the command start one", log), log
