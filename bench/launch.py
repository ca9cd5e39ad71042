"""Starts the processes of benchmarks: metrics service, agents, programs, lighthouse of torchft."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import urllib3

from adascale_core.messages.job_spec import JobSpec
from adascale_worker.agent.trainer_process import DEFAULTS

TIMEOUT = 300.0
"""Seconds that `wait_until` waits."""

T = TypeVar("T")

Spec = Callable[[int], dict[str, Any]]
"""The number of replicas -> the declaration of the job."""


class EndedError(Exception):
    """A process has ended before the measurement."""


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
                **DEFAULTS,
                "ADASCALE_CHECKPOINT_DIR": str(folder / "checkpoints"),
                "ADASCALE_CHECKPOINT_INTERVAL": "1000",
                **environ,
            },
        )


def settings(spec: dict[str, Any]) -> dict[str, str]:
    """Return the environment that a declaration gives to a program."""
    return {name: value for name, value in JobSpec.from_json(spec).environment().items() if value}


@contextmanager
def service(folder: Path, spec: Spec) -> Iterator[tuple[dict[str, str], Callable[..., None]]]:
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
        wait_until(lambda: port_file.exists() or process.poll() is not None, "the service")
        if process.poll() is not None:
            raise EndedError(f"the metrics service has ended with exit code {process.returncode}")
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        pool = urllib3.PoolManager()

        def put(path: str, body: dict[str, Any]) -> dict[str, Any]:
            answer = pool.request(
                "PUT",
                f"{url}/jobs/bench{path}",
                body=json.dumps(body),
                headers={"authorization": f"Bearer {token}", "content-type": "application/json"},
            )
            if answer.status >= 300:
                sys.exit(f"the metrics service refused {body}: {answer.data.decode()}")
            parsed: dict[str, Any] = answer.json()
            return parsed

        def allocate(generation: int, replicas: int, *, spares: int = 0) -> None:
            # A loss has raised the generation.
            present = put("", spec(replicas))["desired"]
            put(
                "/allocation",
                {
                    "generation": max(generation, (present or {}).get("generation", 0) + 1),
                    "replicas": replicas,
                    "spares": spares,
                },
            )

        yield {"ADASCALE_API_URL": url, "ADASCALE_TOKEN": token, "ADASCALE_JOB_ID": "bench"}, allocate
    finally:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()


def wait_until(condition: Callable[[], T], what: str) -> T:
    """Return the first true value of a condition, waiting at most `TIMEOUT` seconds for it."""
    deadline = time.monotonic() + TIMEOUT
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {TIMEOUT:.0f} s")
        time.sleep(0.05)
    return value


def start_lighthouse(
    folder: Path, python: Path, heartbeat_ms: int = 5000, join_ms: int = 100
) -> tuple[subprocess.Popen[bytes], str]:
    """Start torchft's lighthouse, with the Python of its environment; return it and its address.

    Args:
        folder: of the output.
        python: of an environment with torchft.
        heartbeat_ms: milliseconds without a heartbeat after which a replica group is lost.
        join_ms: milliseconds that it waits for replica groups that send heartbeats and no request.
    """
    port = free_port()
    command = [
        *(str(python.parent / "torchft_lighthouse"), "--min_replicas", "1"),
        *("--join_timeout_ms", str(join_ms), "--heartbeat_timeout_ms", str(heartbeat_ms)),
        *("--bind", f"127.0.0.1:{port}"),
    ]
    return start(command, folder, {}), f"http://127.0.0.1:{port}"


def free_port() -> int:
    """Return a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
