"""What each generation of a job came to, from its reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from adascale_core.messages import GainReport


@dataclass(frozen=True)
class Span:
    """The smallest and the largest of something."""

    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Span:
        """The span of some values."""
        return cls(min(values), max(values))


@dataclass(frozen=True)
class GenerationSummary:
    """One generation.

    Args:
        generation: its number.
        replicas: how many trained in it.
        local_bsz: samples in a micro-batch of one replica.
        scale: batch size over `batch_size`.
        gain: mean gain of a step.
        efficiency: mean gain per scale.
        steps: optimizer steps made.
        repeated: steps of the generation before that were lost with a replica and made again.
        seconds: from before its first step to after its last.
        downtime: seconds from the last step before it to its first; none where there was none, or
            another run began in between.
    """

    generation: int
    replicas: int
    local_bsz: Span
    scale: Span
    gain: float
    efficiency: float
    steps: int
    repeated: int
    seconds: float
    downtime: float | None


def summarize(reports: Sequence[GainReport], runs: Sequence[float] = ()) -> list[GenerationSummary]:
    """A summary of each generation.

    Args:
        reports: in the order of training; a trainer reports the first and the last step of a generation.
        runs: when runs of the job began, in seconds since 1970: what lies between two is no downtime.
    """
    ordered = sorted(reports, key=lambda report: (report.generation, report.step))
    groups = [list(group) for _, group in groupby(ordered, key=lambda report: report.generation)]
    before: list[list[GainReport] | None] = [None, *groups]
    return [_summary(group, former, runs) for former, group in zip(before, groups, strict=False)]


def _summary(
    reports: Sequence[GainReport], before: Sequence[GainReport] | None, runs: Sequence[float]
) -> GenerationSummary:
    first, last = reports[0], reports[-1]
    downtime, repeated = None, 0
    if before is not None:
        repeated = max(before[-1].step + 1 - first.step, 0)
        if not any(before[-1].time < began <= first.time for began in runs):
            downtime = max(first.time - before[-1].time, 0.0)
    return GenerationSummary(
        generation=first.generation,
        replicas=first.replicas,
        local_bsz=Span.of([report.local_bsz for report in reports]),
        scale=Span.of([report.scale for report in reports]),
        gain=_mean_gain(reports),
        efficiency=fmean(report.efficiency for report in reports),
        steps=last.step - first.step + 1,
        repeated=repeated,
        seconds=last.time - first.time + first.step_time,
        downtime=downtime,
    )


def _mean_gain(reports: Sequence[GainReport]) -> float:
    """Over the steps between the first report and the last: progress is the sum of gains."""
    first, last = reports[0], reports[-1]
    if last.step == first.step:
        return last.gain
    return (last.progress - first.progress) / (last.step - first.step)
