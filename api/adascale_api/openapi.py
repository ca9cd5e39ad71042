"""What FastAPI can't know for the OpenAPI text."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from adascale_api.bodies import REFERENCE
from adascale_api.schemas import AllocationBody, GainReportBody, JobSpecBody, RegistrationBody

_BODIES = (GainReportBody, AllocationBody, RegistrationBody, JobSpecBody)


def complete_openapi(app: FastAPI, *, protect_reads: bool) -> None:
    """Complete the OpenAPI text of `app`, once its routes are there.

    It gets the schemas of the bodies, which the service reads by itself; and reading needs a token only
    where the service was told so.
    """
    text = app.openapi()
    _, described = models_json_schema([(body, "validation") for body in _BODIES], ref_template=REFERENCE)
    text["components"]["schemas"].update(described["$defs"])
    if not protect_reads:
        for path in text["paths"].values():
            if "get" in path:
                _open(path["get"])


def _open(operation: dict[str, Any]) -> None:
    operation.pop("security", None)
    operation["responses"].pop("401", None)
