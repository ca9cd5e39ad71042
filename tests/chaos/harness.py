"""Executes runs, checks them, and prints what happens."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos.checks import problems, statistics
from chaos.run import ChaosRun, read_results
from chaos.schedule import Schedule, draw


class Harness:
    """Executes runs and prints what happens.

    Args:
        has_bug: whether the program loses a sample.
        keep: a folder for the files of all runs; None to keep those of failed runs only.
    """

    def __init__(self, *, has_bug: bool = False, keep: Path | None = None) -> None:
        self.faults = 0
        self._has_bug = has_bug
        self._keep = keep
        self._printing = threading.Lock()
        self._expecting = threading.Lock()
        self._expected: dict[str, dict[str, Any]] = {}

    def run_seed(self, seed: int, faults: int) -> bool:
        """Execute the run of a seed; return whether all holds."""
        return not self.run(draw(seed, faults))

    def run(self, schedule: Schedule) -> list[str]:
        """Execute a run, and return what does not hold, as sentences."""
        seed, faults = schedule.seed, len(schedule.faults)
        show = self._shower(seed)
        show(f"{schedule.name}, {faults} faults")
        # The order of shards depends on what happens to the replicas.
        is_repeatable = schedule.fixed and faults and schedule.data != "shards"
        expected = self._undisturbed(schedule) if is_repeatable else None
        folder = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-"))
        outcome = ChaosRun(schedule, folder, show, self._has_bug).execute()
        found = problems(schedule, outcome, folder, expected)
        self.faults += len(outcome.applied)
        show(f"{outcome.seconds:.1f} s, {statistics(outcome, folder)}: {'PROBLEMS' if found else 'ok'}")
        for problem in found:
            show(f"PROBLEM: {problem}")
        if found:
            show(f"again: python -m chaos --seed {seed} --runs 1 --faults {faults}; its files: {folder}")
        elif self._keep is not None:
            shutil.move(folder, self._keep)
        else:
            shutil.rmtree(folder)
        return found

    def _undisturbed(self, schedule: Schedule) -> dict[str, Any]:
        """Return the result of a run of the same job without faults."""
        with self._expecting:
            job = repr((schedule.spec, schedule.data, schedule.loop))
            if job not in self._expected:
                quiet = Schedule(0, schedule.fixed, schedule.spec, data=schedule.data, loop=schedule.loop)
                with tempfile.TemporaryDirectory() as folder:
                    outcome = ChaosRun(quiet, Path(folder), lambda _: None).execute()
                    found = problems(quiet, outcome, Path(folder), None)
                    assert not found, "\n".join(
                        ["a run without faults has problems:", *found, outcome.output]
                    )
                    self._expected[job] = read_results(Path(folder))[0]
            return self._expected[job]

    def _shower(self, seed: int) -> Callable[[str], None]:
        def show(line: str) -> None:
            with self._printing:
                print(f"[{seed}] {line}", flush=True)

        return show
