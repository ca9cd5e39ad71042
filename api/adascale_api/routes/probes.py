"""Probes, and metrics for Prometheus."""

from dataclasses import dataclass

from fastapi import APIRouter, Response

from adascale_api.data.sql import Sql
from adascale_api.errors import UnavailableError
from adascale_api.routes.common import READER, ServiceOf, errors
from adascale_core.names import METRICS_MEDIA_TYPE

router = APIRouter(tags=["probes"])


@dataclass(frozen=True)
class HealthResponse:
    """The result of a probe."""

    status: str


@router.get("/healthz", summary="Liveness probe")
async def get_health() -> HealthResponse:
    """Does not read the database: a slow database is no reason to restart the service."""
    return HealthResponse("ok")


@router.get("/readyz", summary="Readiness probe", responses=errors(503))
async def get_readiness(service: ServiceOf) -> HealthResponse:
    """Reads the database. Fails if it is damaged, and while the disk is too full to store anything."""
    await service.database.read(lambda each: each.first(Sql("SELECT version FROM adascale_schema")))
    if service.database.is_full:
        raise UnavailableError("the disk is full: nothing can be stored until there is room")
    return HealthResponse("ok")


@router.get(
    "/metrics",
    summary="Metrics for Prometheus",
    dependencies=READER,
    response_class=Response,
    responses={
        200: {"content": {METRICS_MEDIA_TYPE: {"schema": {"type": "string"}}}},
        **errors(401, 403, 503),
    },
)
async def get_metrics(service: ServiceOf) -> Response:
    """The gain, efficiency, progress, replicas and local batch size of each job; reports and requests of this
    process. While the database can't be read, those of jobs are missing."""
    try:
        text = await service.database.read_long(service.metrics.text)
    except UnavailableError:
        text = service.metrics.process_text()
    return Response(text, media_type=METRICS_MEDIA_TYPE)
