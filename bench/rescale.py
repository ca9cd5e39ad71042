"""Measures the pause of training when the number of replicas changes, compared with a restart by torchrun.

    .venv/bin/python bench/rescale.py [--rounds 3]

The same program, a small network on random data with a checkpoint of a few kilobytes, runs through the same
replica counts in two ways: with agents, as `adascale run` and the operator do it, and with torchrun, which
is terminated (SIGTERM, so that the program saves) and started again with the next count. The output has, for
each change, the seconds from the last step before it to the first step after it, and for agents also the
seconds from the decision to that step.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import urllib3

COUNTS = [1, 2, 4, 2, 1]
PROGRAM = Path(__file__).parent / "rescale_program.py"
TIMEOUT = 120.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    still: dict[str, dict[tuple[int, int], list[float]]] = {"agents": {}, "torchrun": {}}
    decided: dict[tuple[int, int], list[float]] = {}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            for change, (standstill, since_decision) in by_agents(Path(folder)):
                still["agents"].setdefault(change, []).append(standstill)
                decided.setdefault(change, []).append(since_decision)
        with tempfile.TemporaryDirectory() as folder:
            for change, standstill in by_torchrun(Path(folder)):
                still["torchrun"].setdefault(change, []).append(standstill)
    print(f"\nmedian of {rounds} rounds, seconds")
    print("change    with agents     by torchrun    ratio    decision to first step")
    for change, seconds in still["agents"].items():
        ours, theirs = median(seconds), median(still["torchrun"][change])
        print(
            f"{change[0]} -> {change[1]}    {ours:12.2f}    {theirs:11.2f}    {ours / theirs:5.2f}"
            f"    {median(decided[change]):22.2f}"
        )


class Steps:
    """The step times that rank 0 has recorded."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "steps"

    def read(self) -> list[tuple[int, float]]:
        """Return (replicas, seconds since 1970) of each step."""
        if not self._file.exists():
            return []
        lines = self._file.read_text().splitlines(keepends=True)
        return [(int(k), float(t)) for k, t in (line.split() for line in lines if line.endswith("\n"))]

    def wait_for(self, replicas: int, steps: int = 50) -> None:
        """Wait until the last `steps` steps were made on `replicas` replicas."""
        wait_until(lambda: [k for k, _ in self.read()[-steps:]] == [replicas] * steps, f"{replicas} replicas")

    def standstills(self) -> list[tuple[tuple[int, int], float, float]]:
        """Return (from, to), the seconds between last and first step, and the time of the first step."""
        steps = self.read()
        return [
            ((k, later_k), later - time, later)
            for (k, time), (later_k, later) in pairwise(steps)
            if k != later_k
        ]


def by_agents(folder: Path) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    """Change the replicas with agents; yield each change with its seconds."""
    steps = Steps(folder)
    decisions = []
    with service(folder) as (environ, allocate):
        agents: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for generation, count in enumerate(COUNTS, start=1):
                decisions.append(time.time())
                allocate(generation, count)
                for rank in range(count):
                    if rank not in agents:
                        agents[rank] = start(
                            [
                                sys.executable,
                                "-m",
                                "adascale_worker.agent",
                                "--",
                                sys.executable,
                                str(PROGRAM),
                            ],
                            folder,
                            {**environ, "ADASCALE_REPLICA": str(rank)},
                        )
                steps.wait_for(count)
                for rank in [rank for rank in agents if rank >= count]:
                    agents.pop(rank).terminate()
        finally:
            for agent in agents.values():
                agent.kill()
                agent.wait()
    for (change, seconds, at), decision in zip(steps.standstills(), decisions[1:], strict=True):
        yield change, (seconds, at - decision)


def by_torchrun(folder: Path) -> Iterator[tuple[tuple[int, int], float]]:
    """Change the replicas by restarting torchrun; yield each change with its seconds."""
    steps = Steps(folder)
    for count in COUNTS:
        run = start(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(count), str(PROGRAM)),
            ],
            folder,
            {},
        )
        steps.wait_for(count)
        run.terminate()
        run.wait(TIMEOUT)
    for change, seconds, _ in steps.standstills():
        yield change, seconds


def start(command: list[str], folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process that writes its output into the folder."""
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "BENCH_FOLDER": str(folder),
                "ADASCALE_CHECKPOINT_DIR": str(folder / "checkpoints"),
                "ADASCALE_CHECKPOINT_INTERVAL": "1000",
                **environ,
            },
        )


@contextmanager
def service(folder: Path) -> Iterator[tuple[dict[str, str], Callable[[int, int], None]]]:
    """Run a metrics service; yield the environment for agents, and a function that writes allocations."""
    token = secrets.token_hex(16)
    port_file = folder / "port"
    process = start(
        [
            *(sys.executable, "-m", "adascale_api", "--port", "0", "--port-file", str(port_file)),
            *("--database", f"sqlite:///{folder / 'api.sqlite'}"),
        ],
        folder,
        {"ADASCALE_TOKEN": token},
    )
    try:
        wait_until(port_file.exists, "the service")
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        pool = urllib3.PoolManager()

        def allocate(generation: int, replicas: int) -> None:
            answer = pool.request(
                "PUT",
                f"{url}/jobs/bench/allocation",
                body=json.dumps({"generation": generation, "replicas": replicas}),
                headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
            )
            assert answer.status < 300, answer.data

        yield {"ADASCALE_API_URL": url, "ADASCALE_TOKEN": token, "ADASCALE_JOB_ID": "bench"}, allocate
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition, for at most `TIMEOUT` seconds."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if time.monotonic() > deadline:
            sys.exit(f"{what} did not appear within {TIMEOUT:.0f} s; see the log in the folder")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
