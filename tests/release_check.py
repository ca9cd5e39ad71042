"""Runs the long forms of what CI runs in short: `make release-check`.

Tests with the mark `release` run here only. It writes the date, the commit, and the result and duration of
each part to docs/release-check.md. A part that needs a cluster is reported as not run without one: KUBECONFIG
names it. RELEASE_KUBECONFIG names another one for the benchmark on simulated nodes, which KWOK manages (see
bench/at_scale.py).
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "release-check.md"


@dataclass(frozen=True)
class Part:
    """A command that must succeed.

    Args:
        name: what it shows.
        command: in the folder of the clone.
        environ: variables beside those of this process.
        needs: a variable without which it cannot run.
    """

    name: str
    command: tuple[str, ...]
    environ: dict[str, str]
    needs: str | None = None


PARTS = (
    Part("fast tests, with ten times the examples", ("make", "test"), {"ADASCALE_RELEASE_CHECK": "1"}),
    Part("slow tests, with ten times the examples", ("make", "test-slow"), {"ADASCALE_RELEASE_CHECK": "1"}),
    Part("200 faults on one machine", ("make", "chaos", "CHAOS=--runs 25 --faults 200"), {}),
    Part(
        "30 faults on a cluster",
        ("make", "e2e", "TESTS=tests/cluster/test_chaos.py"),
        {"ADASCALE_TEST_CHAOS_SEEDS": "1,2,3"},
        needs="KUBECONFIG",
    ),
    Part(
        "1,000 jobs on 1,000 simulated nodes",
        (sys.executable, "bench/at_scale.py", "--jobs", "1000", "--nodes", "1000", "--gpus", "4"),
        {"KUBECONFIG": os.environ.get("RELEASE_KUBECONFIG", "")},
        needs="RELEASE_KUBECONFIG",
    ),
)


def run(part: Part) -> tuple[str, float]:
    """Run a part. Returns its result and its seconds."""
    if part.needs is not None and not os.environ.get(part.needs):
        return f"not run: {part.needs} is not set", 0.0
    print(f"== {part.name}", flush=True)
    began = time.monotonic()
    code = subprocess.run(part.command, cwd=ROOT, env={**os.environ, **part.environ}, check=False).returncode
    return "passed" if code == 0 else f"failed with exit code {code}", time.monotonic() - began


def git(*arguments: str) -> str:
    """Return the output of git."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    """Run all parts, and exit with 1 if one has failed."""
    commit = git("rev-parse", "HEAD") + (", with changes" if git("status", "--porcelain") else "")
    begun = datetime.now(UTC)
    results = [(part, *run(part)) for part in PARTS]
    lines = [
        "# The last release check",
        "",
        f"`make release-check` at {begun:%Y-%m-%d %H:%M} UTC, commit {commit}, with {os.cpu_count()} "
        f"processors and Python {platform.python_version()}.",
        "",
        "| part | result | minutes |",
        "| --- | --- | --- |",
        *(f"| {part.name} | {result} | {seconds / 60:.1f} |" for part, result, seconds in results),
        "",
    ]
    REPORT.write_text("\n".join(lines))
    print(REPORT.read_text())
    sys.exit(any(result.startswith("failed") for _, result, _ in results))


if __name__ == "__main__":
    main()
