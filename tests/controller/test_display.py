"""The exact output of a run, on a terminal and to a pipe."""

from __future__ import annotations

import io
import os
import pty
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console, RenderableType
from rich.text import Text

from adascale_controller.formatting import (
    OutputConsole,
    age,
    clock,
    count,
    duration,
    plural,
    significant,
    trimmed,
)
from adascale_controller.job_overview import format_result, render_gain, render_valid_replicas
from adascale_controller.local import display as displays
from adascale_controller.local.display import LiveDisplay, PlainDisplay, RunStatus, open_display
from adascale_controller.local.run_report import GenerationSummary, generations_table, repeated_steps
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.reports import GainReport
from adascale_core.views.gain import GainView, PredictionView
from support.definitions import define

REPORT = GainReport(
    generation=2, step=1704, progress=4512.4, epoch=3, replicas=2, local_bsz=32, accumulation=1, scale=16.0,
    gain=7.6, grad_sqr=0.1, grad_var=0.9, step_time=0.01, time=100.0, loss=0.2134,
)  # fmt: skip
STATUS = RunStatus("2 -> 4 replicas", 4512.4, 12_000, REPORT, 42.0)
GENERATIONS = [
    GenerationSummary(1, 1, (4, 4), (1, 1), (1, 1), 1.0, 1.0, 1496, 0, 20.41, None),
    GenerationSummary(2, 2, (31, 64), (1, 1), (15.5, 32), 24.3, 0.81, 757, 18, 1205.5, 2.94),
    GenerationSummary(12, 16, (1024, 2048), (1, 1), (4096, 8192), 901.2, 0.2, 123_456, 0, 3.0, 0.1),
]


def console(*, terminal: bool, width: int = 80) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=terminal, width=width, highlight=False, color_system=None), text


def rendered(renderable: RenderableType, width: int = 80) -> list[str]:
    target, text = console(terminal=False, width=width)
    target.print(renderable)
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_terminal_has_a_live_display_and_a_pipe_a_plain_one() -> None:
    assert isinstance(open_display(console(terminal=True)[0]), LiveDisplay)
    assert isinstance(open_display(console(terminal=False)[0]), PlainDisplay)


def test_a_run_continues_when_its_terminal_is_closed() -> None:
    master, slave = pty.openpty()
    with open(slave, "w") as terminal:  # noqa: PTH123
        display = open_display(Console(file=terminal))
        assert isinstance(display, LiveDisplay)
        display.update(STATUS)
        os.close(master)
        display.update(STATUS)
        display.message("Received SIGHUP: saving and stopping")
        display.close()


@pytest.mark.parametrize("is_stderr_closed", [False, True])
@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_a_run_continues_on_stderr_when_the_reader_of_its_pipe_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_stderr_closed: bool, is_unbuffered: bool
) -> None:
    closed_reader, closed_pipe = os.pipe()
    os.close(closed_reader)
    reader, pipe = os.pipe()
    shown = tmp_path / "stderr"
    with (
        io.TextIOWrapper(
            open(pipe, "wb", buffering=0 if is_unbuffered else -1),  # noqa: PTH123
            write_through=is_unbuffered,
        ) as output,
        open(closed_pipe, "w") if is_stderr_closed else shown.open("w") as stderr,  # noqa: PTH123
    ):
        monkeypatch.setattr(sys, "stderr", stderr)
        display = open_display(OutputConsole(file=output))
        display.message("Training")
        os.close(reader)
        display.message("Interrupted: saving and stopping")
        display.message("Saved")
        display.close()
    if not is_stderr_closed:
        assert shown.read_text().splitlines() == [
            "adascale: the run goes on, with its output here: stdout cannot be written (Broken pipe)",
            "   0:00  Interrupted: saving and stopping",
            "   0:00  Saved",
        ]


def test_the_status_fits_80_columns() -> None:
    target, text = console(terminal=True)
    display = LiveDisplay(target)
    display.update(STATUS)
    display.close()
    lines = [line for line in text.getvalue().splitlines() if "progress" in line or "loss" in line]
    assert lines[0].rstrip().endswith(" progress 4,512 of 12,000  37%  0:42 left")
    assert "  loss 0.213   gain 7.6 of 16 (48%)   batch 64 on 2 replicas   2 -> 4 replicas" in lines[1]


def test_a_terminal_gets_an_address_in_one_piece() -> None:
    target, text = console(terminal=True)
    LiveDisplay(target).print(Text("http://127.0.0.1:8265/" + "a" * 100))
    assert text.getvalue() == f"http://127.0.0.1:8265/{'a' * 100}\n"


def test_unfinished_progress_is_never_shown_as_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "PLAIN_INTERVAL", 0.0)
    target, text = console(terminal=False)
    PlainDisplay(target).update(replace(STATUS, progress=11_999.9))
    assert "99%" in text.getvalue()


