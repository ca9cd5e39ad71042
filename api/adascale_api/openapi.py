"""What FastAPI can't know for the OpenAPI text."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from adascale_api.bodies import REFERENCE
from adascale_api.schemas import AllocationBody, GainReportBody, JobSpecBody, RegistrationBody

_BODIES = (GainReportBody, AllocationBody, RegistrationBody, JobSpecBody)


class DescribedApp(FastAPI):
    """A FastAPI application that completes its OpenAPI text.

    It gets the schemas of the bodies, which the service reads by itself; and reading needs a token only
    where `protect_reads` is set.
    """

    protect_reads = False

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI text, made when it is first asked for."""
        if self.openapi_schema is None:
            text = super().openapi()
            _describe_bodies(text)
            if not self.protect_reads:
                _open_reads(text)
            self.openapi_schema = text
        return self.openapi_schema


def _describe_bodies(text: dict[str, Any]) -> None:
    _, described = models_json_schema([(body, "validation") for body in _BODIES], ref_template=REFERENCE)
    text["components"]["schemas"].update(described["$defs"])


def _open_reads(text: dict[str, Any]) -> None:
    for operations in text["paths"].values():
        if "get" in operations:
            operations["get"].pop("security", None)
            for status in ("401", "403"):
                operations["get"]["responses"].pop(status, None)
