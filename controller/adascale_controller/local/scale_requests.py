"""Requests of `adascale scale` for another limit of replicas, which the run answers.

Both are files in the state folder. The control loop reads the request when it starts, and at each iteration.
A request is for one run, by the id of its process, so it is kept from when this process holds the folder.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from adascale_controller.job import Job
from adascale_controller.local.display import Display
from adascale_controller.local.replica_limit import ReplicaLimit, ReplicaLimitError, replica_limit
from adascale_controller.local.state_dir import StateDir
from adascale_core.errors import AdaScaleError


class ScaleError(AdaScaleError):
    """A request that the run refuses, or does not read before it ends."""


class ScaleRequests:
    """Reads and answers the requests. A request for an earlier run is deleted."""

    def __init__(self, folder: StateDir, job: Job, devices: Sequence[str], display: Display) -> None:
        self._folder = folder
        # As with `kubectl scale`, the request replaces spec.replicaLimit.
        self._job = replace(job, replica_limit=None)
        self._devices = devices
        self._display = display

    def apply(self, limit: ReplicaLimit) -> ReplicaLimit:
        """Return the limit of replicas: of a new request if it is valid, else `limit`."""
        request = _read(self._folder.scale_request_file)
        if request is None:
            return limit
        self._folder.scale_request_file.unlink(missing_ok=True)
        if request.get("process") != os.getpid():
            return limit
        try:
            requested = replica_limit(self._job, int(request["replicas"]), self._devices)
        except ReplicaLimitError as error:
            self._answer(request, {"error": str(error)})
            self._display.message(f"A request of `adascale scale` is refused: {error}")
            return limit
        self._answer(request, {"limit": requested.replicas, "spares": requested.spares})
        if requested != limit:
            was = limit if requested.spares or limit.spares else limit.replicas
            self._display.message(f"Scaled to at most {requested}, was {was}")
        return requested

    def _answer(self, request: dict[str, Any], answer: dict[str, Any]) -> None:
        _write(self._folder.scale_answer_file, {"id": request.get("id"), **answer})


def request_limit(
    folder: StateDir, replicas: int, process: int, runs: Callable[[], bool], timeout: float
) -> ReplicaLimit | None:
    """Request the run in a state folder to use at most `replicas`, and return the limit that it uses."""
    request_id = secrets.token_hex(8)
    _write(folder.scale_request_file, {"id": request_id, "process": process, "replicas": replicas})
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = _read(folder.scale_answer_file)
        if answer is not None and answer.get("id") == request_id:
            folder.scale_answer_file.unlink(missing_ok=True)
            if "error" in answer:
                raise ScaleError(answer["error"])
            return ReplicaLimit(int(answer["limit"]), int(answer["spares"]))
        if not runs():
            raise ScaleError("the run has ended before it read the request")
        time.sleep(0.05)
    return None


def _write(path: Path, content: dict[str, Any]) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content) + "\n")
    draft.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
