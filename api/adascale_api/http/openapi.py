"""The parts of the OpenAPI document that FastAPI does not generate."""

from typing import Any

from fastapi import FastAPI
from pydantic.json_schema import models_json_schema

from adascale_api.bodies.requests import (
    AllocationBody,
    DecisionBody,
    GainReportBody,
    JobSpecBody,
    RegistrationBody,
)
from adascale_api.http.request_body import REFERENCE

_REDACTED = frozenset({"/jobs", "/jobs/{job}", "/jobs/{job}/allocation", "/changes"})
"""Reads whose answers have less without a token."""
_BODIES: tuple[Any, ...] = (GainReportBody, AllocationBody, RegistrationBody, JobSpecBody, DecisionBody)


class DescribedApp(FastAPI):
    """A FastAPI application that completes its OpenAPI document.

    It adds the schemas of the request bodies, and removes the security requirement of reads unless the
    service protects reads.
    """

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, generated on the first call."""
        if self.openapi_schema is None:
            document = super().openapi()
            _add_bodies(document)
            if not self.state.service.settings.protect_reads:
                _remove_security_of_reads(document)
            self.openapi_schema = document
        return self.openapi_schema


def _add_bodies(document: dict[str, Any]) -> None:
    _, schemas = models_json_schema([(body, "validation") for body in _BODIES], ref_template=REFERENCE)
    document["components"]["schemas"].update(schemas["$defs"])


def _remove_security_of_reads(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        if "get" in operations:
            operation = operations["get"]
            operation["responses"].pop("403", None)
            if path in _REDACTED and "security" in operation:
                operation["security"].insert(0, {})  # a token is optional
            else:
                operation.pop("security", None)
                operation["responses"].pop("401", None)
