"""The output of a run: a message for each event, and the job's status, on a terminal updated in place."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import clock, count, percent, plural, significant, trimmed
from adascale_core.messages.reports import GainReport

PLAIN_INTERVAL = 10.0
"""Seconds between two status lines where the output is not a terminal."""


@dataclass(frozen=True)
class RunStatus:
    """The status of a job."""

    activity: str  # what it does besides training, in a word or two; may be empty
    progress: float = 0.0  # its progress, in steps at `batch_size`
    total: float | None = None  # the progress at which it ends; None if unbounded
    report: GainReport | None = None  # the last report of the active generation; None before the first
    seconds_left: float | None = None  # the predicted seconds until its end; None if unknown


class Display:
    """Shows a run to its user: messages, each with the time since its start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_at = time.monotonic()

    def message(self, text: str, style: str = "") -> None:
        """Print a message, with the time since the start of the run."""
        at = clock(time.monotonic() - self._started_at)
        if not self._console.is_terminal:
            self.print(Text(f"{at:>7}  {text}"))
            return
        line = Table.grid(padding=(0, 2, 0, 0))
        line.add_column(width=7, justify="right", style="dim", no_wrap=True)
        line.add_column(overflow="fold")
        line.add_row(at, Text(text, style))
        self.print(line)

    def print(self, renderable: RenderableType) -> None:
        """Print something without the time."""
        with self._output():
            # A terminal itself wraps a long line, so an address or a path in it can be copied.
            self._console.print(renderable, soft_wrap=isinstance(renderable, Text))

    def update(self, status: RunStatus) -> None:
        """Show the newest status."""
        raise NotImplementedError

    def close(self) -> None:
        """Remove the status; messages may still follow."""

    @contextmanager
    def _output(self) -> Iterator[None]:
        """Keep the run going if the output cannot be written: its reader has ended, or its disk is full."""
        try:
            yield
        except OSError as error:
            self._continue_elsewhere(error)

    def _continue_elsewhere(self, error: OSError) -> None:
        """Write to stderr from now on, or, if the output was a terminal or stderr is closed too, nowhere."""
        output, stderr = self._console.file.fileno(), sys.stderr.fileno()
        note = (
            f"adascale: the run goes on, with its output here: stdout cannot be written ({error.strerror})\n"
        )
        try:
            if self._console.is_terminal:
                raise error
            os.write(stderr, note.encode())
            os.dup2(stderr, output)
        except OSError:
            with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                os.dup2(nowhere.fileno(), output)
        if not getattr(self._console.file, "write_through", False):  # as it is with PYTHONUNBUFFERED
            with self._console.capture():
                pass  # Discards what rich would write again: the file still has it in its buffer.


class LiveDisplay(Display):
    """For a terminal: the status stays at the bottom and is updated in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        # No automatic refresh: it runs in a thread, which must not exist when child processes are forked.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def update(self, status: RunStatus) -> None:
        """Show the newest status."""
        with self._output():
            if not self._live.is_started:
                self._live.start()
            self._live.update(Padding(Group(*_status_lines(status)), (1, 0, 0, 2)), refresh=True)

    def close(self) -> None:
        """Remove the status."""
        with self._output():
            self._live.stop()


class PlainDisplay(Display):
    """For a file or a pipe: prints the status as a line, at intervals."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._printed_at = self._started_at
        self._printed: RunStatus | None = None

    def update(self, status: RunStatus) -> None:
        """Print the status, unless it is unchanged or one was printed less than an interval ago."""
        now = time.monotonic()
        if now - self._printed_at < PLAIN_INTERVAL or status.report is None or status == self._printed:
            return
        self._printed_at, self._printed = now, status
        self.message("  ".join((_progress_text(status), *_training_facts(status))))


def open_display(console: Console) -> Display:
    """Return the display for a console."""
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def _status_lines(status: RunStatus) -> list[RenderableType]:
    bar = ProgressBar(
        total=status.total or 100.0,
        completed=min(status.progress, status.total or 0.0),
        complete_style="cyan",
        finished_style="cyan",
        style="grey30",
    )
    line = Table.grid(expand=True, padding=(0, 2, 0, 0))
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    text = _progress_text(status)
    if status.seconds_left is not None:
        text += f"  {clock(status.seconds_left)} left"
    line.add_row(bar if status.total else Text(""), Text(text))
    facts = Text("   ").join(Text(fact) for fact in (*_training_facts(status), status.activity) if fact)
    facts.stylize("dim")
    return [line, facts]


def _progress_text(status: RunStatus) -> str:
    if status.total is None:
        return f"progress {count(status.progress)}"
    # Rounded down: unfinished jobs do not show 100%.
    done = percent(int(100 * status.progress / status.total) / 100)
    return f"progress {count(status.progress)} of {count(status.total)}  {done}"


def _training_facts(status: RunStatus) -> list[str]:
    report = status.report
    if report is None:
        return []
    facts = [] if report.loss is None else [f"loss {significant(report.loss)}"]
    scale = trimmed(report.scale)
    facts.append(f"gain {significant(report.gain, 2)} of {scale} ({percent(report.efficiency)})")
    facts.append(f"batch {count(report.plan.global_bsz)} on {plural(report.replicas, 'replica')}")
    return facts
