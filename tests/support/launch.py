"""Runs `programs/journal.py` as real processes, and reads its journal."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from support.fast_python import PYTHON

TESTS = Path(__file__).parents[1]
PROGRAMS = TESTS / "support" / "programs"
PROGRAM = PROGRAMS / "journal.py"
TIMEOUT = 180.0
"""Seconds for conditions that hold within a few seconds on a machine that is not loaded."""


def wait_until(
    condition: Callable[[], Any], what: str, patience: float = TIMEOUT, pause: float = 0.01
) -> Any:
    """Return the first true value of `condition`, which is called every `pause` seconds."""
    deadline = time.monotonic() + patience
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {patience:.0f} s"
        time.sleep(pause)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return what `support.records.StepRecords` has written in a folder, without incomplete last lines."""
    return [
        {**json.loads(line), "file": path.name}
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]


@dataclass(frozen=True)
class Attempt:
    """The steps that a process has made as a rank of a generation."""

    replica: int
    pid: int
    generation: int
    steps: list[dict[str, Any]]

    @property
    def begin(self) -> int:
        """The step after which it has begun."""
        return self.last - len(self.steps)

    @property
    def last(self) -> int:
        """Its last step."""
        return int(self.steps[-1]["step"])


class Journal:
    """The records of a job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attempts(self, rank: int | None = 0) -> list[Attempt]:
        """Return the attempts of a rank, or of all ranks, in order."""
        found: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for record in read_records(self.folder):
            if rank in (None, record["rank"]):
                found.setdefault((record["generation"], record["file"]), []).append(record)
        attempts = []
        for (generation, file), steps in sorted(found.items()):
            replica, pid = map(int, file.removesuffix(".jsonl").split("-"))
            attempts.append(Attempt(replica, pid, generation, steps))
        return attempts

    def last_step(self, rank: int = 0) -> int:
        """Return the last step of a rank's last attempt; 0 if there is none."""
        attempts = self.attempts(rank)
        return attempts[-1].last if attempts else 0

    def effective(self) -> dict[int, list[dict[str, Any]]]:
        """Return the records of all ranks by step, without the steps that a restart has undone."""
        counted: dict[int, list[dict[str, Any]]] = {}
        for _, group in groupby(self.attempts(None), lambda attempt: attempt.generation):
            attempts = list(group)
            begin = min(attempt.begin for attempt in attempts)
            counted = {step: records for step, records in counted.items() if step <= begin}
            for record in (record for attempt in attempts for record in attempt.steps):
                counted.setdefault(record["step"], []).append(record)
        return counted

    def weights(self) -> str:
        """Return the digest of the final weights, which is the same on all replicas."""
        (digest,) = {path.read_text() for path in self.folder.glob("weights-*")}
        return digest


def torchrun(replicas: int, python: Sequence[str] = PYTHON) -> list[str]:
    """Return the beginning of a command that starts a program as `torchrun` does, its processes included.

    The rendezvous is the static one: that of `--standalone` takes a second of the processor to log its calls.
    """
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    launcher = [*python, "-m", "torch.distributed.run", *address, f"--nproc-per-node={replicas}"]
    return [*launcher, "--no-python", *python]


def run_program(
    *arguments: object,
    replicas: int = 0,
    timeout: float = 110,
    python: Sequence[str] = PYTHON,
    **environ: object,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program until it ends.

    Args:
        arguments: the program and its arguments.
        replicas: how many processes `torchrun` starts; 0 to start one process without it.
        timeout: in seconds.
        python: the beginning of the command.
        environ: variables beside those of this process.
    """
    return subprocess.run(
        [*(torchrun(replicas, python) if replicas else python), *map(str, arguments)],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(TESTS),
            **{name: str(value) for name, value in environ.items()},
        },
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(*arguments: object, **options: Any) -> str:
    """Run a Python program that must succeed, see `run_program`, and return its output."""
    run = run_program(*arguments, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def has_exited(pid: int) -> bool:
    """Whether a process does not exist, or is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def free_port() -> int:
    """Return a port on which no process listens.

    It is below those that systems give to connections, which may take it before the test uses it.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class AgentProcess:
    """An agent and the trainers that it starts."""

    def __init__(
        self,
        rank: int,
        folder: Path,
        service: Mapping[str, str],
        command: Sequence[str] = (),
        /,
        **options: object,
    ) -> None:
        self.rank = rank
        self.log = folder / f"agent-{rank}-{len(list(folder.glob(f'agent-{rank}-*.log')))}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "adascale_worker.agent", "--", *(command or [*PYTHON, str(PROGRAM)])],
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "ADASCALE_REPLICA": str(rank),
                    "JOURNAL": str(folder / "journal"),
                    "ADASCALE_CHECKPOINT_DIR": str(folder / "checkpoints"),
                    **service,
                    **{name: str(value) for name, value in options.items()},
                },
            )

    def wait(self) -> int:
        """Wait for the agent, and return its exit code."""
        return self.process.wait(TIMEOUT)

    def end(self) -> None:
        """Kill the agent if it runs; its trainer ends with it."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
