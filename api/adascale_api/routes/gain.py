"""Reports of the gain: posted by workers, read by whoever wants to know."""

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection

from adascale_api import store
from adascale_api.bodies import ReportsBody
from adascale_api.routes.common import READ, WORK, JobId, ServiceOf, errors
from adascale_api.schemas import GainReportBody, GainResponse
from adascale_api.store import UnknownJobError
from adascale_core.batch import valid_replicas
from adascale_core.gain import GradientEstimate
from adascale_core.messages import GainReport, JobSpec, StepTime
from adascale_core.prediction import predict
from adascale_core.throughput import StepTimeModel
from adascale_core.views import GainView, HistoryView, PredictionView, StoredReports

router = APIRouter(prefix="/jobs/{job}/gain", tags=["gain"])
body = ReportsBody()


class NoReportError(UnknownJobError):
    """A job without a report so far."""

    def __init__(self, job_id: str) -> None:
        super(UnknownJobError, self).__init__(f"job {job_id} has no report yet: it has not trained a step")


@router.post(
    "",
    summary="Post one report or a list of them",
    dependencies=WORK,
    responses=errors(401, 403, 413, 415, 422, 503),
    openapi_extra=body.openapi,
)
async def post_gain(
    service: ServiceOf, job: JobId, told: Annotated[list[GainReportBody], Depends(body)]
) -> StoredReports:
    """Stores each report once per generation and step: repeating a request does no harm. All or nothing
    of a request is stored. Answers with the job's generations, so that a worker learns whether to leave."""
    reports = [one.report() for one in told]
    done = await service.database.write(partial(store.record, job_id=job, told=reports, now=service.clock()))
    service.metrics.reports.labels("stored").inc(done.stored)
    service.metrics.reports.labels("repeated").inc(done.repeated)
    return StoredReports(done.stored, done.repeated, done.allocation)


@router.get(
    "",
    summary="The latest gain, and predictions for other replica counts",
    dependencies=READ,
    responses=errors(401, 403, 404, 422, 503),
)
async def get_gain(service: ServiceOf, job: JobId) -> GainResponse:
    """The report of the highest generation and step. `predictions` tells what each valid replica count
    between the job's `min_replicas` and `max_replicas` would be worth, by the measured step times."""
    return GainResponse.of(await service.database.read(partial(_gain_view, job_id=job)))


@router.get(
    "/history",
    summary="The reports over time, thinned",
    dependencies=READ,
    responses=errors(401, 403, 404, 422, 503),
)
async def get_history(
    service: ServiceOf,
    job: JobId,
    points: Annotated[int, Query(ge=1, le=5000, description="At most so many reports.")] = 500,
) -> HistoryView:
    """Evenly spread over all reports, by generation and step, with the first and the last. A single
    point is the last."""

    def query(connection: Connection) -> HistoryView:
        series = store.history(connection, store.find_job(connection, job), points)
        return HistoryView(job, series.total, series.reports)

    return await service.database.read(query)


def _gain_view(connection: Connection, job_id: str) -> GainView:
    job = store.find_job(connection, job_id)
    report = store.latest_report(connection, job)
    if report is None:
        raise NoReportError(job_id)
    predictions = None
    if job.spec is not None:
        predictions = _predictions(job.spec, report, store.step_times(connection, job))
    return GainView(job_id, report, predictions)


def _predictions(
    spec: JobSpec, report: GainReport, step_times: list[StepTime]
) -> list[PredictionView] | None:
    model = StepTimeModel.fit(step_times)
    if model is None:
        return None
    counts = [count for count in valid_replicas(spec.bounds, spec.max_replicas) if count >= spec.min_replicas]
    estimate = GradientEstimate(report.grad_sqr, report.grad_var)
    predicted = predict(spec.bounds, counts, estimate, model, spec.efficiency_target)
    return [PredictionView.of(prediction) for prediction in predicted.values()]
