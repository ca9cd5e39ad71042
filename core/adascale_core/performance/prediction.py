"""The predicted performance of a job on a number of replicas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from adascale_core.batch.gain import GradientEstimate
from adascale_core.batch.plans import (
    DEFAULT_EFFICIENCY,
    BatchBounds,
    BatchPlan,
    EfficiencyBound,
    plan_batch,
)
from adascale_core.performance.throughput import StepTimeModel


@dataclass(frozen=True)
class Prediction:
    """The predicted performance of a replica count."""

    plan: BatchPlan  # the batch plan that the job would use
    scale: float
    gain: float  # the gain of that plan, in steps at `batch_size` per step
    step_time: float  # seconds per optimizer step
    # the gains at one standard error of the estimate; twice `gain` if the error is not known
    gain_range: tuple[float, float]

    @property
    def efficiency(self) -> float:
        """gain / scale."""
        return self.gain / self.scale

    @property
    def goodput(self) -> float:
        """Steps at `batch_size` per second: throughput times gain (Qiao et al. 2021, section 3).

        With the lower gain of the range, which decides.
        """
        return self.gain_range[0] / self.step_time


def predict(
    bounds: BatchBounds,
    counts: Iterable[int],
    estimate: GradientEstimate,
    model: StepTimeModel,
    efficiency: EfficiencyBound = DEFAULT_EFFICIENCY,
) -> dict[int, Prediction]:
    """Return the prediction for each replica count."""
    predictions = {}
    for count in counts:
        plan = plan_batch(
            bounds,
            count,
            estimate=estimate.cautious,
            throughput=model.throughput,
            efficiency=efficiency,
        )
        scale = plan.scale(bounds)
        predictions[count] = Prediction(
            plan, scale, estimate.gain(scale), model.step_time(plan), estimate.gain_range(scale)
        )
    return predictions