def test_a_pipe_gets_unwrapped_messages_and_the_status_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    text = io.StringIO()
    display = PlainDisplay(OutputConsole(text))
    display.message("a long sentence " * 10)
    display.print(Text("a line of a traceback " * 10))
    display.print(generations_table(GENERATIONS))
    display.message("[red]not markup")
    display.update(STATUS)
    monkeypatch.setattr(displays, "PLAIN_INTERVAL", 0.0)
    display.update(STATUS)
    display.update(STATUS)
    assert [line.rstrip() for line in text.getvalue().splitlines()] == [
        f"   0:00  {'a long sentence ' * 10}".rstrip(),
        ("a line of a traceback " * 10).rstrip(),
        *(line for line in rendered(generations_table(GENERATIONS), 200)),
        "   0:00  [red]not markup",
        "   0:00  progress 4,512 of 12,000  37%  loss 0.213  gain 7.6 of 16 (48%)  batch 64 on 2 replicas",
    ]


def test_the_status_of_an_unbounded_job_is_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(displays, "PLAIN_INTERVAL", 0.0)
    target, text = console(terminal=False)
    report = replace(REPORT, loss=None, accumulation=3, replicas=1)
    PlainDisplay(target).update(RunStatus("", 4512.4, None, report))
    assert text.getvalue() == "   0:00  progress 4,512  gain 7.6 of 16 (48%)  batch 96 on 1 replica\n"


def test_the_table_of_generations_fits_80_columns() -> None:
    assert rendered(generations_table(GENERATIONS[:2])) == [
        "                   local                     effi-                  down-",
        "gen.  replicas     batch       scale  gain  ciency  steps  seconds   time",
        "──────────────────────────────────────────────────────────────────────────",
        "   1         1         4           1   1.0    100%  1,496     20.4",
        "   2         2  31 to 64  15.5 to 32    24     81%    757   1205.5  2.9 s",
    ]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_table_that_does_not_fit_is_folded_and_nothing_of_it_is_cut_off(width: int) -> None:
    predictions = [PredictionView(2, 128, 2, 128.0, 101.5, 0.79, 0.01, 12345.6, 101.5, 101.5)]
    job = define("default.test", JobSpec(1000, 100_000, (1, 50_000), 1, 2))
    for table in (
        generations_table(GENERATIONS),
        render_gain(GainView("default.test", REPORT, predictions), 100.0),
        render_valid_replicas(job),
    ):
        lines = rendered(table, width)
        assert max(map(len, lines)) <= width
        assert "…" not in "".join(lines)


def test_the_gain_shows_all_metrics_by_name() -> None:
    report = replace(REPORT, metrics={"recall": 0.5, "accuracy_of_validation": 0.91234})
    lines = rendered(render_gain(GainView("default.test", report, None), 100.0), 80)
    assert max(map(len, lines)) <= 80
    values = [line.split() for line in lines]
    assert values.index(["accuracy_of_validation", "0.912"]) < values.index(["recall", "0.5"])
    assert ["loss", "0.213"] in values
    long = replace(REPORT, metrics={"a" * 64: 0.91234})
    lines = rendered(render_gain(GainView("default.test", long, None), 100.0), 60)
    assert [line.split()[-1] for line in lines if "aaa" in line] == ["0.912"]


def test_repeated_steps_are_reported_if_there_are_any() -> None:
    assert repeated_steps(GENERATIONS) == "18 steps were lost with a replica and repeated"
    assert repeated_steps(GENERATIONS[:1]) is None


def test_a_result_is_shown_with_the_names_that_the_program_gave() -> None:
    assert format_result({"accuracy": 0.97777778, "model": "big"}) == "accuracy 0.9778, model big"


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (count(1234567.8), "1,234,568"),
        (plural(1, "replica"), "1 replica"),
        (significant(0), "0"),
        (significant(0.0001234), "0.000123"),
        (significant(9.99, 2), "10"),
        (significant(123.4), "123"),
        (trimmed(32.0), "32"),
        (trimmed(4096.0), "4,096"),
        (clock(75), "1:15"),
        (clock(3675), "1:01:15"),
        (clock(-1), "0:00"),
        (age(-1), "0s"),
        (age(119.9), "119s"),
        (age(132), "2m12s"),
        (age(180), "3m"),
        (age(3 * 3600 + 60), "3h1m"),
        (age(4 * 3600), "4h"),
        (age(48 * 3600), "2d"),
        (duration(1.23), "1.2 s"),
        (duration(59.97), "1 min 0 s"),
        (duration(7260), "2 h 1 min"),
    ],
)
def test_numbers_are_formatted_for_people(got: str, expected: str) -> None:
    assert got == expected
