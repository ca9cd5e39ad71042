"""The end of a run of tests: how long each file took, and of each failure the assertion and its example.

`ADASCALE_TEST_REPORT` names a file that each run adds both to, as a line of JSON; `.ci/run` prints them all.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

SLOWEST = 30
LINES_OF_A_FAILURE = 8
_REPORT = "ADASCALE_TEST_REPORT"
_SEED = re.compile(r"reproduce_failure|Falsifying example|\bseed\b", re.IGNORECASE)


class SessionReport:
    """A plugin of pytest that adds up the times of files, and collects failures."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._failures: dict[str, list[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a phase of a test."""
        self._seconds[report.location[0]] += report.duration
        if report.failed:
            self._failures[report.nodeid] = [*_summary(report)]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest files after a run of many, and hand both on."""
        if len(self._seconds) > SLOWEST:
            terminalreporter.section(f"the slowest {SLOWEST} files")
            for line in _table(self._seconds):
                terminalreporter.write_line(line)
        if path := os.environ.get(_REPORT):
            with Path(path).open("a") as file:
                file.write(json.dumps([self._seconds, self._failures]) + "\n")


def _summary(report: pytest.TestReport) -> Iterator[str]:
    """Yield what failed where, and the example or the seed with which it fails again."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext.splitlines()
    if crash is not None:
        yield f"{crash.path}:{crash.lineno}"
        yield from crash.message.splitlines()[:LINES_OF_A_FAILURE]
    else:
        yield from text[-LINES_OF_A_FAILURE:]
    found = [number for number, line in enumerate(text) if _SEED.search(line)]
    if found:
        yield from text[found[-1] : found[-1] + 3]


def _table(seconds: Mapping[str, float]) -> Iterator[str]:
    total = sum(seconds.values())
    for file, own in sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST]:
        yield f"{own:8.1f} s  {own / total:4.0%}  {file}"
    yield f"{total:8.1f} s        all {len(seconds)} files, in the processes that ran them"


def print_reports(lines: Iterable[str]) -> None:
    """Print the slowest files and the failures of several runs."""
    seconds: defaultdict[str, float] = defaultdict(float)
    failures: dict[str, list[str]] = {}
    for line in lines:
        own, failed = json.loads(line)
        for file, time in own.items():
            seconds[file] += time
        failures |= failed
    print(f"== the slowest {SLOWEST} files of tests", *_table(seconds), sep="\n")
    for name, summary in failures.items():
        print(f"== failed: {name}", *(f"   {line}" for line in summary), sep="\n")


if __name__ == "__main__":
    print_reports(Path(sys.argv[1]).read_text().splitlines())
