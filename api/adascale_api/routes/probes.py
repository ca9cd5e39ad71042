"""What watches the service: probes, and Prometheus."""

from fastapi import APIRouter
from sqlalchemy import select

from adascale_api.routes.common import ServiceOf, errors
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
