"""What must hold after a run, whatever has happened to it."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

from chaos.run import Outcome, read_journals, read_results
from chaos.schedule import Schedule

MAX_MISSED = 0.01
"""The largest share of the time of replicas of which the service may not know the cause."""
LEAST_MISSED = 1.0
"""Seconds that are not noticed: two agents on a busy machine take 0.3 to 0.7 s to begin to count."""
_DAMAGE = re.compile(r"adascale: .*checkpoint-\d+.* is (missing|damaged)")
"""A message about a checkpoint that a run has damaged itself."""


def problems(
    schedule: Schedule, outcome: Outcome, folder: Path, expected: dict[str, Any] | None
) -> list[str]:
    """Return what does not hold, as sentences.

    Args:
        schedule: of the run.
        outcome: of the run.
        folder: of the run.
        expected: the result of an undisturbed run of the same fixed number of replicas; None for others.
    """
    found = [outcome.problem] if outcome.problem else []
    found += [f"a process was left: {process}" for process in outcome.left]
    found += [
        line.strip() for line in outcome.output.splitlines() if re.search(r"Failure \d+ of the program", line)
    ]
    if "Traceback" in outcome.output:
        found.append("adascale run printed a traceback")
    for log in sorted((folder / "state" / "logs").glob("*.log")):
        text = log.read_text(errors="replace")
        if "Traceback" in text:
            found.append(f"{log.name} has a traceback: {text[text.index('Traceback') :][-300:].strip()}")
        found += [f"{log.name}: {line}" for line in text.splitlines() if _DAMAGE.search(line)]
    for steps in read_journals(folder):
        for earlier, later in pairwise(steps):
            if later["generation"] < earlier["generation"]:
                found.append(
                    f"a process trained in generation {later['generation']} after {earlier['generation']}"
                )
    counted = sum(outcome.replica_seconds.values())
    missed = abs(counted - outcome.replica_time) - outcome.unknown_time
    if outcome.problem is None and missed > max(MAX_MISSED * outcome.replica_time, LEAST_MISSED):
        found.append(f"the causes of {counted:.1f} s are known, of {outcome.replica_time:.1f} s of replicas")
    results = read_results(folder)
    if outcome.problem is None and not results:
        found.append("no trainer has written a result")
    for result in results:
        found += _problems_of(result, schedule)
    if len({result["weights"] for result in results}) > 1:
        found.append("the replicas ended with different weights")
    if expected is not None:
        for part in ("weights", "samples", "steps"):
            values = {result[part] for result in results}
            if values - {expected[part]}:
                found.append(f"the {part} are {sorted(values)}, those of an undisturbed run {expected[part]}")
    return list(dict.fromkeys(found))


def _problems_of(result: dict[str, Any], schedule: Schedule) -> list[str]:
    found = list(result["problems"])
    generations = [generation for generation, _ in result["generations"]]
    if generations != sorted(set(generations)):
        found.append(f"generations did not rise: {generations}")
    if not result["finite"]:
        found.append("weights are not finite")
    if not schedule.later_spec and result["progress"] < schedule.spec["scaleInvariantSteps"]:
        found.append(f"training ended at progress {result['progress']}")
    if schedule.fixed and result["samples"] != result["steps"] * schedule.spec["batchSize"]:
        found.append(f"{result['steps']} steps have {result['samples']} samples")
    return found


def _replica_time(seconds: dict[str, float]) -> str:
    shares = [f"{cause} {each / sum(seconds.values()):.1%}" for cause, each in seconds.items() if each]
    return f"{sum(seconds.values()):.1f} s of replicas: {', '.join(shares)}"


def statistics(outcome: Outcome, folder: Path) -> str:
    """Return what a run did, in short: steps, generations, steps trained twice, the longest standstill."""
    journals = read_journals(folder)
    results = read_results(folder)
    moments = sorted(entry["time"] for steps in journals for entry in steps)
    longest = max((later - earlier for earlier, later in pairwise(moments)), default=0.0)
    generations = {entry["generation"] for steps in journals for entry in steps}
    steps = results[-1]["steps"] if results else 0
    # Steps of processes that went back behind what another process had reached before.
    repeated, furthest = 0, 0
    for entry in sorted((entry for steps in journals for entry in steps), key=lambda entry: entry["time"]):
        if entry["step"] < furthest - 1:
            repeated += furthest - entry["step"]
            furthest = entry["step"]
        furthest = max(furthest, entry["step"])
    return (
        f"{steps} steps, {len(generations)} generations, {repeated} steps repeated, "
        f"longest standstill {longest:.1f} s, {_replica_time(outcome.replica_seconds)}"
    )
