"""What a run prints at its end: the table of generations, and the last line."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from adascale_controller.local.display import PlainDisplay
from adascale_controller.local.replicas import RunResult
from adascale_controller.local.run_report import print_summary, summarize_generations
from adascale_core.messages.reports import GainReport
from support.manifests import make_manifest

SAVED_AT = make_manifest().saved_at


STOPPED = RunResult("", 130, stopped_at=SAVED_AT + 0.5)
AGAIN = "run the same command to resume"


@pytest.mark.parametrize(
    ("result", "progress", "line"),
    [
        (replace(STOPPED, stopped_at=SAVED_AT - 0.5), 12.0, f"Saved at step 9, progress 12; {AGAIN}"),
        (STOPPED, 12.0, f"The last checkpoint is of step 9, progress 12; {AGAIN}"),
        (
            STOPPED,
            3040.0,
            "The last checkpoint is of step 9, progress 12, and the training after it, up to progress 3,040, "
            f"is lost; {AGAIN}",
        ),
        (
            replace(STOPPED, exit_code=1, log="an error"),
            12.0,
            f"The last checkpoint is of step 9, progress 12; {AGAIN}",
        ),
    ],
    ids=["saved", "not saved", "not saved, and some training is lost", "failed"],
)
def test_the_last_line_says_what_the_end_of_the_run_has_saved_and_what_is_lost(
    result: RunResult, progress: float, line: str
) -> None:
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    print_summary(display, result, [], make_manifest(progress=12.0), progress, 3.0)
    assert output.getvalue().splitlines()[-1].split("  ")[-1] == line


REPORT = GainReport(
    generation=1, step=10, progress=10.0, epoch=0, replicas=1, local_bsz=4, accumulation=1, scale=1.0,
    gain=1.0, grad_sqr=0.1, grad_var=0.9, step_time=0.01, time=100.0, loss=0.5,
)  # fmt: skip


def at(generation: int, step: int, progress: float, time: float, **other: float) -> GainReport:
    return replace(REPORT, generation=generation, step=step, progress=progress, time=time, **other)  # type: ignore[arg-type]


def test_a_summary_covers_the_first_to_the_last_report_of_a_generation() -> None:
    (first, second) = summarize_generations(
        [
            at(1, 1, 1.0, 100.0),
            at(1, 100, 100.0, 110.0),
            at(2, 101, 102.0, 112.5, replicas=2, scale=4.0, gain=2.0, local_bsz=8, step_time=0.1),
            at(2, 201, 402.0, 122.5, replicas=2, scale=8.0, gain=4.0, local_bsz=16, step_time=0.1),
        ]
    )
    assert (first.steps, first.gain, first.downtime) == (100, 1.0, None)
    assert first.seconds == pytest.approx(10.01)
    assert (second.replicas, second.local_bsz, second.scale) == (2, (8, 16), (4.0, 8.0))
    assert (second.steps, second.gain, second.efficiency) == (101, 3.0, 0.5)
    assert (second.downtime, second.repeated) == (2.5, 0)
    assert second.seconds == pytest.approx(10.1)


def test_steps_that_were_lost_and_repeated_are_counted() -> None:
    reports = [at(1, 1, 1.0, 100.0), at(1, 90, 90.0, 110.0), at(2, 51, 51.0, 112.0)]
    assert [summary.repeated for summary in summarize_generations(reports)] == [0, 40]


def test_the_time_between_two_runs_is_no_downtime() -> None:
    reports = [at(1, 1, 1.0, 100.0), at(2, 2, 2.0, 500.0)]
    assert summarize_generations(reports, run_starts=[90.0])[1].downtime == 400.0
    resumed = summarize_generations([reports[0], at(2, 1, 1.0, 500.0)], run_starts=[90.0, 498.0])[1]
    assert (resumed.downtime, resumed.repeated) == (None, 0)


def test_no_reports_give_no_summaries() -> None:
    assert summarize_generations([]) == []
