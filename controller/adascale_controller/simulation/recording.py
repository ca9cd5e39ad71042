"""Workloads of real jobs: recorded from a metrics service, and read from a JSON file.

`docs/scheduling.md` describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from adascale_client import MetricsServiceClient
from adascale_controller.simulation.application import RecordedApplication
from adascale_controller.simulation.engine import MAX_TIME, Submission
from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import require_valid_replicas
from adascale_core.errors import AdaScaleError
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.views.jobs import JobView

FORMAT_VERSION = 1
HISTORY_POINTS = 200
"""Reports of a job that are recorded."""

Count = Annotated[int, Field(ge=1)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _SpecBody(BaseModel):
    batch_size: Count
    max_batch_size: Count | None = None
    local_bsz_bounds: tuple[Count, Count | str] | None = None
    min_replicas: Count = 1
    max_replicas: Count = 1
    elastic_single_replica: bool = False
    local_bsz_limit: Count | None = None


class _StepTimeBody(BaseModel):
    replicas: Count
    local_bsz: Count
    accumulation: Count
    step_time: Positive
    nodes: Count = 1
    sync_time: Number | None = None


class _ReportBody(BaseModel):
    progress: Number
    grad_sqr: Finite
    grad_var: Finite


class _JobBody(BaseModel):
    name: Annotated[str, Field(min_length=1)]
    time: Annotated[float, Field(ge=0, le=MAX_TIME)]
    total: Positive
    spec: _SpecBody
    step_times: Annotated[list[_StepTimeBody], Field(min_length=1)]
    reports: Annotated[list[_ReportBody], Field(min_length=1)]


class _RecordingBody(BaseModel):
    jobs: Annotated[list[_JobBody], Field(min_length=1)]


def record(
    client: MetricsServiceClient, path: Path | None, show: Callable[[str], object]
) -> list[Submission]:
    """Return the jobs of a metrics service that can be replayed, and save them to a file.

    These are declared, have reported a step time, and declare `scaleInvariantSteps` or are complete.
    """
    views = sorted(client.list_jobs(), key=lambda view: (view.created_at, view.id))
    of_samples = [view.id for view in views if _counts_samples(view)]
    if of_samples:
        show(f"Left out, because their progress counts samples (trainSamples): {', '.join(of_samples)}")
    jobs = [
        _recorded(view, client.get_history(view.id, HISTORY_POINTS).points)
        for view in views
        if view.spec is not None and view.step_times and view.latest is not None and _total(view) > 0
        if not _counts_samples(view)
    ]
    if not jobs:
        raise AdaScaleError(
            "the metrics service has no job to replay: a job must have reported step times, must not count "
            "samples, and must declare scaleInvariantSteps or be complete"
        )
    first = min(job["time"] for job in jobs)
    for job in jobs:
        job["time"] -= first
    document = {"version": FORMAT_VERSION, "jobs": jobs}
    if path is not None:
        try:
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise AdaScaleError(
                f"cannot write {path}: {error.strerror or error}: choose another path"
            ) from error
    return _submissions(document, "the metrics service")


def read_recording(path: Path) -> list[Submission]:
    """Return the jobs of a recorded file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise AdaScaleError(f"cannot read {path}: {error.strerror or error}: check the path") from error
    except (ValueError, RecursionError) as error:
        raise AdaScaleError(
            f"{path} is not valid JSON ({error}): record it again with `adascale simulate --from-service`"
        ) from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise AdaScaleError(
            f"{path} is not a recorded workload of version {FORMAT_VERSION}, but of version {version!r}: "
            "record it again with `adascale simulate --from-service`"
        )
    return _submissions(document, str(path))


def _counts_samples(view: JobView) -> bool:
    if view.latest is not None and view.latest.counts_samples:
        return True
    return view.spec is not None and view.spec.train_samples is not None


def _total(view: JobView) -> float:
    assert view.spec is not None
    assert view.latest is not None
    if view.spec.steps is not None:
        return float(view.spec.steps)
    if view.latest.target is not None:
        return view.latest.target
    return view.latest.progress if view.complete else 0.0


def _recorded(view: JobView, reports: Sequence[GainReport]) -> dict[str, Any]:
    assert view.spec is not None
    return {
        "name": view.id,
        "time": view.created_at,
        "total": _total(view),
        "spec": view.spec.with_limit(view.local_bsz_limit).to_json(),
        "step_times": [each.to_json() for each in view.step_times],
        "reports": [
            {"progress": each.progress, "grad_sqr": each.grad_sqr, "grad_var": each.grad_var}
            for each in reports
        ],
    }


def _submissions(document: dict[str, Any], source: str) -> list[Submission]:
    try:
        jobs = _RecordingBody.model_validate(document).jobs
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        problem = "an object is needed" if first["type"] == "model_type" else first["msg"]
        got = "" if first["type"] == "missing" else f", got {str(first['input'])[:80]!r}"
        raise AdaScaleError(
            f"{source}: {place}: {problem}{got}: see docs/scheduling.md for the format"
        ) from error
    submissions: dict[str, Submission] = {}
    for job in jobs:
        if job.name in submissions:
            raise AdaScaleError(
                f"{source} has two jobs of the name {job.name!r}: each needs a name of its own"
            )
        try:
            submissions[job.name] = _submission(job)
        except AdaScaleError as error:
            raise AdaScaleError(f"{source}: job {job.name}: {error}") from error
    return list(submissions.values())


def _submission(job: _JobBody) -> Submission:
    spec = JobSpec.from_json(job.spec.model_dump())
    counts = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    model = StepTimeModel.fit([StepTime.from_json(each.model_dump()) for each in job.step_times])
    if model is None:
        raise AdaScaleError("no step time can be used: they must be from 1e-9 to 1e9 s")
    # A report may be older than one before it, after a restart from a checkpoint.
    reports = sorted(job.reports, key=lambda report: report.progress)
    application = RecordedApplication(
        name=job.name,
        bounds=spec.bounds,
        model=model,
        progress=[report.progress for report in reports],
        estimates=[GradientEstimate(report.grad_sqr, report.grad_var) for report in reports],
        total=job.total,
        min_replicas=counts[0],
        max_replicas=spec.max_replicas,
    )
    if application.least_seconds > MAX_TIME:
        raise AdaScaleError(
            f"total is {job.total:g}, which takes more than {MAX_TIME / 86400:.0f} days on "
            f"{spec.max_replicas} replicas even without communication: lower it, or leave the job out"
        )
    return Submission(job.name, job.time, application, counts[0], spec.batch_size)
