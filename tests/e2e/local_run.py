"""`adascale run` as a real process, watched, and killed where a test wants that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import urllib3
import yaml

from support.launch import wait_until

ROOT = Path(__file__).parents[2]
LIGHT = Path(__file__).parent / "programs" / "light.py"
PACED = Path(__file__).parent / "programs" / "paced.py"
TIMEOUT = 60.0


def write_job(
    path: Path, command: Sequence[str], env: dict[str, str] | None = None, name: str = "test", **spec: Any
) -> Path:
    """An AdaScaleJob that runs `command`, with fields of its spec."""
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
    """A job of `programs/light.py`."""
    return write_job(path, ["python", str(LIGHT), *arguments], **spec)


def write_paced_job(path: Path, pace: float, fail: Path | None = None, **spec: Any) -> Path:
    """A job of `programs/paced.py`, elastic, whose micro-batches take `pace` seconds."""
    env = {"PACE": str(pace)} | ({"FAIL": str(fail)} if fail else {})
    bounds = {"maxBatchSize": 64, "localBszBounds": {"lower": 4, "upper": 32}}
    return write_job(path, ["python", str(PACED)], env, **{**bounds, "scaleInvariantSteps": 100_000, **spec})


def adascale(
    *arguments: object, timeout: float = TIMEOUT, **environ: str
) -> subprocess.CompletedProcess[str]:
    """The command line, run to its end."""
    return subprocess.run(
        [sys.executable, "-m", "adascale_controller", *map(str, arguments)],
        cwd=ROOT,
        env=_environ(**environ),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _environ(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "100", **more}


class Run:
    """An `adascale run` under way.

    Args:
        job: the job file.
        state: the state folder.
        options: of the command.
    """

    def __init__(self, job: Path, state: Path, *options: object) -> None:
        self.state = state
        self._log = state.with_name(f"{state.name}.{os.urandom(3).hex()}.out")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "adascale_controller", "run", str(job)),
                    *("--state-dir", str(state), "--port", "0", *map(str, options)),
                ],
                cwd=ROOT,
                env=_environ(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """All that it has written so far."""
        return self._log.read_text()

    def says(self, text: str, patience: float = TIMEOUT) -> None:
        """Wait until it has written `text`."""
        self._wait(lambda: text in self.output, f"saying {text!r}", patience)

    def ends(self, patience: float = TIMEOUT) -> int:
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.output}{self._logs()}") from None

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def trains(self, step: int = 1) -> None:
        """Wait until the job is at `step` or beyond."""
        self._wait(lambda: (self.job().get("latest") or {}).get("step", 0) >= step, f"step {step}", TIMEOUT)

    def runs(self, rank: int = 0) -> int:
        """Wait until the trainer of a rank runs in a generation; its process."""

        def running() -> int | None:
            states = {one["rank"]: one["state"] for one in self.job().get("replicas", ())}
            return self._find("trainer", rank) if states.get(rank) == "running" else None

        return int(self._wait(running, f"running replica {rank}", TIMEOUT))

    def job(self) -> dict[str, Any]:
        """What the service knows of the job; nothing while there is none."""
        announced = self.state / "service.json"
        try:
            told = json.loads(announced.read_text())
            answer = urllib3.request("GET", f"{told['url']}/jobs/{told['job']}", retries=False, timeout=5)
            return answer.json() if answer.status == 200 else {}
        except (OSError, ValueError, urllib3.exceptions.HTTPError):
            return {}

    def pid(self, kind: str, rank: int = 0) -> int:
        """A process of it: its `service`, or the `agent` or the `trainer` of a rank."""
        return int(self._wait(lambda: self._find(kind, rank), f"the {kind} of rank {rank}", TIMEOUT))

    def processes(self) -> list[int]:
        """All its processes but itself."""
        return [pid for pid, _, _ in self._all()]

    def kill(self) -> None:
        """End it, however it stands."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _wait(self, condition: Any, what: str, patience: float) -> Any:
        def happened() -> Any:
            value = condition()
            if not value and self.process.poll() is not None:
                raise AssertionError(f"it ended before {what}:\n{self.output}{self._logs()}")
            return value

        try:
            return wait_until(happened, what, patience)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output}{self._logs()}") from None

    def _logs(self) -> str:
        return "".join(f"\n== {log.name}\n{log.read_text()}" for log in sorted(self.state.glob("logs/*")))

    def _find(self, kind: str, rank: int) -> int | None:
        for pid, command, environ in self._all():
            agent = "adascale_worker.agent" in command
            if kind == "service" and "adascale_api" in command:
                return pid
            if f"ADASCALE_REPLICA={rank}" not in environ:
                continue
            if (kind == "agent") == agent:
                return pid
        return None

    def _all(self) -> Iterator[tuple[int, str, list[str]]]:
        """Each process: its number, its command line, its environment."""
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_text().replace("\0", " ")
                environ = (entry / "environ").read_text(errors="replace").split("\0")
            except OSError:
                continue
            ours = f"ADASCALE_CHECKPOINT_DIR={self.state}/checkpoints" in environ
            if ours or f"{self.state}/api.sqlite" in command:
                yield int(entry.name), command, environ


@contextmanager
def running(job: Path, state: Path, *options: object) -> Iterator[Run]:
    """An `adascale run` that is ended at the end, with all it has started."""
    run = Run(job, state, *options)
    try:
        yield run
    finally:
        run.kill()
