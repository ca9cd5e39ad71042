"""The status of a job on this machine."""

from __future__ import annotations

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.formatting import count, progress_text
from adascale_controller.job_overview import JobOverview
from adascale_controller.local.checkpoints import CheckpointStorageError
from adascale_controller.local.local_jobs import LocalJob
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.views.job_summary import JobStateName, registered_state, training_replicas
from adascale_core.views.jobs import JobView


def read_status(job: LocalJob) -> JobOverview:
    """Read the status of `job` from its state folder and its metrics service."""
    process, service = job.process, job.service
    view: JobView | None = None
    if service is not None:
        client = MetricsServiceClient(service.url)
        try:
            view = client.get_job(job.id)
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
        state = _state_in_run(view)
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
        shown_name=job.short_id,
        state=state,
        replicas=training_replicas(view.active, view.replicas) if view else 0,
        desired=view.desired.replicas if view and view.desired else 0,
        spares=view.waiting_spares if view else 0,
        began=job.runs[0].began,
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


def _state_in_run(view: JobView | None) -> JobStateName:
    if view is None:
        return JobStateName.STARTING
    state = registered_state(
        view.desired, view.active, view.replicas, broken=view.broken, complete=view.complete
    )
    # Before its first allocation the run itself starts.
    return JobStateName.STARTING if state is JobStateName.PENDING else state
