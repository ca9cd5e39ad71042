"""The folder with the state of a job on this machine, its checkpoints, and its lock, which one run holds.

The lock is a `flock` on a descriptor that all processes of the run inherit, so it is free only when the last
of them has exited, also if the run itself was killed. No run can start while processes of another still save
their state.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from adascale_core.checkpoint_manifest import Manifest, checkpoint_number, is_best_weights, manifest_number
from adascale_core.errors import AdaScaleError, UsageError
from adascale_storage import (
    MissingFileError,
    Storage,
    StorageError,
    UnusableStorageError,
    is_url,
    open_storage,
)

DEFAULT_ROOT = Path(".adascale")
IGNORE_ALL = "*\n"
"""The content of the .gitignore of a state folder."""
TIMEOUT = 40.0
"""Seconds to wait for the processes of a killed run. An agent gives its trainer 25 s to save."""


def _inside(*parts: str) -> cached_property[Path]:
    """Return the attribute of a state folder that is a path in it."""
    return cached_property(lambda folder: folder.path.joinpath(*parts))


@dataclass(frozen=True)
class StateDir:
    """The paths in a state folder."""

    path: Path
    checkpoints = _inside("checkpoints")  # the folder of the checkpoints, unless the job sets another
    logs = _inside("logs")  # the folder with the output of all processes
    service_log = _inside("logs", "api.log")  # the output of the metrics service
    port_file = _inside("api.port")  # the file in which the metrics service writes its port
    service_file = _inside("service.json")  # the file with the address of the metrics service, during a run
    # the file in which `adascale scale` requests another limit of replicas
    scale_request_file = _inside("scale-request.json")
    scale_answer_file = _inside("scale-answer.json")  # the file in which the run answers the request
    history_file = _inside("runs.jsonl")  # the file with the starts and ends of the runs
    database = _inside("api.sqlite")  # the metrics service's database
    stop_lock_file = _inside("stop.lock")  # the file that `adascale stop` locks while it stops the run
    lock_file = _inside("lock")  # the file that the processes of a run lock
    ignore_file = _inside(".gitignore")  # the file that keeps the folder out of a repository of Git

    def replica_log(self, rank: int) -> Path:
        """The output of the replica of `rank`."""
        return self.logs / f"replica-{rank}.log"

    def create(self) -> None:
        """Create the folder, with a .gitignore for all its files."""
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            if not self.ignore_file.exists():
                self.ignore_file.write_text(IGNORE_ALL)
        except OSError as error:
            raise UsageError(
                f"cannot create the state folder {self.path}: {error.strerror}; use another with --state-dir"
            ) from None

    def delete_saved_state(self, checkpoints: Path | str) -> None:
        """Delete the files of previous runs, and no files of others."""
        delete_checkpoints(checkpoints)
        self.delete_records()

    def delete_records(self) -> None:
        """Delete what previous runs have recorded, and keep their checkpoints."""
        for database in self.path.glob("api.sqlite*"):
            database.unlink()
        self.service_log.unlink(missing_ok=True)
        for log in self.logs.glob("replica-*.log"):
            log.unlink()
        self.history_file.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a file as a whole: a full disk, or a process that is killed, leaves it as it was."""
    draft = path.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    draft.touch(mode)
    draft.write_bytes(content)
    draft.replace(path)


