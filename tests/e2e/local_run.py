"""Runs `adascale run` as a real process, which a test observes and may kill."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest import mock

import urllib3
import yaml

from adascale_controller.cli import main
from support.fast_python import PYTHON
from support.launch import wait_until

ROOT = Path(__file__).parents[2]
LIGHT = Path(__file__).parent / "programs" / "light.py"
PACED = Path(__file__).parent / "programs" / "paced.py"
TIMEOUT = 150.0

T = TypeVar("T")


def write_job(
    path: Path, command: Sequence[str], env: dict[str, str] | None = None, name: str = "test", **spec: Any
) -> Path:
    """Write an AdaScaleJob that runs `command`, with more fields of its spec."""
    container = {
        "name": "worker",
        "command": list(command),
        "env": [{"name": name, "value": value} for name, value in (env or {}).items()],
    }
    document = {
        "apiVersion": "adascale.dev/v1alpha1",
        "kind": "AdaScaleJob",
        "metadata": {"name": name},
        "spec": {"batchSize": 4, "maxReplicas": 1, **spec, "template": {"spec": {"containers": [container]}}},
    }
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def write_light_job(path: Path, *arguments: str, **spec: Any) -> Path:
    """Write a job of `programs/light.py`."""
    return write_job(path, ["python", str(LIGHT), *arguments], **spec)


def write_paced_job(
    path: Path,
    pace: float,
    command: Sequence[str] | None = None,
    env: dict[str, str] | None = None,
    **spec: Any,
) -> Path:
    """Write an elastic job of `programs/paced.py`, whose micro-batches take `pace` seconds."""
    bounds = {"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": 32}}
    command = [*PYTHON, str(PACED)] if command is None else command
    env = {"PACE": str(pace), **(env or {})}
    return write_job(path, command, env, **{**bounds, "scaleInvariantSteps": 100_000, **spec})


def adascale(
    *arguments: object, timeout: float = TIMEOUT, cwd: Path | str = ROOT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a process in a folder, until it exits."""
    # A library that is to be loaded first needs a process of its own.
    python = [sys.executable] if "LD_PRELOAD" in environ else PYTHON
    return subprocess.run(
        [*python, "-m", "adascale_controller", *map(str, arguments)],
        cwd=cwd,
        env=_environ(**environ),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def adascale_in_process(
    *arguments: object, entry: Callable[[], NoReturn] = main, cwd: Path | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line in this process, which saves the time of starting another."""
    command = ["adascale", *map(str, arguments)]
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.dict(os.environ, _environ(**environ), clear=True),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        chdir(cwd or ROOT),
    ):
        try:
            entry()
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else 0
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())


def _environ(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", **more}


class Run:
    """A process of `adascale run`.

    Args:
        job: the job file.
        state: the state folder.
        options: of the command.
        port: its `--port`; None to leave the option out.
    """

    def __init__(self, job: Path, state: Path, *options: object, port: int | None = 0) -> None:
        self.state = state
        self._log = state.with_name(f"{state.name}.{os.urandom(3).hex()}.out")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "adascale_controller", "run", str(job)),
                    *("--state-dir", str(state), *map(str, options)),
                    *(() if port is None else ("--port", str(port))),
                ],
                cwd=ROOT,
                env=_environ(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """Its output so far."""
        return self._log.read_text()

    def wait_for_output(self, text: str, timeout: float = TIMEOUT) -> None:
        """Wait until its output contains `text`."""
        self._wait(lambda: text in self.output, f"the output {text!r}", timeout)

    def wait_for_exit(self, timeout: float = TIMEOUT) -> int:
        """Wait for its exit and return its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not exit:\n{self.output}{self._logs()}") from None

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait_for_step(self, step: int = 1) -> None:
        """Wait until the job has reported `step` or a later step."""
        self._wait(lambda: (self.job().get("latest") or {}).get("step", 0) >= step, f"step {step}")

    def wait_for_trainer(self, rank: int = 0) -> int:
        """Wait until the trainer of a rank runs in a generation, and return its process id."""

        def running_trainer() -> int | None:
            states = {replica["replica"]: replica["state"] for replica in self.job().get("replicas", ())}
            return self._find("trainer", rank) if states.get(rank) == "running" else None

        return self._wait(running_trainer, f"running replica {rank}")

    def job(self) -> dict[str, Any]:
        """The metrics service's view of the job; empty if there is none."""
        try:
            service = json.loads((self.state / "service.json").read_text())
            url = f"{service['url']}/jobs/{service['job']}"
            answer = urllib3.request("GET", url, retries=False, timeout=5)
            return answer.json() if answer.status == 200 else {}
        except (OSError, ValueError, urllib3.exceptions.HTTPError):
            return {}

    def pid(self, kind: str, rank: int = 0) -> int:
        """The process id of its `service`, or of the `agent` or the `trainer` of a rank."""
        return self._wait(lambda: self._find(kind, rank), f"the {kind} of rank {rank}")

    def processes(self) -> list[int]:
        """The process ids of all its children."""
        return [pid for pid, _, _ in self._children()]

    def kill(self) -> None:
        """Kill it and all its children."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _wait(self, condition: Callable[[], T | None], what: str, timeout: float = TIMEOUT) -> T:
        def checked() -> T | None:
            value = condition()
            if not value and self.process.poll() is not None:
                raise AssertionError(f"it exited before {what}:\n{self.output}{self._logs()}")
            return value

        try:
            value: T = wait_until(checked, what, timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}{self._logs()}") from None
        return value

    def _logs(self) -> str:
        return "".join(f"\n== {log.name}\n{log.read_text()}" for log in sorted(self.state.glob("logs/*")))

    def _find(self, kind: str, rank: int) -> int | None:
        for pid, command, environ in self._children():
            is_agent = "adascale_worker.agent" in command
            if kind == "service" and "adascale_api" in command:
                return pid
            if f"ADASCALE_REPLICA={rank}" in environ and (kind == "agent") == is_agent:
                return pid
        return None

    def _children(self) -> Iterator[tuple[int, str, list[str]]]:
        """Each child process: its id, command line and environment."""
        ours = {f"ADASCALE_CHECKPOINT_DIR={self.state}/checkpoints"}
        with suppress(OSError, ValueError):
            url = json.loads((self.state / "service.json").read_text())["url"]
            ours.add(f"ADASCALE_API_URL={url}")
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text().replace("\0", " ")
                environ = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
            if ours.intersection(environ) or f"{self.state}/api.sqlite" in command:
                yield int(entry.name), command, environ


@contextmanager
def running(job: Path, state: Path, *options: object, port: int | None = 0) -> Iterator[Run]:
    """Run `adascale run`, and kill it with all its children at the end."""
    run = Run(job, state, *options, port=port)
    try:
        yield run
    finally:
        run.kill()
