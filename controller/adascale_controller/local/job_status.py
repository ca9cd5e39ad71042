"""The status of a local job, with the columns of `kubectl get asj`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adascale_client import MetricsServiceClient, ServiceError
from adascale_controller.formatting import age, columns, count, memory, progress_text
from adascale_controller.local.checkpoints import CheckpointStorageError
from adascale_controller.local.local_jobs import LocalJob
from adascale_controller.local.run_report import format_result
from adascale_core.checkpoint_manifest import Manifest
from adascale_core.views.job_state_name import JobStateName, registered_state, training_replicas
from adascale_core.views.jobs import JobView

_HEADER = (
    "NAME", "STATE", "REPLICAS", "DESIRED", "BATCH", "GAIN", "EFFICIENCY", "PROGRESS", "RESTARTS", "AGE",
)  # fmt: skip


@dataclass(frozen=True)
class JobStatus:
    """The status of a job.

    Args:
        job: the job.
        process: the process of its run; None if it does not run.
        url: the address of its metrics service; None if none runs.
        state: what it does.
        view: the metrics service's view of it; None if no service answers.
        checkpoint: its newest checkpoint; None if it has none, or its checkpoints cannot be read.
        checkpoint_error: why they cannot be read; None if they can.
    """

    job: LocalJob
    process: int | None
    url: str | None
    state: JobStateName
    view: JobView | None
    checkpoint: Manifest | None
    checkpoint_error: str | None = None

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
    def progress(self) -> float | None:
        """Progress, in steps at `batchSize`; None if unknown."""
        if self.view and self.view.latest:
            return self.view.latest.progress
        return self.checkpoint.progress if self.checkpoint else None

    @property
    def progress_text(self) -> str:
        """Progress as a share of scaleInvariantSteps, or else in steps; empty if unknown."""
        total = self.job.runs[-1].steps
        return "" if self.progress is None else progress_text(self.progress, total)

    def to_json(self) -> dict[str, Any]:
        """Return the status as members of a JSON object, named as in the status of an AdaScaleJob."""
        report = self.view.latest if self.view else None
        namespace, _, name = self.job.id.partition(".")
        return {
            "name": name,
            "namespace": namespace,
            "state": self.state.value,
            "replicas": self.replicas,
            "desiredReplicas": self.desired,
            "batchSize": report.replicas * report.local_bsz * report.accumulation if report else None,
            "localBatchLimit": self.view.local_bsz_limit if self.view else None,
            "gain": report.gain if report else None,
            "efficiency": report.efficiency if report else None,
            "progress": self.progress,
            "progressText": self.progress_text,
            "restarts": self.restarts,
            "startTime": self.job.runs[0].began,
            "exitCode": None if self.process else self.job.runs[-1].exit_code,
            "process": self.process,
            "url": self.url,
            "stateDir": str(self.job.folder.path),
            "checkpointStep": self.checkpoint.step if self.checkpoint else None,
            "checkpointError": self.checkpoint_error,
            "result": dict(self.checkpoint.result) if self.checkpoint else {},
        }


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
    checkpoint, error = None, None
    try:
        checkpoint = job.checkpoint
    except CheckpointStorageError as raised:
        error = str(raised)
    if process is None:
        state = _state_after_run(job, checkpoint, error)
    elif service is not None and service.stopping:
        state = JobStateName.STOPPING
    else:
        state = _state_in_run(view)
    return JobStatus(job, process, service.url if service else None, state, view, checkpoint, error)


def render_list(statuses: Sequence[JobStatus], now: float) -> str:
    """Return a line for each status, below a header; `now` is in seconds since 1970."""
    return columns([_HEADER, *(_row(status, now) for status in statuses)])


def render_status(status: JobStatus, now: float) -> str:
    """Return the status with its replicas and files; `now` is in seconds since 1970."""
    job, members = status.job, status.to_json()
    state = status.state if status.process is None else f"{status.state} (process {status.process})"
    if members["exitCode"]:
        state += f", exit code {members['exitCode']}"
    facts = [
        ("name", job.id),
        ("state", state),
        ("age", age(now - job.runs[0].began)),
        ("replicas", f"{status.replicas} of {status.desired} desired" if status.process else "0"),
        ("batch size", "" if members["batchSize"] is None else count(members["batchSize"])),
        ("memory", "" if members["localBatchLimit"] is None else memory(members["localBatchLimit"])),
        ("gain", _number(members["gain"])),
        ("efficiency", _number(members["efficiency"])),
        ("progress", _progress(status)),
        ("restarts", "" if status.restarts is None else str(status.restarts)),
        ("stall", (status.view.stall if status.view else None) or ""),
        ("checkpoint", _checkpoint(status)),
        ("result", format_result(members["result"])),
        ("metrics", status.url or ""),
        ("state dir", str(job.folder.path)),
        ("logs", str(job.folder.logs)),
    ]
    text = columns([(name, value) for name, value in facts if value])
    if status.view is None or not status.view.replicas:
        return text
    replicas = [(str(item.replica), item.state.value, str(item.generation)) for item in status.view.replicas]
    return f"{text}\n\n{columns([('REPLICA', 'STATE', 'GENERATION'), *replicas])}"


def _checkpoint(status: JobStatus) -> str:
    if status.checkpoint_error is not None:
        return f"unknown: {status.checkpoint_error}"
    return f"step {count(status.checkpoint.step)}" if status.checkpoint else "none"


def _state_after_run(job: LocalJob, checkpoint: Manifest | None, error: str | None) -> JobStateName:
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


def _row(status: JobStatus, now: float) -> tuple[str, ...]:
    members = status.to_json()
    return (
        status.job.short_id,
        status.state,
        str(status.replicas),
        str(status.desired),
        "" if members["batchSize"] is None else str(members["batchSize"]),
        _number(members["gain"]),
        _number(members["efficiency"]),
        status.progress_text,
        "" if status.restarts is None else str(status.restarts),
        age(now - status.job.runs[0].began),
    )


def _progress(status: JobStatus) -> str:
    if status.progress is None:
        return ""
    total = status.job.runs[-1].steps
    if total is None:
        return status.progress_text
    return f"{count(status.progress)} of {count(total)} steps ({status.progress_text})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
