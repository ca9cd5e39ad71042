"""The most replicas that a run may have at once, and the requests of `adascale scale` for another limit.

A request and its answer are files in the state folder. The control loop reads the request when it starts, and
at each iteration. A request is for one run, by the id of its process, so it may be written before the run
reads any.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adascale_controller.formatting import plural
from adascale_controller.local.display import Display
from adascale_controller.local.machine import cpu_cores, default_replica_limit
from adascale_controller.local.state_dir import StateDir, replace_file
from adascale_controller.schema import JobDefinition
from adascale_core.errors import AdaScaleError


class ReplicaLimitError(AdaScaleError):
    """A limit that is too low for the job, or too high for the machine."""

    exit_code = 2


@dataclass(frozen=True)
class ReplicaLimit:
    """The most replicas that a run may have at once."""

    replicas: int
    spares: int = 0  # the number of spares beyond them
    source: str = field(default="", compare=False)  # why it is below maxReplicas; empty if it is not

    def __str__(self) -> str:
        """Return both numbers in words."""
        spares = f" and {plural(self.spares, 'spare')}" if self.spares else ""
        return f"{plural(self.replicas, 'replica')}{spares}"


def replica_limit(
    job: JobDefinition, requested: int | None, devices: Sequence[str], *, is_scaled: bool = False
) -> ReplicaLimit:
    """Return the most replicas at once, at most those `requested` with --replicas, spares included.

    Spares take the places of replicas beyond the fewest that the job needs. As with `kubectl scale`, a
    request of `adascale scale` replaces spec.replicaLimit.
    """
    spec = job.spec
    processes = spec.processes_per_replica or 1
    limit = requested or max(default_replica_limit(devices) // processes, 1)
    if devices and limit * processes > len(devices):
        raise ReplicaLimitError(
            f"--replicas {limit} exceeds the {plural(len(devices), 'GPU')} of this machine, and each replica "
            f"needs {'one' if processes == 1 else processes}; to train on the CPU, set CUDA_VISIBLE_DEVICES "
            "to the empty string"
        )
    source = f"--replicas is {limit}"
    if not requested:
        machine = plural(len(devices), "GPU") if devices else f"{plural(cpu_cores(), 'core')} and no GPU"
        source = f"the default on this machine, with {machine}, is {limit}"
    fewest = job.core_replicas
    needs = f"{job.short_id} needs at least {plural(fewest, 'replica')}"
    if fewest > limit:
        raise ReplicaLimitError(
            f"{needs}, but {source}: use --replicas {fewest} or more, or lower spec.minReplicas"
        )
    specified = spec.max_replicas if is_scaled or spec.replica_limit is None else spec.replica_limit
    if fewest > specified:
        raise ReplicaLimitError(
            f"{needs}, but spec.replicaLimit is {specified}: raise spec.replicaLimit to {fewest} or more, or "
            "lower spec.minReplicas"
        )
    spares = min(spec.spare_replicas, limit - fewest)
    most = min(limit - spares, specified, spec.max_replicas)
    if most == spec.max_replicas:
        source = ""
    elif most == specified:
        source = f"spec.replicaLimit is {specified}"
    return ReplicaLimit(most, spares, source)


class ScaleRequests:
    """Reads and answers the requests. A request for an earlier run is deleted."""

    def __init__(
        self, folder: StateDir, job: JobDefinition, devices: Sequence[str], display: Display
    ) -> None:
        self._folder = folder
        self._job = job
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
            replicas = int(request["replicas"])
            requested = replica_limit(self._job, replicas, self._devices, is_scaled=True)
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
    """Request the run in a state folder to use at most `replicas`, and return the limit that it uses.

    None if it does not answer within `timeout` seconds; the request is kept.
    """
    request_id = secrets.token_hex(8)
    _write(folder.scale_request_file, {"id": request_id, "process": process, "replicas": replicas})
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        answer = _read(folder.scale_answer_file)
        if answer is not None and answer.get("id") == request_id:
            folder.scale_answer_file.unlink(missing_ok=True)
            if "error" in answer:
                raise AdaScaleError(answer["error"])
            return ReplicaLimit(int(answer["limit"]), int(answer["spares"]))
        if not runs():
            raise AdaScaleError("the run has ended before it read the request")
        time.sleep(0.05)
    return None


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(path, json.dumps(content).encode() + b"\n")


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None
