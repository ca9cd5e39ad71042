"""Summarizes each generation of a job from its gain reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean

from adascale_core.messages.reports import GainReport
from adascale_core.views.jobs import downtime


@dataclass(frozen=True)
class Range:
    """The lowest and the highest of some values."""

    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Return the range of some values."""
        return cls(min(values), max(values))


@dataclass(frozen=True)
class GenerationSummary:
    """A generation."""

    generation: int
    replicas: int
    local_bsz: Range  # samples in a micro-batch of one replica
    accumulation: Range  # micro-batches of one replica in a step
    scale: Range
    gain: float
    efficiency: float  # mean of gain divided by scale
    steps: int
    repeated: int  # those of its steps that the previous generation had made and lost
    seconds: float  # from the start of its first step to the end of its last
    # seconds from the last step of the previous generation to its first step; None for the first
    # generation of a job or a run
    downtime: float | None


def summarize_generations(
    reports: Sequence[GainReport], run_starts: Sequence[float] = ()
) -> list[GenerationSummary]:
    """Return a summary of each generation."""
    ordered = sorted(reports, key=lambda report: (report.generation, report.step))
    groups = [list(group) for _, group in groupby(ordered, key=lambda report: report.generation)]
    previous: list[list[GainReport] | None] = [None, *groups]
    return [_summarize(group, before, run_starts) for before, group in zip(previous, groups, strict=False)]


def _summarize(
    reports: Sequence[GainReport], previous: Sequence[GainReport] | None, run_starts: Sequence[float]
) -> GenerationSummary:
    first, last = reports[0], reports[-1]
    since, repeated = None, 0
    if previous is not None:
        repeated = max(previous[-1].step + 1 - first.step, 0)
        if not any(previous[-1].time < start <= first.time for start in run_starts):
            since = downtime(previous[-1].time, first.time)
    return GenerationSummary(
        generation=first.generation,
        replicas=first.replicas,
        local_bsz=Range.of([report.local_bsz for report in reports]),
        accumulation=Range.of([report.accumulation for report in reports]),
        scale=Range.of([report.scale for report in reports]),
        gain=_mean_gain(reports),
        efficiency=fmean(report.efficiency for report in reports),
        steps=last.step - first.step + 1,
        repeated=repeated,
        seconds=last.time - first.time + first.step_time,
        downtime=since,
    )


def _mean_gain(reports: Sequence[GainReport]) -> float:
    """Return the mean gain of the steps after the first report: progress is the sum of gains."""
    first, last = reports[0], reports[-1]
    if last.step == first.step:
        return last.gain
    return (last.progress - first.progress) / (last.step - first.step)
