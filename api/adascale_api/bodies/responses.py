"""Bodies of responses that are not messages of the core."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, create_model

from adascale_api.bodies.requests import REPORT_FIELDS
from adascale_core.views.gain import PredictionView

_PREDICTIONS = "One per valid replica count; null until the job is declared and a step time is known."
_LIMIT = (
    "The largest local batch size that is used on the type of accelerator of the report, since a larger one "
    "did not fit into memory; null if none has failed."
)
GainResponse = create_model(
    "GainResponse",
    __doc__="The latest report of a job, with predictions for other replica counts.",
    **REPORT_FIELDS,
    job=Annotated[str, Field(description="The full job id.")],
    efficiency=Annotated[float, Field(description="gain / scale.")],
    local_bsz_limit=Annotated[int | None, Field(description=_LIMIT)],
    predictions=Annotated[list[PredictionView] | None, Field(description=_PREDICTIONS)],
)
"""The JSON of a `GainView`, for the OpenAPI document."""


@dataclass(frozen=True)
class HealthResponse:
    """The result of a probe."""

    status: str
