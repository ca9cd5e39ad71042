"""`adascale run` with replicas of several processes, as real processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from e2e.local_run import adascale_in_process, running, write_job
from support.fast_python import PYTHON
from support.launch import PROGRAMS, wait_until
from support.members import Members

PROGRAM = PROGRAMS / "sharded_members.py"


@pytest.mark.slow
def test_a_run_loses_no_step_if_one_of_the_processes_of_a_replica_is_killed(tmp_path: Path) -> None:
    journal = Members(tmp_path)
    env = {"JOURNAL": str(tmp_path / "journal"), "EPOCHS": "25", "STEP_SECONDS": "0.05"}
    job = write_job(
        tmp_path / "job.yaml",
        [*PYTHON, str(PROGRAM)],
        env,
        batchSize=12,
        minReplicas=2,
        maxReplicas=2,
        processesPerReplica=2,
    )

    def records(first_generation: int, process: int) -> list[dict[str, Any]]:
        assert run.process.poll() is None, run.output
        found = [record for record in journal.records() if record["generation"] >= first_generation]
        return [record for record in found if record["replicas"] == 2 and record["process"] == process]

    def kill(process: int, first_generation: int) -> int:
        """Kill this process of a replica, and return the number of the generation after that."""
        wait_until(lambda: len(records(first_generation, process)) > 5, "steps of two replicas")
        last = max(
            records(first_generation, process),
            key=lambda record: (record["generation"], record["rank"], record["step"]),
        )
        os.kill(int(last["file"].removesuffix(".jsonl").split("-")[1]), signal.SIGKILL)
        return int(last["generation"]) + 1

    with running(job, tmp_path / "state", "--replicas", 2) as run:
        after = kill(0, first_generation=1)
        last = kill(1, first_generation=after)
        wait_until(lambda: records(last, 1), "the replacement has joined")
        assert run.wait_for_exit(120) == 0, run.output
        assert run.processes() == []
    assert journal.require_complete_stream() == 100
    weights = tmp_path / "weights.safetensors"
    exported = adascale_in_process("export", "test", weights, "--state-dir", tmp_path / "state")
    assert exported.returncode == 0, exported.stderr
    assert load_file(weights)["0.weight"].shape == (15, 6)
