"""The jobs whose state folders are on this machine, and whether a run holds each folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adascale_controller.local import run_history, service_file
from adascale_controller.local.checkpoints import location, newest_manifest
from adascale_controller.local.run_history import RunRecord
from adascale_controller.local.service_file import RunningService
from adascale_controller.local.state_dir import StateDir
from adascale_controller.local.state_lock import running_process
from adascale_core import names
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.errors import AdaScaleError
from adascale_core.job_id import parse_job_id


class NoSuchJobError(AdaScaleError):
    """A job without a state folder."""


class SeveralFoldersError(AdaScaleError):
    """A job with several state folders."""

    exit_code = 2


class NotRunningError(AdaScaleError):
    """A job that no `adascale run` trains."""


@dataclass(frozen=True)
class LocalJob:
    """A job with a state folder.

    Args:
        id: `<namespace>.<name>`.
        folder: its state folder.
        runs: its runs, the latest last.
    """

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
        return service_file.read(self.folder)

    @property
    def checkpoint(self) -> Manifest | None:
        """Its newest checkpoint; None if it has none."""
        return newest_manifest(location(self.runs[-1].checkpoints, self.folder.checkpoints))

    def require_process(self) -> int:
        """Return the process id of the `adascale run` that trains it.

        Raises:
            NotRunningError: it does not run.
        """
        process = self.process
        if process is None:
            raise NotRunningError(f"job {self.short_id} is not running: start it with `adascale run FILE`")
        return process


def find_jobs(root: Path) -> list[LocalJob]:
    """Return the jobs in `root`, a state folder or a folder of state folders, by id."""
    jobs = []
    for folder in (StateDir(path) for path in (root, *root.glob("*"))):
        runs = run_history.read_runs(folder)
        if runs:
            jobs.append(LocalJob(runs[-1].job, folder, tuple(runs)))
    return sorted(jobs, key=lambda job: (job.id, job.folder.path))


def find_job(root: Path, name: str) -> LocalJob:
    """Return the job `name`, which is `<namespace>.<name>` or a bare name in the namespace `default`.

    Raises:
        NoSuchJobError: `root` has no state folder of the job.
        SeveralFoldersError: `root` has several.
    """
    job_id = parse_job_id(name)
    jobs = find_jobs(root)
    found = [job for job in jobs if job.id == job_id]
    if len(found) > 1:
        folders = ", ".join(str(job.folder.path) for job in found)
        raise SeveralFoldersError(
            f"job {name} has several state folders: {folders}; choose one with --state-dir"
        )
    if found:
        return found[0]
    others = sorted({job.short_id for job in jobs})
    hint = (
        f"the jobs there are {', '.join(others)}"
        if others
        else "it contains no job; start one with `adascale run FILE`, or set the folder with --state-dir"
    )
    raise NoSuchJobError(f"no job {name} found in {root}: {hint}")
