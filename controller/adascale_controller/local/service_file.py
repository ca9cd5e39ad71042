"""The file in a state folder that names the address of the run's metrics service."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

from adascale_controller.local.state_dir import StateDir


@dataclass(frozen=True)
class RunningService:
    """The metrics service of a run."""

    url: str
    pid: int
    job: str
    stopping: bool = False  # whether the run saves and stops
    read_token: str = ""  # the token with which the page shows the output of replicas


def write(folder: StateDir, service: RunningService) -> None:
    """Write the address of the metrics service of a job's run."""
    draft = folder.service_file.with_suffix(".draft")
    # Only this user may read the token.
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)
    draft.write_text(json.dumps(asdict(service)) + "\n")
    draft.replace(folder.service_file)


def mark_stopping(folder: StateDir) -> None:
    """Record that the run saves and stops, so that `adascale stop` does not request it again."""
    service = read(folder)
    if service is not None:
        write(folder, replace(service, stopping=True))


def remove(folder: StateDir) -> None:
    """Remove the address of the metrics service."""
    folder.service_file.unlink(missing_ok=True)
    folder.port_file.unlink(missing_ok=True)


def read(folder: StateDir) -> RunningService | None:
    """Return the metrics service of the run in a state folder; None if there is none."""
    try:
        content = json.loads(folder.service_file.read_text())
        return RunningService(
            str(content["url"]),
            int(content["pid"]),
            str(content["job"]),
            bool(content.get("stopping")),
            str(content.get("read_token", "")),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
