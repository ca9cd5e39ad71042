"""Workloads of real jobs: recorded from a metrics service, and read from a JSON file.

`docs/scheduling.md` describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adascale_client import MetricsServiceClient
from adascale_core.gain import GradientEstimate
from adascale_core.messages import GainReport, JobSpec, StepTime
from adascale_core.simulation.application import ProfileError, RecordedApplication
from adascale_core.simulation.engine import Submission
from adascale_core.throughput import StepTimeModel
from adascale_core.views import JobView

FORMAT_VERSION = 1
HISTORY_POINTS = 200
"""Reports of a job that are recorded."""


def record(client: MetricsServiceClient, path: Path | None) -> list[Submission]:
    """Return the jobs of a metrics service that can be replayed, and save them to a file.

    A job can be replayed if it is declared, has reported a step time, and its end is known: it declares
    `scaleInvariantSteps`, or it is complete.

    Raises:
        ProfileError: there is no such job.
        ServiceError: the service does not answer.
    """
    views = sorted(client.list_jobs(), key=lambda view: (view.created_at, view.id))
    jobs = [
        _recorded(view, client.get_history(view.id, HISTORY_POINTS).points)
        for view in views
        if view.spec is not None and view.step_times and view.latest is not None and _total(view) > 0
    ]
    if not jobs:
        raise ProfileError(
            "the metrics service has no job to replay: a job must have reported step times, and must declare "
            "scaleInvariantSteps or be complete"
        )
    first = min(job["time"] for job in jobs)
    for job in jobs:
        job["time"] -= first
    document = {"version": FORMAT_VERSION, "jobs": jobs}
    if path is not None:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return _submissions(document, "the metrics service")


def read_recording(path: Path) -> list[Submission]:
    """Return the jobs of a recorded file.

    Raises:
        ProfileError: the file is missing or invalid.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ProfileError(f"{path} does not exist: check the path") from error
    except ValueError as error:
        raise ProfileError(f"{path} is not a recorded workload: {error}") from error
    if not isinstance(document, dict) or document.get("version") != FORMAT_VERSION:
        raise ProfileError(
            f"{path} is not a recorded workload of version {FORMAT_VERSION}: record it again with "
            "`adascale simulate --from-service`"
        )
    if not isinstance(document.get("jobs"), list):
        raise ProfileError(f"{path} has no list of jobs: see docs/scheduling.md for the format")
    return _submissions(document, str(path))


def _total(view: JobView) -> float:
    assert view.spec is not None
    assert view.latest is not None
    if view.spec.scale_invariant_steps is not None:
        return float(view.spec.scale_invariant_steps)
    if view.latest.target is not None:
        return view.latest.target
    return view.latest.progress if view.complete else 0.0


def _recorded(view: JobView, reports: Sequence[GainReport]) -> dict[str, Any]:
    assert view.spec is not None
    return {
        "name": view.id,
        "time": view.created_at,
        "total": _total(view),
        "spec": view.spec.to_json(),
        "step_times": [each.to_json() for each in view.step_times],
        "reports": [
            {"progress": each.progress, "grad_sqr": each.grad_sqr, "grad_var": each.grad_var}
            for each in reports
        ],
    }


def _submissions(document: dict[str, Any], source: str) -> list[Submission]:
    try:
        submissions = [_submission(job) for job in document["jobs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ProfileError(
            f"{source}: a job has no valid {error}: see docs/scheduling.md for the format"
        ) from error
    if not submissions:
        raise ProfileError(f"{source} has no jobs to replay")
    return submissions


def _submission(job: dict[str, Any]) -> Submission:
    spec = JobSpec.from_json(job["spec"])
    model = StepTimeModel.fit([StepTime.from_json(each) for each in job["step_times"]])
    if model is None or not job["reports"]:
        raise ValueError("step_times and reports, which must not be empty")
    application = RecordedApplication(
        name=job["name"],
        bounds=spec.bounds,
        model=model,
        progress=[float(report["progress"]) for report in job["reports"]],
        estimates=[
            GradientEstimate(float(report["grad_sqr"]), float(report["grad_var"]))
            for report in job["reports"]
        ],
        total=float(job["total"]),
        max_replicas=spec.max_replicas,
    )
    return Submission(job["name"], float(job["time"]), application, spec.min_replicas, spec.batch_size)
