"""The gain reports of a job, and predictions from them."""

from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi.responses import JSONResponse
from pydantic import Field, create_model

from adascale_api.bodies import GainReportBody, descriptions
from adascale_api.data.sql import Transaction
from adascale_api.data.store import jobs, reports
from adascale_api.errors import NotFoundError
from adascale_api.routes.common import OF_A_JOB, READER, JobId, ServiceOf, answer, errors
from adascale_core.batch.plans import EfficiencyBound, valid_replicas
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.performance.goodput_table import predict
from adascale_core.performance.throughput import StepTimeModel
from adascale_core.views.gain import GainView, HistoryView, PredictionView

router = APIRouter(prefix="/jobs/{job}/gain", tags=["gain"], responses=OF_A_JOB)

_texts = descriptions(GainView)
GainResponse = create_model(
    "GainResponse",
    __doc__="The latest report of a job, with predictions for other replica counts.",
    __base__=GainReportBody,
    job=Annotated[str, Field(description=_texts.get("job"))],
    efficiency=Annotated[float, Field(description="gain / scale.")],
    local_bsz_limit=Annotated[int | None, Field(description=_texts.get("local_bsz_limit"))],
    predictions=Annotated[list[PredictionView] | None, Field(description=_texts.get("predictions"))],
)
"""The JSON of a `GainView`, for the OpenAPI document."""


@router.get(
    "",
    summary="Read the latest gain, and predictions for other replica counts",
    dependencies=READER,
    response_model=GainResponse,
    responses=errors(404),
)
async def get_gain(service: ServiceOf, job: JobId) -> Response:
    """Returns the report of the highest generation and step. `predictions` has the predicted performance of
    each valid replica count from `min_replicas` to `max_replicas`, by the measured step times."""
    view = await service.database.read_long(_gain_view, job)
    return JSONResponse(view.to_json())


@router.get(
    "/history",
    summary="Read the reports over time",
    dependencies=READER,
    response_model=HistoryView,
    responses=errors(404),
)
async def get_history(
    service: ServiceOf,
    job: JobId,
    points: Annotated[int, Query(ge=1, le=5000, description="The maximum number of reports.")] = 500,
) -> Response:
    """Returns reports that are evenly spread over all reports, by generation and step, including the first
    and the last. A single point is the last."""

    # In the thread of the read: thousands of reports would delay all requests otherwise.
    def query(transaction: Transaction) -> Response:
        found = reports.history(transaction, jobs.find_job(transaction, job), points)
        return answer(found, shows_all=True)

    return await service.database.read_long(query)


def _gain_view(transaction: Transaction, job_id: str) -> GainView:
    job = jobs.find_job(transaction, job_id)
    report = reports.latest_reports(transaction, [job_id])(job_id)
    if report is None:
        raise NotFoundError(
            f"job {job_id} has no report yet: the first report follows its first optimizer step"
        )
    predictions, limit = None, job.rendezvous.local_bsz_limit_of_report(report.accelerator)
    if job.spec is not None:
        spec = job.spec.with_limit(limit)
        predictions = _predictions(spec, report, reports.step_times(transaction, [job_id])(job_id))
    return GainView(job_id, report, predictions, limit)


def _predictions(
    spec: JobSpec, report: GainReport, step_times: list[StepTime]
) -> list[PredictionView] | None:
    model = StepTimeModel.fit([each for each in step_times if each.accelerator == report.accelerator])
    if model is None:
        return None
    counts = [count for count in valid_replicas(spec.bounds, spec.max_replicas) if count >= spec.min_replicas]
    efficiency = EfficiencyBound(spec.efficiency_target, report.counts_samples)
    predicted = predict(spec.bounds, counts, report.estimate, model, efficiency)
    return [PredictionView.of(prediction) for prediction in predicted]
