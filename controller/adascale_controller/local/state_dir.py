"""The folder that holds all state of a job on this machine, and the lock that one run holds on it.

The lock is a `flock` on a descriptor that every process of a run inherits: it is free only once the last
of them has gone, however the run itself ended. So a run can't begin on state that others still save.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adascale_core.checkpoint_manifest import checkpoint_number
from adascale_core.errors import AdaScaleError

DEFAULT_ROOT = Path(".adascale")
TIMEOUT = 40.0
"""Seconds to wait for the processes of a run that is gone; an agent gives its trainer 25 to save."""


class StateDirError(AdaScaleError):
    """A state folder that this run can't use."""

    exit_code = 2


@dataclass(frozen=True)
class StateDir:
    """Where everything of a job is on this machine.

    Args:
        path: the folder.
    """

    path: Path

    @property
    def database(self) -> Path:
        """The metrics service's database."""
        return self.path / "api.sqlite"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints, where the job names no other."""
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        """What the processes write."""
        return self.path / "logs"

    @property
    def service_log(self) -> Path:
        """What the metrics service writes."""
        return self.logs / "api.log"

    @property
    def port_file(self) -> Path:
        """Where the metrics service tells its port."""
        return self.path / "api.port"

    @property
    def service_file(self) -> Path:
        """Where the service is found while the job runs."""
        return self.path / "service.json"

    @property
    def runs_file(self) -> Path:
        """A line of JSON for each run: of which job, from when."""
        return self.path / "runs.jsonl"

    @property
    def lock_file(self) -> Path:
        """Locked by the processes of a run."""
        return self.path / "lock"

    def replica_log(self, rank: int) -> Path:
        """What the replica of `rank` writes."""
        return self.logs / f"replica-{rank}.log"

    def create(self) -> None:
        """Make the folder, and keep it out of a git repository around it.

        Raises:
            StateDirError: it can't be made.
        """
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            ignore = self.path / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
        except OSError as error:
            raise StateDirError(
                f"the state folder {self.path} can't be made: {error.strerror}; give another with --state-dir"
            ) from None

    def forget(self, checkpoints: Path) -> None:
        """Drop what former runs have saved, and nothing that isn't ours."""
        for database in self.path.glob("api.sqlite*"):
            database.unlink()
        for log in self.logs.glob("*.log"):
            log.unlink()
        if checkpoints.is_dir():
            for file in checkpoints.iterdir():
                if checkpoint_number(file.name) is not None:
                    file.unlink()
        self.runs_file.unlink(missing_ok=True)

    def begin_run(self, job_id: str, now: float) -> list[float]:
        """Note that a run begins; the times at which runs of this job began, this one last.

        Raises:
            StateDirError: the folder is another job's.
        """
        runs = _read_lines(self.runs_file)
        other = next((run["job"] for run in runs if run["job"] != job_id), None)
        if other is not None:
            raise StateDirError(
                f"{self.path} holds the state of job {other}, not of {job_id}: give another with --state-dir"
            )
        with self.runs_file.open("a") as file:
            # On a line of its own, even where a crash has cut off the last one.
            file.write("\n" + json.dumps({"job": job_id, "began": now}))
        return [*(run["began"] for run in runs), now]

    def announce(self, url: str, job_id: str) -> None:
        """Tell where the service is, for as long as it is there."""
        draft = self.service_file.with_suffix(".draft")
        draft.write_text(json.dumps({"url": url, "pid": os.getpid(), "job": job_id}) + "\n")
        draft.replace(self.service_file)

    def withdraw(self) -> None:
        """Take back `announce`."""
        self.service_file.unlink(missing_ok=True)
        self.port_file.unlink(missing_ok=True)


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines: the last one may have been cut off by a crash."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


class Lock:
    """The right to run in a state folder, held while this object's descriptor or an inherited one is open.

    Args:
        folder: the state folder.
        tell: takes a sentence for the user.
        stop: whether to give up waiting.

    Raises:
        StateDirError: another run holds it, or processes of a former one don't leave.
    """

    def __init__(
        self, folder: StateDir, tell: Callable[[str], None], stop: Callable[[], bool] = lambda: False
    ) -> None:
        try:
            self.descriptor = os.open(folder.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StateDirError(f"{folder.lock_file} can't be opened: {error.strerror}") from None
        try:
            self._acquire(folder, tell, stop)
        except BaseException:
            os.close(self.descriptor)
            raise
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(_identity(os.getpid())).encode(), 0)

    def release(self) -> None:
        """Give it up; processes that inherited it still hold it."""
        os.close(self.descriptor)

    def _acquire(self, folder: StateDir, tell: Callable[[str], None], stop: Callable[[], bool]) -> None:
        give_up = time.monotonic() + TIMEOUT
        told = False
        while not self._try():
            holder = self._holder()
            if holder is not None:
                raise StateDirError(
                    f"{folder.path} is in use by another run (process {holder}): "
                    "wait for it, stop it with Ctrl-C, or give another folder with --state-dir"
                )
            if stop():
                raise StateDirError(f"{folder.path} is still in use by {_users(folder.lock_file)}")
            if time.monotonic() > give_up:
                raise StateDirError(
                    f"{folder.path} is still in use by {_users(folder.lock_file)} of a run that is gone: "
                    "end what is left of it"
                )
            if not told:
                told = True
                tell("The run before this one was killed; waiting for its processes to save and leave")
            time.sleep(0.1)

    def _try(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _holder(self) -> int | None:
        """The run that took the lock, if it still runs."""
        try:
            told = json.loads(os.pread(self.descriptor, 4096, 0))
            return int(told["pid"]) if _identity(told["pid"]) == told else None
        except (ValueError, KeyError, TypeError):
            # Just taken, and not signed yet.
            return None


def _identity(pid: int) -> dict[str, Any]:
    """What tells a process from a later one of the same number."""
    return {"pid": pid, "started": _started(pid)}


def _started(pid: int) -> str | None:
    """When a process started, in ticks since the machine did; none if it is gone."""
    try:
        # Fields 3 and 22 of proc(5), counted from after the name, which is in brackets and may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            return "unknown"
        return "unknown"


def _users(file: Path) -> str:
    """The processes that have `file` open, in words."""
    target = str(file.resolve())
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) == target for fd in (entry / "fd").iterdir()):
                pids.append(entry.name)
        except OSError:
            continue
    others = sorted(set(pids) - {str(os.getpid())}, key=int)
    if not others:
        return "other processes"
    return f"process{'es' if len(others) > 1 else ''} {', '.join(others)}"
