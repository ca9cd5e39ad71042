"""The history of the runs in a state folder: a file with a line of JSON for each run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adascale_controller.local.state_dir import StateDir, StateDirError


def record_start(folder: StateDir, job_id: str, now: float) -> list[float]:
    """Record the start of a run, and return the starts of all runs of the job, this one last.

    Args:
        folder: the state folder.
        job_id: the job of the run.
        now: seconds since 1970.

    Raises:
        StateDirError: the folder is another job's.
    """
    runs = _read_lines(folder.history_file)
    other = next((run["job"] for run in runs if run["job"] != job_id), None)
    if other is not None:
        raise StateDirError(
            f"{folder.path} contains the state of job {other}, not of {job_id}: use another folder with "
            "--state-dir"
        )
    with folder.history_file.open("a") as file:
        # The line break comes first, in case a crash cut off the last line.
        file.write("\n" + json.dumps({"job": job_id, "began": now}))
    return [*(run["began"] for run in runs), now]


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file of JSON lines, without lines that a crash cut off."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
