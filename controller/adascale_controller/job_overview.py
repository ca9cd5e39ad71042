"""The status of a job as `adascale list` and `adascale status` show it, on one machine and on a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from adascale_controller.formatting import age, columns, count, memory, percent, plural
from adascale_core.errors import AdaScaleError
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.job_summary import JobStateName
from adascale_core.views.jobs import JobView, ReplicaView

_HEADER = (
    "NAME", "STATE", "REPLICAS", "DESIRED", "BATCH", "GAIN", "EFFICIENCY", "PROGRESS", "LOSS", "RESTARTS",
    "AGE", "FOLDER",
)  # fmt: skip

MAX_REASON = 80
"""Characters of a reason in a list; `adascale status` has all of it."""


class NoSuchJobError(AdaScaleError):
    """A job that this machine, or the namespace of the cluster, does not have."""


@dataclass(frozen=True)
class JobOverview:
    """The status of a job."""

    name: str
    namespace: str
    shown_name: str  # its name in a list, with which commands select it
    state: JobStateName
    replicas: int
    desired: int
    began: float  # when its first run began, or when it was created, in seconds since 1970
    batch_size: int | None = None  # the global batch size, in samples; None if unknown, as all that follow
    local_batch_limit: int | None = None  # the largest local batch that fits into memory, in samples
    gain: float | None = None  # the steps at `batchSize` that one step replaces
    efficiency: float | None = None
    progress: float | None = None
    total: float | None = None  # the progress at which it ends
    progress_text: str = ""  # progress as a share of `total`, or else the number; empty if unknown
    restarts: int | None = None
    reason: str = ""  # why it has failed, or does not train; empty if it does
    spares: int = 0
    loss: float | None = None
    view: JobView | None = None  # what the metrics service answers about it; None if it is not asked
    explained: str = ""  # what explains its state
    runs: bool = True  # whether it runs, or waits to run
    checkpoint: str = ""  # its newest checkpoint, or where its checkpoints are
    # names and values of more facts, such as files; empty values are left out
    places: Sequence[tuple[str, str]] = ()
    # of a job on this machine alone
    exit_code: int | None = None  # of its last run
    process: int | None = None
    url: str | None = None  # of its metrics service
    state_dir: str | None = None
    checkpoint_step: int | None = None
    checkpoint_error: str | None = None  # why its checkpoints cannot be read
    result: Mapping[str, float | str] = field(default_factory=dict)  # as its program has reported it
    last_began: float = 0.0  # when its last run began, in seconds since 1970

    @property
    def id(self) -> str:
        """`<namespace>.<name>`."""
        return f"{self.namespace}.{self.name}"

    @property
    def members(self) -> Sequence[ReplicaView]:
        """The last registrations of its replicas; empty if they are unknown."""
        return self.view.replicas if self.view is not None else ()

    def to_json(self) -> dict[str, Any]:
        """Return the status as members of a JSON object, named as in the status of an AdaScaleJob."""
        members = {name: getattr(self, attribute) for name, attribute in _MEMBERS.items()}
        replicas = [
            {
                "replica": each.replica,
                "state": each.state,
                "generation": each.generation,
                "process": each.pid or None,
            }
            for each in self.members
        ]
        return members | {"result": dict(self.result), "replicaStatuses": replicas}


_MEMBERS = {
    "name": "name", "namespace": "namespace", "state": "state", "replicas": "replicas",
    "desiredReplicas": "desired", "spareReplicas": "spares", "batchSize": "batch_size",
    "localBatchLimit": "local_batch_limit", "gain": "gain", "efficiency": "efficiency",
    "progress": "progress", "progressText": "progress_text", "loss": "loss", "restarts": "restarts",
    "startTime": "began", "reason": "reason", "exitCode": "exit_code", "process": "process", "url": "url",
    "stateDir": "state_dir", "checkpointStep": "checkpoint_step", "checkpointError": "checkpoint_error",
}  # fmt: skip
"""The members of the JSON object, and the attributes that they have."""


def render_list(summaries: Sequence[JobOverview], now: float) -> str:
    """Return a line for each job, the newest first, below a header; `now` is in seconds since 1970.

    The reasons are in a last column, if there are any.
    """
    summaries = sorted(summaries, key=lambda summary: -summary.last_began)
    rows = [_HEADER, *(_row(summary, now) for summary in summaries)]
    reasons = ["REASON", *(_shortened(summary.reason) for summary in summaries)]
    if any(reasons[1:]):
        rows = [(*row, reason) for row, reason in zip(rows, reasons, strict=True)]
    return columns(rows)


def render_status(summary: JobOverview, now: float, slow: str = "") -> str:
    """Return the status with its replicas and files; `now` is in seconds since 1970."""
    view, limit, spares = summary.view, summary.local_batch_limit, summary.spares
    waiting = f", {plural(spares, 'spare')} waiting" if spares else ""
    facts = [
        ("name", summary.id),
        ("state", f"{summary.state}{summary.explained}"),
        ("reason", summary.reason.replace("\n", " ")),
        ("age", age(now - summary.began)),
        ("replicas", f"{summary.replicas} of {summary.desired} desired{waiting}" if summary.runs else "0"),
        ("batch size", "" if summary.batch_size is None else count(summary.batch_size)),
        ("memory", "" if limit is None else memory(limit)),
        ("gain", _number(summary.gain)),
        ("efficiency", _percent(summary.efficiency)),
        ("progress", _progress(summary)),
        ("loss", _number(summary.loss)),
        ("restarts", "" if summary.restarts is None else str(summary.restarts)),
        ("stall", (view.stall if view else None) or ""),
        ("slow", slow or (view.slowness if view else "")),
        ("checkpoint", summary.checkpoint),
        ("result", format_result(summary.result)),
        *summary.places,
    ]
    text = columns([(name, value) for name, value in facts if value])
    if not summary.members:
        return text
    header = ("REPLICA", "STATE", "GENERATION", "PROCESS")
    rows = [
        (str(each.replica), each.state, str(each.generation), str(each.pid or "")) for each in summary.members
    ]
    return f"{text}\n\n{columns([header, *rows])}"


def describe_size(spec: JobSpec, most: int) -> str:
    """Return the batch sizes, the replica counts up to `most`, and the end of a job, in a line."""
    batch = f"batch size {spec.batch_size}" + (f" to {spec.max_batch_size}" if spec.max_batch_size else "")
    fewest = f"{spec.min_replicas} to " if spec.min_replicas < most else ""
    steps = f", to progress {count(spec.scale_invariant_steps)}" if spec.scale_invariant_steps else ""
    if spec.train_samples is not None:
        steps = f", for {plural(spec.train_samples, 'sample')}"
    return f"{batch}, {fewest}{plural(most, 'replica')}{steps}"


def format_result(result: Mapping[str, float | str]) -> str:
    """Return the result that the program reported, as in `accuracy 0.9778, model large`."""
    return ", ".join(f"{name} {_format_value(value)}" for name, value in result.items())


def _format_value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _row(summary: JobOverview, now: float) -> tuple[str, ...]:
    return (
        summary.shown_name,
        summary.state,
        str(summary.replicas),
        str(summary.desired),
        "" if summary.batch_size is None else str(summary.batch_size),
        _number(summary.gain),
        _percent(summary.efficiency),
        summary.progress_text,
        _number(summary.loss),
        "" if summary.restarts is None else str(summary.restarts),
        age(now - summary.began),
        _folder(summary.state_dir or ""),
    )


def _folder(path: str) -> str:
    """Return a folder as short as it can be read."""
    home = str(Path.home())
    return f"~{path.removeprefix(home)}" if path.startswith(f"{home}/") else path


def _progress(summary: JobOverview) -> str:
    if summary.progress is None:
        return ""
    if summary.total is None:
        return summary.progress_text
    return f"{count(summary.progress)} of {count(summary.total)} ({summary.progress_text})"


def _shortened(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= MAX_REASON else f"{line[: MAX_REASON - 1]}…"


def _percent(value: float | None) -> str:
    return "" if value is None else percent(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
