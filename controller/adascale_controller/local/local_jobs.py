"""The jobs with state folders on this machine: finds them, reads their status, stops and deletes them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.formatting import count, progress_text
from adascale_controller.job_overview import JobOverview, describe_comparison
from adascale_controller.local.run_history import RunRecord, deregister_folder, read_runs, registered_folders
from adascale_controller.local.service_process import RunningService, read_service
from adascale_controller.local.state_dir import (
    DEFAULT_ROOT,
    IGNORE_ALL,
    CheckpointStorageError,
    StateDir,
    StateLock,
    location,
    newest_manifest,
    running_process,
    try_lock,
)
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.errors import AdaScaleError, UsageError
from adascale_core.job_id import parse_job_id, short_id
from adascale_core.views.job_summary import JobStateName
from adascale_core.views.jobs import JobView

MAX_NAMED = 5
"""State folders that a message names."""


@dataclass(frozen=True)
class LocalJob:
    """A job with a state folder."""

    id: str
    folder: StateDir
    runs: tuple[RunRecord, ...]

    @property
    def short_id(self) -> str:
        """The id without the namespace `default`."""
        return short_id(self.id)

    @property
    def process(self) -> int | None:
        """The process id of the `adascale run` that trains it; None if it does not run."""
        return running_process(self.folder)

    @property
    def service(self) -> RunningService | None:
        """Its metrics service; None if none runs."""
        # A run that was killed has left its file.
        return read_service(self.folder) if self.process is not None else None

    @property
    def checkpoint(self) -> Manifest | None:
        """Its newest checkpoint; None if it has none."""
        return newest_manifest(location(self.runs[-1].checkpoints, self.folder.checkpoints))

    def require_process(self) -> int:
        """Return the process id of the `adascale run` that trains it."""
        process = self.process
        if process is None:
            raise AdaScaleError(f"job {self.short_id} is not running: start it with `adascale run FILE`")
        return process


def find_jobs(root: Path | None) -> list[LocalJob]:
    """Return jobs by id."""
    folders = _folders(DEFAULT_ROOT if root is None else root)
    if root is None:
        folders += registered_folders()
    jobs: dict[Path, LocalJob] = {}
    for path in folders:
        try:
            runs, resolved = read_runs(StateDir(path)), path.resolve()
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
        raise UsageError(f"job {name} has several state folders: {folders}; choose one with --state-dir")
    if found:
        return found[0]
    others = sorted({job.short_id for job in find_jobs(root)})
    place = "on this machine" if root is None else f"in {root}"
    hint = (
        f"the jobs there are {', '.join(others)}"
        if others
        else "there are no jobs; start one with `adascale run FILE`, or set the folder with --state-dir"
    )
    raise AdaScaleError(f"no job {name} found {place}: {hint}")


def _folders(root: Path) -> list[Path]:
    return [root, *root.glob("*")]


def read_status(job: LocalJob) -> JobOverview:
    """Read the status of `job` from its state folder and its metrics service."""
    process, service = job.process, job.service
    view: JobView | None = None
    comparison = job.runs[-1].comparison
    if service is not None:
        client = MetricsServiceClient(service.url)
        try:
            view = client.get_job(job.id)
            comparison = describe_comparison(client.get_generations(job.id).comparison)
        except ServiceError:
            view = None  # It has just stopped, or it restarts.
        finally:
            client.close()
    checkpoint, error = read_checkpoint(job)
    if process is None:
        state = state_after_run(job, checkpoint, error)
    elif service is not None and service.stopping:
        state = JobStateName.STOPPING
    else:
        state = state_in_run(view)
    run, folder, report = job.runs[-1], job.folder, view.latest if view else None
    exit_code = None if process else run.exit_code
    reason = ""
    if process is None and state is JobStateName.FAILED:
        reason = run.reason or f"the run ended with exit code {run.exit_code}"
    progress = report.progress if report else checkpoint.progress if checkpoint else None
    total = run.steps or (report.target if report else run.target)
    saved = f"step {count(checkpoint.step)}" if checkpoint else "none"
    namespace, _, name = job.id.partition(".")
    return JobOverview(
        name=name,
        namespace=namespace,
        state=state,
        replicas=view.training_replicas if view else 0,
        desired_replicas=view.desired.replicas if view and view.desired else 0,
        spare_replicas=view.waiting_spares if view else 0,
        start_time=job.runs[0].began,
        last_began=run.began,
        batch_size=report.plan.global_bsz if report else None,
        local_batch_limit=view.local_bsz_limit if view else None,
        gain=report.gain if report else None,
        efficiency=report.efficiency if report else None,
        progress=progress,
        total=total,
        progress_text="" if progress is None else progress_text(progress, total),
        loss=report.loss if report else run.loss,
        restarts=view.disruptions + view.failures if view else None,
        reason=reason,
        view=view,
        explained=f" (process {process})" if process else f", exit code {exit_code}" if exit_code else "",
        runs=process is not None,
        checkpoint=saved if error is None else f"unknown: {error}",
        places=[
            ("metrics", service.url if service else ""),
            ("state dir", str(folder.path)),
            ("logs", str(folder.logs)),
        ],
        exit_code=exit_code,
        process=process,
        url=service.url if service else None,
        state_dir=str(folder.path),
        checkpoint_step=checkpoint.step if checkpoint else None,
        checkpoint_error=error,
        result=dict(checkpoint.result) if checkpoint else {},
        comparison=comparison,
    )


def read_checkpoint(job: LocalJob) -> tuple[Manifest | None, str | None]:
    """Return the newest checkpoint of `job`, and why its checkpoints cannot be read; None if they can."""
    try:
        return job.checkpoint, None
    except CheckpointStorageError as error:
        return None, str(error)


def state_after_run(job: LocalJob, checkpoint: Manifest | None, error: str | None) -> JobStateName:
    """Return the state of a job that does not run."""
    exit_code = job.runs[-1].exit_code
    if error is not None and exit_code == 0:
        # It has finished, or has reached --until.
        return JobStateName.UNKNOWN
    if checkpoint is not None and checkpoint.finished and not exit_code:
        return JobStateName.COMPLETE
    # A run that a signal stopped has the exit code 128 + its number.
    return (
        JobStateName.STOPPED
        if exit_code is None or exit_code == 0 or exit_code > 128
        else JobStateName.FAILED
    )


def state_in_run(view: JobView | None) -> JobStateName:
    """Return the state of a job that runs: it is about to start, or start again, if nothing trains."""
    if view is None or view.state in {JobStateName.PENDING, JobStateName.FAILED}:
        return JobStateName.STARTING
    return view.state


def stop_run(job: LocalJob, timeout: float) -> None:
    """Send SIGTERM to the run of `job` and wait until it has ended.

    A second SIGTERM would stop the run without saving. So the signal is not sent to a run that stops already,
    and two calls at once send one signal.
    """
    deadline = time.monotonic() + timeout
    process = job.require_process()
    with job.folder.stop_lock_file.open("w") as lock:
        requested = False
        while job.process == process:
            if not requested and try_lock(lock.fileno()):
                service = read_service(job.folder)
                if service is None or not service.stopping:
                    _terminate(job, process)
                requested = True
            if time.monotonic() > deadline:
                raise AdaScaleError(
                    f"job {job.short_id} has not ended within {timeout:g} s: wait longer with --timeout, or "
                    f"stop it without saving with `kill {process}`"
                )
            time.sleep(0.05)


def _terminate(job: LocalJob, process: int) -> None:
    """Send SIGTERM to `process`, and to no later process with the same id."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return
    try:
        if job.process == process:
            signal.pidfd_send_signal(descriptor, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)


def remove_run(job: LocalJob, *, keep_checkpoints: bool) -> str | None:
    """Delete the state folder of a job, with its checkpoints, and no files of others.

    Checkpoints in a folder or an object store that the job names stay always. Returns where checkpoints stay.
    """
    folder = job.folder
    if job.process is not None:
        raise AdaScaleError(
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
        _remove_if_empty(folder.path)
    finally:
        lock.release()
    deregister_folder(folder.path)
    return kept


def _remove_if_empty(folder: Path) -> None:
    # Files that the program has written there stay.
    with suppress(OSError):
        folder.rmdir()


def _is_own_ignore_file(file: Path) -> bool:
    """Whether it is the one that a run writes, and not that of the folder's repository."""
    try:
        return file.read_bytes() == IGNORE_ALL.encode()
    except OSError:
        return False
