"""The status of a job on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.formatting import count, progress_text
from adascale_controller.job_overview import JobDetails, JobOverview
from adascale_controller.local.checkpoints import CheckpointStorageError
from adascale_controller.local.local_jobs import LocalJob
from adascale_controller.local.machine import describe_contention
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.views.job_summary import JobStateName, registered_state, training_replicas
from adascale_core.views.jobs import JobView


@dataclass(frozen=True)
class JobStatus:
    """The status of a job."""

    job: LocalJob
    process: int | None  # the process of its run; None if it does not run
    url: str | None  # the address of its metrics service; None if none runs
    state: JobStateName
    view: JobView | None  # the metrics service's view of it; None if no service answers
    # its newest checkpoint; None if it has none, or its checkpoints cannot be read
    checkpoint: Manifest | None
    checkpoint_error: str | None = None  # why they cannot be read; None if they can

    @property
    def replicas(self) -> int:
        """The replicas that train."""
        return training_replicas(self.view.active, self.view.replicas) if self.view else 0

    @property
    def desired(self) -> int:
        """The desired replicas; 0 if it does not run."""
        return self.view.desired.replicas if self.view and self.view.desired and self.process else 0

    @property
    def restarts(self) -> int | None:
        """Disruptions and failures; None if no service answers."""
        return self.view.disruptions + self.view.failures if self.view else None

    @property
    def reason(self) -> str:
        """Why its last run has failed; empty if it has not."""
        run = self.job.runs[-1]
        if self.process is not None or self.state is not JobStateName.FAILED:
            return ""
        return run.reason or f"the run ended with exit code {run.exit_code}"

    @property
    def progress(self) -> float | None:
        """Progress, in steps at `batchSize`; None if unknown."""
        if self.view and self.view.latest:
            return self.view.latest.progress
        return self.checkpoint.progress if self.checkpoint else None

    @property
    def progress_text(self) -> str:
        """Progress as a share of the whole, or else the number; empty if unknown."""
        return "" if self.progress is None else progress_text(self.progress, self.total)

    @property
    def total(self) -> float | None:
        """The progress at which it ends; None if unknown."""
        latest = self.view.latest if self.view else None
        return self.job.runs[-1].steps or (latest.target if latest else self.job.runs[-1].target)

    @property
    def summary(self) -> JobOverview:
        """What a list shows of it."""
        report = self.view.latest if self.view else None
        namespace, _, name = self.job.id.partition(".")
        return JobOverview(
            name=name,
            namespace=namespace,
            shown_name=self.job.short_id,
            state=self.state,
            replicas=self.replicas,
            desired=self.desired,
            spares=self.view.waiting_spares if self.view and self.process else 0,
            began=self.job.runs[0].began,
            last_began=self.job.runs[-1].began,
            batch_size=report.plan.global_bsz if report else None,
            local_batch_limit=self.view.local_bsz_limit if self.view else None,
            gain=report.gain if report else None,
            efficiency=report.efficiency if report else None,
            progress=self.progress,
            total=self.total,
            progress_text=self.progress_text,
            restarts=self.restarts,
            reason=self.reason,
            exit_code=None if self.process else self.job.runs[-1].exit_code,
            process=self.process,
            url=self.url,
            state_dir=str(self.job.folder.path),
            checkpoint_step=self.checkpoint.step if self.checkpoint else None,
            checkpoint_error=self.checkpoint_error,
            result=dict(self.checkpoint.result) if self.checkpoint else {},
            loss=report.loss if report else self.job.runs[-1].loss,
            members=self.view.replicas if self.view else (),
        )

    @property
    def details(self) -> JobDetails:
        """What `adascale status` shows in addition."""
        folder, view = self.job.folder, self.view
        state = self.state if self.process is None else f"{self.state} (process {self.process})"
        if self.process is None and self.job.runs[-1].exit_code:
            state += f", exit code {self.job.runs[-1].exit_code}"
        checkpoint = f"step {count(self.checkpoint.step)}" if self.checkpoint else "none"
        if self.checkpoint_error is not None:
            checkpoint = f"unknown: {self.checkpoint_error}"
        return JobDetails(
            state=state,
            runs=self.process is not None,
            stall=(view.stall if view else None) or "",
            slow=(describe_contention(view) or view.slowness) if view else "",
            checkpoint=checkpoint,
            places=[("metrics", self.url or ""), ("state dir", str(folder.path)), ("logs", str(folder.logs))],
        )


def read_status(job: LocalJob) -> JobStatus:
    """Read the status of `job` from its state folder and its metrics service."""
    process = job.process
    service = job.service if process is not None else None
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
    return JobStatus(job, process, service.url if service else None, state, view, checkpoint, error)


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
