"""Deletes what the runs of a job have left on this machine."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from adascale_controller.local import run_registry
from adascale_controller.local.local_jobs import LocalJob
from adascale_controller.local.state_dir import IGNORE_ALL
from adascale_controller.local.state_lock import StateLock
from adascale_core.errors import AdaScaleError


class StillRunningError(AdaScaleError):
    """A job that runs, and so cannot be removed."""


def remove_run(job: LocalJob, *, keep_checkpoints: bool) -> str | None:
    """Delete the state folder of a job, with its checkpoints, and no files of others."""
    folder = job.folder
    if job.process is not None:
        raise StillRunningError(
            f"job {job.short_id} runs (process {job.process}): stop it with `adascale stop {job.short_id}`"
        )
    lock = StateLock(folder, lambda _message: None)
    try:
        own = job.runs[-1].checkpoints
        kept = own
        if own is None and keep_checkpoints and folder.checkpoints.exists():
            kept = str(folder.checkpoints)
        if own is None and not keep_checkpoints:
            folder.delete_saved_state(folder.checkpoints)
            _remove_if_empty(folder.checkpoints)
        else:
            folder.delete_records()
        local_folder = folder.local_folder
        for file in (
            folder.port_file,
            folder.service_file,
            folder.scale_request_file,
            folder.scale_answer_file,
        ):
            file.unlink(missing_ok=True)
        if _is_own_ignore_file(folder.ignore_file):
            folder.ignore_file.unlink()
        for file in (folder.stop_lock_file, folder.lock_file):
            file.unlink(missing_ok=True)
        _remove_if_empty(folder.logs)
        if local_folder is not None:
            shutil.rmtree(local_folder, ignore_errors=True)
        _remove_if_empty(folder.path)
    finally:
        lock.release()
    run_registry.deregister(folder.path)
    return kept


def _remove_if_empty(folder: Path) -> None:
    # Files of the program's own stay.
    with suppress(OSError):
        folder.rmdir()


def _is_own_ignore_file(file: Path) -> bool:
    """Whether it is the one that a run writes, and not that of the folder's repository."""
    try:
        return file.read_bytes() == IGNORE_ALL.encode()
    except OSError:
        return False
