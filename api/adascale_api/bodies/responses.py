"""Bodies of responses that are not messages of the core."""

from dataclasses import dataclass
from typing import Self

from pydantic import Field

from adascale_api.bodies.requests import GainReportBody
from adascale_core.views.gain import GainView, PredictionView


class GainResponse(GainReportBody):
    """The latest report of a job, with predictions for other replica counts."""

    job: str = Field(description="The full job id.")
    efficiency: float = Field(description="gain / scale.")
    local_bsz_limit: int | None = Field(
        description="The largest local batch size that is used on the type of accelerator of the report, "
        "since a larger one did not fit into memory; null if none has failed."
    )
    predictions: list[PredictionView] | None = Field(
        description="One per valid replica count; null until the job is declared and a step time is known."
    )

    @classmethod
    def of(cls, view: GainView) -> Self:
        """Return the response for a view."""
        predictions = None if view.predictions is None else list(view.predictions)
        return cls(
            **vars(view.report),
            job=view.job,
            efficiency=view.efficiency,
            local_bsz_limit=view.local_bsz_limit,
            predictions=predictions,
        )


@dataclass(frozen=True)
class HealthResponse:
    """The result of a probe."""

    status: str
