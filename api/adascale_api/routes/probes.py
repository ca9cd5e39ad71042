"""What watches the service: probes, and Prometheus."""

from fastapi import APIRouter, Response
from sqlalchemy import select

from adascale_api.prometheus import MEDIA_TYPE
from adascale_api.routes.common import READ, ServiceOf, errors
from adascale_api.schemas import Health
from adascale_api.tables import schema

router = APIRouter(tags=["probes"])


@router.get("/healthz", summary="Whether the service runs")
async def get_health() -> Health:
    """Touches nothing: a slow database is no reason to start the service anew."""
    return Health("ok")


@router.get("/readyz", summary="Whether the service can do its work", responses=errors(503))
async def get_readiness(service: ServiceOf) -> Health:
    """Reads the database."""
    await service.database.read(lambda connection: connection.execute(select(schema)).one())
    return Health("ok")


@router.get(
    "/metrics",
    summary="Everything in numbers, for Prometheus",
    dependencies=READ,
    response_class=Response,
    responses={
        200: {
            "description": "As Prometheus reads it.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **errors(401, 403, 503),
    },
)
async def get_metrics(service: ServiceOf) -> Response:
    """The gain, efficiency, progress, replicas and local batch size of each job; reports and requests."""
    text = await service.database.read(service.metrics.text)
    return Response(text, media_type=MEDIA_TYPE)
