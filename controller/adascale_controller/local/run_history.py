"""The history of the runs in a state folder: a file with a line of JSON for each start and end of a run."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from adascale_controller.local.state_dir import StateDir, StateDirError


@dataclass(frozen=True)
class RunRecord:
    """A run.

    Args:
        job: the id of its job.
        began: when it started, in seconds since 1970.
        steps: the job's scaleInvariantSteps; None if unset.
        checkpoints: the folder or URL of the job's checkpoints; None for the folder in the state folder.
        exit_code: its exit code; None if it runs or was killed.
    """

    job: str
    began: float
    steps: int | None = None
    checkpoints: str | None = None
    exit_code: int | None = None


def require_folder_of(folder: StateDir, job: str) -> None:
    """Check that a state folder has no state of another job than `job`, which is its id.

    Raises:
        StateDirError: it has.
    """
    other = next((run.job for run in read_runs(folder) if run.job != job), None)
    if other is not None:
        raise StateDirError(
            f"{folder.path} contains the state of job {other}, not of {job}: use another folder with "
            "--state-dir"
        )


def record_start(folder: StateDir, run: RunRecord) -> list[float]:
    """Record the start of a run, and return the starts of all runs in the folder, this one last."""
    runs = read_runs(folder)
    start = {"job": run.job, "began": run.began, "steps": run.steps, "checkpoints": run.checkpoints}
    _append(folder.history_file, start)
    return [*(earlier.began for earlier in runs), run.began]


def record_end(folder: StateDir, exit_code: int) -> None:
    """Record the end of the last run."""
    _append(folder.history_file, {"exit_code": exit_code})


def read_runs(folder: StateDir) -> list[RunRecord]:
    """Return the runs in a state folder, the latest last; empty if it is no state folder."""
    runs: list[RunRecord] = []
    for line in _read_lines(folder.history_file):
        if "began" in line:
            runs.append(RunRecord(line["job"], line["began"], line.get("steps"), line.get("checkpoints")))
        elif runs:
            runs[-1] = replace(runs[-1], exit_code=line.get("exit_code"))
    return runs


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        # The line break comes first, in case a crash cut off the last line.
        file.write("\n" + json.dumps(line))


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without lines that a crash cut off."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return []
    lines = []
    for line in text.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
