"""The jobs whose state folders are on this machine, and whether a run holds each folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adascale_controller.local import run_history, service_file
from adascale_controller.local.checkpoints import location, newest_manifest
from adascale_controller.local.run_history import RunRecord
from adascale_controller.local.run_registry import registered_folders
from adascale_controller.local.service_file import RunningService
from adascale_controller.local.state_dir import DEFAULT_ROOT, StateDir
from adascale_controller.local.state_lock import running_process
from adascale_core import names
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id

MAX_NAMED = 5
"""State folders that a message names."""


class NoSuchJobError(AdaScaleError):
    """A job without a state folder."""


class SeveralFoldersError(AdaScaleError):
    """A job with several state folders."""

    exit_code = 2


class NotRunningError(AdaScaleError):
    """A job that no `adascale run` trains."""


@dataclass(frozen=True)
class LocalJob:
    """A job with a state folder."""

    id: str
    folder: StateDir
    runs: tuple[RunRecord, ...]

    @property
    def short_id(self) -> str:
        """The id without the namespace `default`."""
        return self.id.removeprefix(f"{names.DEFAULT_NAMESPACE}.")

    @property
    def process(self) -> int | None:
        """The process id of the `adascale run` that trains it; None if it does not run."""
        return running_process(self.folder)

    @property
    def service(self) -> RunningService | None:
        """Its metrics service; None if none runs."""
        # A run that was killed has left its file.
        return service_file.read(self.folder) if self.process is not None else None

    @property
    def checkpoint(self) -> Manifest | None:
        """Its newest checkpoint; None if it has none."""
        return newest_manifest(location(self.runs[-1].checkpoints, self.folder.checkpoints))

    def require_process(self) -> int:
        """Return the process id of the `adascale run` that trains it."""
        process = self.process
        if process is None:
            raise NotRunningError(f"job {self.short_id} is not running: start it with `adascale run FILE`")
        return process


def find_jobs(root: Path | None) -> list[LocalJob]:
    """Return jobs by id."""
    folders = _folders(DEFAULT_ROOT if root is None else root)
    if root is None:
        folders += registered_folders()
    jobs: dict[Path, LocalJob] = {}
    for path in folders:
        try:
            runs, resolved = run_history.read_runs(StateDir(path)), path.resolve()
        except (OSError, RuntimeError):
            # A folder of another user, or on a disk that fails, must not hide the others.
            if path == root:
                raise
            continue
        if runs:
            # A path that the user has given is shown as it is.
            jobs.setdefault(resolved, LocalJob(runs[-1].job, StateDir(path), tuple(runs)))
    return sorted(jobs.values(), key=lambda job: (job.id, job.folder.path))


def find_folders_of(root: Path | None, job_id: str) -> list[LocalJob]:
    """Return the state folders of a job.

    Without `root`, those in `.adascale` come before all others, and that of a run before those of ended runs.
    """
    roots = [DEFAULT_ROOT, None] if root is None else [root]
    found: list[LocalJob] = []
    for each in roots:
        found = found or [job for job in find_jobs(each) if job.id == job_id]
    running = [job for job in found if job.process is not None] if root is None else []
    return running or found


def find_job(root: Path | None, name: str) -> LocalJob:
    """Return the job `name`, which is `<namespace>.<name>` or a bare name in the namespace `default`."""
    found = find_folders_of(root, parse_job_id(name))
    if len(found) > 1:
        folders = ", ".join(str(job.folder.path) for job in found[:MAX_NAMED])
        folders += f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise SeveralFoldersError(
            f"job {name} has several state folders: {folders}; choose one with --state-dir"
        )
    if found:
        return found[0]
    others = sorted({job.short_id for job in find_jobs(root)})
    place = "on this machine" if root is None else f"in {root}"
    hint = (
        f"the jobs there are {', '.join(others)}"
        if others
        else "there are no jobs; start one with `adascale run FILE`, or set the folder with --state-dir"
    )
    raise NoSuchJobError(f"no job {name} found {place}: {hint}")


def _folders(root: Path) -> list[Path]:
    return [root, *root.glob("*")]
