"""Runs the long forms of what CI runs, and what CI leaves out: `make release-check`.

Tests with the mark `release` run here only. Each part has a row in docs/release-check.md, with its result and
minutes, and the date and commit of its run. `make release-check CHECKS="helm kueue"` runs these parts and
leaves the other rows. A part on a cluster is not run without the one that its variable names:

- KUBECONFIG: one with the images of this clone, Kueue (`.ci/kueue`) and helm;
- GANGS_KUBECONFIG: one of Kubernetes 1.37 with PodGroups and the same (`KUBERNETES=1.37.2 .ci/cluster`);
- SIMULATED_KUBECONFIG: one with simulated nodes, which KWOK manages (see bench/at_scale.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "release-check.md"
HEADER = """\
# The last release check

`make release-check` runs the long forms of what CI runs, and writes this table. `.ci/run` prints it, in red
what ran 100 commits ago.

| part | what it shows | result | minutes | date | commit |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass(frozen=True)
class Part:
    """A command that must succeed. It is not run without the environment variable `needs`."""

    name: str
    shows: str
    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    needs: str | None = None


TEN_TIMES = {"ADASCALE_RELEASE_CHECK": "1"}
PARTS = (
    Part("fast", "fast tests, with ten times the examples", ("make", "test"), TEN_TIMES),
    Part("slow", "slow tests, with ten times the examples", ("make", "test-slow"), TEN_TIMES),
    Part("chaos", "200 faults on one machine", ("make", "chaos", "CHAOS=--runs 25 --faults 200")),
    Part(
        "cluster-chaos",
        "200 faults on a cluster",
        # Of each seed three jobs, two of which only run in a release check: 31 faults.
        ("make", "e2e-disturbing", "TESTS=tests/cluster/test_chaos.py"),
        {**TEN_TIMES, "ADASCALE_TEST_CHAOS_SEEDS": ",".join(map(str, range(1, 8)))},
        needs="KUBECONFIG",
    ),
    Part(
        "cluster",
        "the tests on a cluster that CI leaves out, without Kueue and Helm",
        ("make", "e2e-release", "E2E_RELEASE=not kueue and not helm and not chaos"),
        needs="KUBECONFIG",
    ),
    Part("kueue", "queues of Kueue", ("make", "e2e-release", "E2E_RELEASE=kueue"), needs="KUBECONFIG"),
    Part("helm", "a release of the chart", ("make", "e2e-release", "E2E_RELEASE=helm"), needs="KUBECONFIG"),
    Part(
        "kubernetes-1.37",
        "all tests on a cluster, on Kubernetes 1.37 with gangs",
        ("make", "e2e"),
        {"KUBECONFIG": os.environ.get("GANGS_KUBECONFIG", "")},
        needs="GANGS_KUBECONFIG",
    ),
    Part(
        "scale",
        "1,000 jobs on 1,000 simulated nodes",
        (sys.executable, "bench/at_scale.py", "--jobs", "1000", "--nodes", "1000", "--gpus", "4"),
        {"KUBECONFIG": os.environ.get("SIMULATED_KUBECONFIG", "")},
        needs="SIMULATED_KUBECONFIG",
    ),
)


def row(part: Part, result: str, *rest: str) -> str:
    """Return the row of a part."""
    return f"| {' | '.join((part.name, part.shows, result, *rest))} |"


def run(part: Part) -> str:
    """Run a part. Returns its row."""
    print(f"== {part.shows}", flush=True)
    commit = git("rev-parse", "HEAD") + (" with changes" if git("status", "--porcelain") else "")
    began = time.monotonic()
    # Then a test fails that lacks a program or a part of the cluster, and is not skipped.
    environ = {**os.environ, "CI": "true", **part.environ}
    code = subprocess.run(part.command, cwd=ROOT, env=environ, check=False).returncode
    result = "passed" if code == 0 else f"failed with exit code {code}"
    minutes = f"{(time.monotonic() - began) / 60:.1f}"
    return row(part, result, minutes, f"{datetime.now(UTC):%Y-%m-%d}", commit)


def git(*arguments: str) -> str:
    """Return the output of git."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    """Run the parts that are named, or all, and exit with 1 if one has failed."""
    named = sys.argv[1:] or [part.name for part in PARTS]
    if unknown := {*named} - {part.name for part in PARTS}:
        sys.exit(f"no parts {sorted(unknown)}; there are {', '.join(part.name for part in PARTS)}")
    before = REPORT.read_text() if REPORT.exists() else ""
    rows = dict(re.findall(r"^(\| ([\w-]+) \| .*)$", before, re.MULTILINE))
    rows = {name: line for line, name in rows.items()}
    for part in PARTS:
        if part.name in named and (part.needs is None or os.environ.get(part.needs)):
            rows[part.name] = run(part)
        elif part.name not in rows:
            rows[part.name] = row(part, "never run", "", "", "")
        REPORT.write_text(HEADER + "".join(f"{rows[each.name]}\n" for each in PARTS if each.name in rows))
    print(REPORT.read_text())
    sys.exit(any("failed" in rows[name] for name in named))


if __name__ == "__main__":
    main()
