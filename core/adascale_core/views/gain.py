"""What the metrics service answers about gains and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from adascale_core.batch.plans import Prediction
from adascale_core.messages import Message
from adascale_core.messages.allocation import AllocationView
from adascale_core.messages.reports import GainReport


@dataclass(frozen=True)
class StoredReports(Message):
    """The answer to posted gain reports.

    Args:
        stored: the number of reports that are new.
        repeated: the number of reports whose generation and step are stored already; the first ones stay.
        allocation: the job's generations.
        post_interval: seconds until the trainer posts its next reports.
    """

    stored: int
    repeated: int
    allocation: AllocationView
    post_interval: float


@dataclass(frozen=True)
class PredictionView(Message):
    """The predicted performance of a replica count, with the batch that it would use.

    Args:
        replicas, local_bsz, accumulation: the batch plan (K, b, a).
        scale, gain, efficiency: of that plan.
        step_time: seconds per step.
        goodput: steps at `batch_size` per second, with the lower gain.
        gain_low, gain_high: the gains at one standard error of the estimate.
    """

    replicas: int
    local_bsz: int
    accumulation: int
    scale: float
    gain: float
    efficiency: float
    step_time: float
    goodput: float
    gain_low: float
    gain_high: float

    @classmethod
    def of(cls, prediction: Prediction) -> Self:
        """The view of a prediction."""
        plan = prediction.plan
        return cls(
            plan.replicas,
            plan.local_bsz,
            plan.accumulation,
            prediction.scale,
            prediction.gain,
            prediction.efficiency,
            prediction.step_time,
            prediction.goodput,
            *prediction.gain_range,
        )


@dataclass(frozen=True)
class GainView(Message):
    """The latest report of a job, with predictions for other replica counts.

    In JSON the report's members stand beside `job`, `efficiency` and `predictions`.

    Args:
        job: the full job id.
        report: the latest report.
        predictions: for each valid replica count, in rising order; None while the job is not declared or no
            step time is measured.
        local_bsz_limit: the largest local batch size that is used on the type of accelerator of the report,
            since a larger one did not fit into memory; None if none has failed.
    """

    job: str
    report: GainReport
    predictions: Sequence[PredictionView] | None
    local_bsz_limit: int | None = None

    @property
    def efficiency(self) -> float:
        """gain / scale of the report."""
        return self.report.efficiency

    def to_json(self) -> dict[str, Any]:
        """The view as the JSON object's members."""
        predictions = None if self.predictions is None else [asdict(each) for each in self.predictions]
        return {
            **asdict(self.report),
            "job": self.job,
            "efficiency": self.efficiency,
            "local_bsz_limit": self.local_bsz_limit,
            "predictions": predictions,
        }

    @classmethod
    def from_json(cls, members: dict[str, Any]) -> Self:
        """The view from a JSON object's members."""
        predictions = members["predictions"]
        return cls(
            job=members["job"],
            report=GainReport.from_json(members),
            predictions=None
            if predictions is None
            else tuple(PredictionView.from_json(each) for each in predictions),
            local_bsz_limit=members["local_bsz_limit"],
        )


@dataclass(frozen=True)
class HistoryView(Message):
    """Some of a job's reports, by generation and step.

    Args:
        job: the full job id.
        total: the number of reports that are stored.
        points: at most as many of them as requested, evenly spread, the first and the last among them.
    """

    job: str
    total: int
    points: Sequence[GainReport]
