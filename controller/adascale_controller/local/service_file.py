"""The file in a state folder that names the address of the run's metrics service."""

from __future__ import annotations

import json
import os
from pathlib import Path

from adascale_controller.local.state_dir import StateDir


def write(folder: StateDir, url: str, job_id: str) -> None:
    """Write the address of the metrics service of a job's run."""
    draft = folder.service_file.with_suffix(".draft")
    draft.write_text(json.dumps({"url": url, "pid": os.getpid(), "job": job_id}) + "\n")
    draft.replace(folder.service_file)


def remove(folder: StateDir) -> None:
    """Remove the address of the metrics service."""
    folder.service_file.unlink(missing_ok=True)
    folder.port_file.unlink(missing_ok=True)


def find_urls(root: Path, job_id: str) -> list[str]:
    """Return the addresses of the metrics services of a job's runs.

    Args:
        root: a state folder, or a folder of state folders.
        job_id: the job.
    """
    urls = []
    for file in (StateDir(folder).service_file for folder in (root, *sorted(root.glob("*")))):
        try:
            content = json.loads(file.read_text())
            if content["job"] == job_id:
                urls.append(str(content["url"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return urls