class StateLock:
    """The lock, held while this object's descriptor or an inherited one is open."""

    def __init__(
        self,
        folder: StateDir,
        show_message: Callable[[str], None],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._open(folder, show_message, cancelled)
        # `adascale rm` deletes the file that it has locked: another process locks the next one.
        while not _is_at(self.descriptor, folder.lock_file):
            os.close(self.descriptor)
            self._open(folder, show_message, cancelled)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, json.dumps(_process_identity(os.getpid())).encode(), 0)

    def release(self) -> None:
        """Close this process's descriptor; processes that inherited it keep the lock."""
        os.close(self.descriptor)

    def _open(
        self, folder: StateDir, show_message: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None:
        try:
            self.descriptor = os.open(folder.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UsageError(f"cannot open {folder.lock_file}: {error.strerror}") from None
        try:
            self._acquire(folder, show_message, cancelled)
        except BaseException:
            os.close(self.descriptor)
            raise

    def _acquire(
        self, folder: StateDir, show_message: Callable[[str], None], cancelled: Callable[[], bool]
    ) -> None:
        deadline = time.monotonic() + TIMEOUT
        waiting = False
        while not try_lock(self.descriptor):
            holder = _holder(self.descriptor)
            if holder is not None:
                raise UsageError(
                    f"{folder.path} is in use by another run (process {holder}): wait for it, stop it with "
                    "Ctrl-C, or use another folder with --state-dir"
                )
            if cancelled():
                raise UsageError(f"{folder.path} is still in use by {_users_of(folder.lock_file)}")
            if time.monotonic() > deadline:
                raise UsageError(
                    f"{folder.path} is still in use by {_users_of(folder.lock_file)} of a killed run: kill "
                    "them, or use another folder with --state-dir"
                )
            if not waiting:
                waiting = True
                show_message("The previous run was killed; waiting for its processes to save and exit")
            time.sleep(0.1)


def running_process(folder: StateDir) -> int | None:
    """Return the process of the run that holds the lock of a state folder; None if no run does."""
    try:
        descriptor = os.open(folder.lock_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        holder = _holder(descriptor)
        # The lock is only tried if the holder runs, so that no other run that starts is hindered.
        return None if holder is None or try_lock(descriptor, fcntl.LOCK_SH) else holder
    finally:
        os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still at its path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def try_lock(descriptor: int, operation: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file, unless another process has locked it. Returns whether it was locked."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UsageError(
            f"the file system of the state folder has no file locks ({error.strerror}): use a folder on a "
            "local disk with --state-dir; checkpoints stay on another file system with spec.checkpoint.path"
        ) from error
    return True


def _holder(descriptor: int) -> int | None:
    """Return the process of the run that holds the lock; None if it no longer runs."""
    try:
        identity = json.loads(os.pread(descriptor, 4096, 0))
        return int(identity["pid"]) if _process_identity(identity["pid"]) == identity else None
    except (ValueError, KeyError, TypeError):
        # The holder has locked the file, but not written its identity yet.
        return None


def _process_identity(pid: int) -> dict[str, Any]:
    """Return what distinguishes a process from a later one with the same number."""
    return {"pid": pid, "started": _start_time(pid)}


def _start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; None if it has exited."""
    try:
        # Fields 3 and 22 of proc(5). The fields before them contain the program's name, in parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else fields[19]
    except (OSError, IndexError):
        return None


def _users_of(file: Path) -> str:
    """Return a phrase that names the other processes that have `file` open."""
    target = str(file.resolve())
    pids = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if any(str(fd.readlink()) == target for fd in (entry / "fd").iterdir()):
                pids.add(int(entry.name))
        except OSError:
            continue
    others = sorted(pids - {os.getpid()})
    if not others:
        return "other processes"
    return f"process{'es' if len(others) > 1 else ''} {', '.join(map(str, others))}"


# -- the checkpoints of a job, in a folder or an object store ------------------------------------------------


class CheckpointStorageError(AdaScaleError):
    """The storage of the checkpoints cannot be used."""


def location(recorded: str | None, default: Path) -> Path | str:
    """Return the folder or the URL of checkpoints."""
    if recorded is None:
        return default
    return recorded if "://" in recorded else Path(recorded)


def newest_manifest(checkpoints: Path | str) -> Manifest | None:
    """Return the manifest of the newest checkpoint in a folder or at a URL; None if there is no checkpoint.

    A manifest that cannot be read is skipped: the trainer reports damaged checkpoints.
    """
    files = _open(checkpoints)
    with _errors(files):
        numbered = {manifest_number(name): name for name in files.names()}
        for number in sorted((number for number in numbered if number is not None), reverse=True):
            # A trainer may have deleted it meanwhile.
            with suppress(MissingFileError, ValueError):
                return Manifest.from_json(json.loads(files.read(numbered[number])))
    return None


def delete_checkpoints(checkpoints: Path | str) -> None:
    """Delete the files of checkpoints, and no files of others."""
    files = _open(checkpoints)
    with _errors(files):
        for name in files.names():
            if checkpoint_number(name) is not None or is_best_weights(name):
                files.delete(name)


def _open(checkpoints: Path | str) -> Storage:
    try:
        return open_storage(checkpoints, person_waits=True)
    except UnusableStorageError as error:
        raise CheckpointStorageError(str(error)) from error


@contextmanager
def _errors(files: Storage) -> Iterator[None]:
    """Raise the errors of a storage as errors of a command."""
    try:
        yield
    except StorageError as error:
        hint = (
            "Check the URL, and the credentials in the environment, such as AWS_ACCESS_KEY_ID"
            if is_url(str(files))
            else "Check that the folder can be read"
        )
        raise CheckpointStorageError(f"{files} cannot be read: {error}. {hint}") from error
