"""The metrics service as a process, and a client that shows whole answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self
from uuid import uuid4

import pytest
import urllib3

from adascale_core.messages.registration import Heartbeat, Registration, ReplicaState
from adascale_core.messages.reports import GainReport
from support.fast_python import PYTHON, Program
from support.launch import wait_until as wait_until

TOKEN = "the-token-of-these-tests"
TIMEOUT = 30.0
MEMORY_LIMIT = 512 * 1024
"""KiB: the limit in deploy/base/api.yaml."""

REPORT = GainReport(
    generation=1, step=1, progress=2.0, epoch=0, replicas=2, local_bsz=8, accumulation=1, scale=4.0, gain=2.0,
    grad_sqr=0.5, grad_var=1.5, step_time=0.02, time=1.76e9, loss=0.7, target=20000.0,
)  # fmt: skip


def a_report(step: int = 1, **changed: Any) -> GainReport:
    return replace(REPORT, step=step, **changed)


def a_registration(
    rank: int = 0, replica_state: ReplicaState = ReplicaState.WAITING, **changed: Any
) -> Registration:
    place = rank if changed.get("generation") else None
    registration = Registration(
        *(rank, f"agent-{rank}", replica_state, 0, "127.0.0.1", 40000 + rank), rank=place
    )
    return replace(registration, **changed)


def a_heartbeat(
    rank: int = 0, seconds: Mapping[str, float] = MappingProxyType({}), **changed: Any
) -> Heartbeat:
    return Heartbeat(**vars(a_registration(rank, **changed)), seconds=seconds)


@dataclass(frozen=True)
class Answer:
    """An answer of the service."""

    status: int
    headers: Mapping[str, str]
    body: Any


class Client:
    """Calls the service at a port."""

    def __init__(self, port: int, token: str | None = TOKEN) -> None:
        self.port = port
        self._base = f"http://127.0.0.1:{port}"
        self._token = token
        self._pool = urllib3.PoolManager(retries=False, maxsize=4)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.clear()

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        text: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        chunked: bool = False,
    ) -> Answer:
        """Send a request with a JSON body, or with `text` as the body."""
        default_headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        data = text
        if body is not None:
            data = json.dumps(body).encode()
        if data is not None:
            default_headers["content-type"] = "application/json"
        answer = self._pool.request(
            method,
            self._base + path,
            body=data,
            headers={**default_headers, **(headers or {})},
            timeout=TIMEOUT + 60,
            chunked=chunked,
        )
        is_json = answer.data and "json" in answer.headers.get("content-type", "")
        content = json.loads(answer.data) if is_json else answer.data.decode()
        return Answer(answer.status, answer.headers, content)

    def get(self, path: str) -> Any:
        """Return the body of the answer to a GET."""
        return self._ok(self.call("GET", path))

    def put(self, path: str, body: object) -> Any:
        """Return the body of the answer to a PUT."""
        return self._ok(self.call("PUT", path, body))

    def post_gain(self, job: str, *reports: GainReport) -> Any:
        """Post reports, and return the body of the answer."""
        return self._ok(self.call("POST", f"/jobs/{job}/gain", [report.to_json() for report in reports]))

    def summaries(self) -> dict[str, Any]:
        """Return the summaries of all jobs, by id."""
        return {summary["id"]: summary for summary in self.get("/summaries")["jobs"]}

    def summary(self, job: str, condition: Callable[[Any], Any] = lambda _: True) -> Any:
        """Return the summary of a job once it fulfils a condition."""
        found: list[Any] = []

        def is_there() -> bool:
            found[:] = [summary] if (summary := self.summaries().get(job)) else []
            return bool(found) and bool(condition(found[0]))

        wait_until(is_there, f"the summary of {job}")
        return found[0]

    def register(self, job: str, registration: Registration) -> Any:
        """Register a replica, and return the body of the answer."""
        return self.put(f"/jobs/{job}/replicas/{registration.replica}", registration.to_json())

    @staticmethod
    def _ok(answer: Answer) -> Any:
        assert 200 <= answer.status < 300, answer
        return answer.body


class ServiceProcess:
    """A metrics service with its data in a folder, which outlives it. It is started again on the same port.

    Its process is forked with all imports done, or has an interpreter of its own, so that it can be measured.
    """

    def __init__(
        self,
        folder: Path,
        *options: str,
        environ: Mapping[str, str] | None = None,
        port_file: Path | None = None,
        pass_fds: Sequence[int] = (),
        url: str | None = None,
        runs: Path | None = None,
        own_interpreter: bool = False,
    ) -> None:
        self.folder = folder
        data = ("--database", url or f"sqlite:///{folder / 'service.db'}")
        if runs is not None:
            data = ("--runs", str(runs))
        self._port_file = port_file or folder / f"port-{uuid4().hex}"
        self._log = folder / "service.log"
        self._options = ("--port-file", str(self._port_file), *data, *options)
        self._environ = environment(**({"ADASCALE_TOKEN": TOKEN} if environ is None else environ))
        self._pass_fds = pass_fds
        self._own_interpreter = own_interpreter
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start the process, and wait for its port."""
        arguments = ["-m", "adascale_api", "--port", str(self.port), *self._options]
        self._process: Program | subprocess.Popen[bytes]
        if self._own_interpreter:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, *arguments],
                    env=self._environ,
                    stdout=log,
                    stderr=log,
                    pass_fds=self._pass_fds,
                )
        else:
            self._process = Program(arguments, self._environ, self._log, self._pass_fds)
        try:
            wait_until(lambda: self.code is not None or self._has_port(), "the start")
            assert self.code is None, self.log()
        except AssertionError:
            self.kill()
            raise
        self.port = int(self._port_file.read_text())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None, self.log()
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None until it has exited."""
        return self._process.code if isinstance(self._process, Program) else self._process.poll()

    def send_signal(self, number: int) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Send a signal, wait for its end, and return its exit code."""
        self.send_signal(number)
        wait_until(lambda: self.code is not None, "the end")
        if isinstance(self._process, Program):
            self._process.close()
        self._port_file.unlink(missing_ok=True)
        return self.code

    def kill(self) -> None:
        self.stop(signal.SIGKILL)

    def _has_port(self) -> bool:
        # Tests write "1" as the port of an earlier service.
        return self._port_file.exists() and self._port_file.read_text() != "1\n"

    def peak_memory(self) -> int:
        """Return the maximum of its resident memory so far, in KiB."""
        status = Path(f"/proc/{self.pid}/status")
        if not status.exists():
            pytest.skip("needs /proc")
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1])

    def log(self) -> str:
        """Return its output."""
        return self._log.read_text()


def run_service(*options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a service that is expected to exit by itself."""
    return subprocess.run(
        [*PYTHON, "-m", "adascale_api", *options],
        env=environment(**environ),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def environment(**changed: str) -> dict[str, str]:
    """Return the environment of the tests without the variables that configure a service."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ADASCALE_")}
    return {**inherited, **changed}
