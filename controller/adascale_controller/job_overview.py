"""A job as the commands show it: its status, its gain, the decision about it, its valid replica counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic.alias_generators import to_camel
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from adascale_controller.formatting import (
    age,
    clock,
    columns,
    count,
    describe_batch,
    duration,
    local_batch,
    memory,
    numbers_table,
    percent,
    plural,
    significant,
    trimmed,
)
from adascale_controller.schema import JobDefinition
from adascale_core.batch.plans import BatchChoice, batch_choice, require_valid_replicas
from adascale_core.job_id import short_id
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.replica_seconds import Cause
from adascale_core.messages.reports import GainReport
from adascale_core.views.decision import CountView, DecisionView
from adascale_core.views.gain import GainView, PredictionView
from adascale_core.views.goodput import GoodputList, GoodputView
from adascale_core.views.job_summary import JobStateName
from adascale_core.views.jobs import Comparison, JobView, ReplicaView

_HEADER = (
    "NAME", "STATE", "REPLICAS", "DESIRED", "BATCH", "GAIN", "EFFICIENCY", "PROGRESS", "LOSS", "RESTARTS",
    "AGE", "FOLDER",
)  # fmt: skip

MAX_REASON = 80
"""Characters of a reason in a list; `adascale status` has all of it."""


@dataclass(frozen=True)
class JobOverview:
    """The status of a job."""

    name: str
    namespace: str
    state: JobStateName
    start_time: float  # when its first run began, or when it was created, in seconds since 1970
    replicas: int = 0
    desired_replicas: int = 0
    spare_replicas: int = 0
    batch_size: int | None = None  # the global batch size, in samples; None if unknown, as all that follow
    local_batch_limit: int | None = None  # the largest local batch that fits into memory, in samples
    gain: float | None = None  # the steps at `batchSize` that one step replaces
    efficiency: float | None = None
    progress: float | None = None
    progress_text: str = ""  # progress as a share of `total`, or else the number; empty if unknown
    loss: float | None = None
    restarts: int | None = None
    reason: str = ""  # why it has failed, or does not train; empty if it does
    # of a job on this machine alone
    exit_code: int | None = None  # of its last run
    process: int | None = None
    url: str | None = None  # of its metrics service
    state_dir: str | None = None
    checkpoint_step: int | None = None
    checkpoint_error: str | None = None  # why its checkpoints cannot be read
    result: Mapping[str, float | str] = field(default_factory=dict)  # as its program has reported it
    comparison: str = ""  # what it has taken beside one replica; empty if that can't be estimated
    # what is shown, and not in `to_json`
    total: float | None = None  # the progress at which it ends
    view: JobView | None = None  # what the metrics service answers about it; None if it is not asked
    explained: str = ""  # what explains its state
    runs: bool = True  # whether it runs, or waits to run
    checkpoint: str = ""  # its newest checkpoint, or where its checkpoints are
    # names and values of more facts, such as files; empty values are left out
    places: Sequence[tuple[str, str]] = ()
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
        members = (each.name for each in fields(self) if each.name not in _SHOWN)
        replicas = [
            {
                "replica": each.replica,
                "state": each.state,
                "generation": each.generation,
                "process": each.pid or None,
            }
            for each in self.members
        ]
        return {to_camel(name): getattr(self, name) for name in members} | {"replicaStatuses": replicas}


_SHOWN = {"total", "view", "explained", "runs", "checkpoint", "places", "last_began"}
"""The fields that are shown, and not in the JSON object."""


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
    view, limit, spares = summary.view, summary.local_batch_limit, summary.spare_replicas
    waiting = f", {plural(spares, 'spare')} waiting" if spares else ""
    replicas = f"{summary.replicas} of {summary.desired_replicas} desired{waiting}"
    facts = [
        ("name", summary.id),
        ("state", f"{summary.state}{summary.explained}"),
        ("reason", summary.reason.replace("\n", " ")),
        ("age", age(now - summary.start_time)),
        ("replicas", replicas if summary.runs else "0"),
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
        ("comparison", summary.comparison),
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


def describe_comparison(comparison: Comparison | None) -> str:
    """Return the steps and time of a job beside those on one replica; empty if they can't be estimated."""
    if comparison is None:
        return ""
    low, high = map(duration, comparison.single_seconds)
    return (
        f"{plural(comparison.steps, 'step')} in {duration(comparison.seconds)}, instead of "
        f"{count(comparison.single_steps)} in an estimated {low} to {high} on one replica"
    )


def format_result(result: Mapping[str, float | str]) -> str:
    """Return the result that the program reported, as in `accuracy 0.9778, model large`."""
    return ", ".join(f"{name} {_format_value(value)}" for name, value in result.items())


def _format_value(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def _row(summary: JobOverview, now: float) -> tuple[str, ...]:
    return (
        short_id(summary.id),
        summary.state,
        str(summary.replicas),
        str(summary.desired_replicas),
        "" if summary.batch_size is None else str(summary.batch_size),
        _number(summary.gain),
        _percent(summary.efficiency),
        summary.progress_text,
        _number(summary.loss),
        "" if summary.restarts is None else str(summary.restarts),
        age(now - summary.start_time),
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


def _facts(rows: Iterable[tuple[str, str]], *, keeps_names: bool = False) -> Table:
    """Return a table of names and texts."""
    facts = Table.grid(padding=(0, 3, 0, 0))
    facts.add_column(style="dim", no_wrap=keeps_names)
    facts.add_column()
    for name, text in rows:
        facts.add_row(name, text)
    return facts


# -- its gain ------------------------------------------------------------------------------------------------

MAX_FRESH_SECONDS = 10.0
"""The age of a report is shown if it is older than this."""


def render_gain(gain: GainView, now: float) -> RenderableType:
    """Return the latest report of a job and the predictions for other replica counts."""
    parts: list[RenderableType] = [Text(gain.job, "bold"), _facts(_gain_facts(gain, now))]
    if gain.predictions:
        parts += [Text(), _predictions_table(gain.predictions, gain.report.replicas)]
    return Group(*parts)


def _gain_facts(gain: GainView, now: float) -> list[tuple[str, str]]:
    report = gain.report
    facts = [
        ("gain", f"{significant(report.gain)} at scale {trimmed(report.scale)}"),
        ("efficiency", percent(gain.efficiency)),
        ("trains on", f"{plural(report.replicas, 'replica')}, generation {report.generation}"),
        ("batch", describe_batch(report)),
        ("progress", f"{count(report.progress)}, in {plural(report.step, 'step')}"),
    ]
    if gain.local_bsz_limit is not None:
        facts.append(("memory", memory(gain.local_bsz_limit)))
    if report.loss is not None:
        facts.append(("loss", significant(report.loss)))
    facts += [(name, significant(value)) for name, value in sorted(report.metrics.items())]
    age = now - report.time
    if age > MAX_FRESH_SECONDS:
        facts.append(("reported", f"{clock(age)} ago"))
    return facts


def _predictions_table(predictions: Sequence[PredictionView], replicas: int) -> Table:
    columns = {
        "replicas": [str(each.replicas) for each in predictions],
        "local batch": [local_batch(each.local_bsz, each.accumulation) for each in predictions],
        "scale": [trimmed(each.scale) for each in predictions],
        "gain": [_gain(each) for each in predictions],
        "efficiency": [percent(each.efficiency) for each in predictions],
        "progress per second": [significant(each.goodput) for each in predictions],
    }
    styles = ["bold" if each.replicas == replicas else "" for each in predictions]
    return numbers_table(columns, padding=(0, 1), row_styles=styles)


def _gain(prediction: PredictionView) -> str:
    """Return a gain, and between which it is at one standard error."""
    low, high = significant(prediction.gain_low), significant(prediction.gain_high)
    gain = significant(prediction.gain)
    return gain if low == high else f"{gain} ({low} to {high})"


# -- where its time went -------------------------------------------------------------------------------------


def render_goodput(view: GoodputView) -> RenderableType:
    """Return the time of a job's replicas by cause."""
    seconds = {cause: view.replica_seconds[cause] for cause in Cause if view.replica_seconds.get(cause)}
    columns = {
        "cause": [cause.replace("_", " ") for cause in seconds],
        "replica time": [clock(each) for each in seconds.values()],
        "share": [percent(each / view.total) for each in seconds.values()],
    }
    parts: list[RenderableType] = [Text(view.job, "bold"), Text(_useful_time(view))]
    if seconds:
        parts += [Text(), numbers_table(columns, padding=(0, 1))]
    return Group(*parts)


def render_goodput_list(found: GoodputList) -> RenderableType:
    """Return the time of the replicas of several jobs, and where most of what is not useful went."""
    columns = {
        "job": [view.job for view in found.jobs],
        "replica time": [clock(view.total) for view in found.jobs],
        "useful": [_percent(view.useful_ratio) for view in found.jobs],
        "most of the rest": [_largest_loss(view) for view in found.jobs],
    }
    together = GoodputView("", found.replica_seconds)
    return Group(numbers_table(columns, padding=(0, 1)), Text(), Text(_useful_time(together)))


def _useful_time(view: GoodputView) -> str:
    useful = f", of which {_percent(view.useful_ratio)} were useful" if view.total else ""
    return f"{clock(view.total)} of replica time{useful}"


def _largest_loss(view: GoodputView) -> str:
    losses = {cause: view.replica_seconds.get(cause, 0.0) for cause in Cause if cause is not Cause.USEFUL}
    cause = max(losses, key=lambda each: losses[each])
    return f"{cause.replace('_', ' ')} {percent(losses[cause] / view.total)}" if losses[cause] else ""


# -- the decision about it -----------------------------------------------------------------------------------


def render_decision(
    decision: DecisionView,
    now: float,
    slow: str = "",
    ended: str = "",
    latest: GainReport | None = None,
) -> RenderableType:
    """Return the decision, what limits it, and what other counts would give; less if it has ended."""
    facts = [("decision", _decision(decision))]
    if ended:
        facts.append(("ended", ended))
    else:
        facts.append(("reason", decision.reason))
        limits = [limit.reason for limit in decision.limits if limit.reason not in decision.reason]
        facts += [("" if i else "limits", limit) for i, limit in enumerate(limits)]
        if slow:
            facts.append(("slow", slow))
        if latest is not None and latest.goodput:
            speed, replicas = significant(latest.goodput), plural(latest.replicas, "replica")
            facts.append(("measured", f"{speed} progress per second on {replicas}, mean of the last minute"))
    facts.append(("decided", f"{clock(now - decision.time)} ago"))
    parts: list[RenderableType] = [Text(decision.job, "bold"), _facts(facts, keeps_names=True)]
    if decision.counts and not ended:
        parts += [Text(), _counts_table(decision)]
    return Group(*parts)


def _decision(decision: DecisionView) -> str:
    if decision.waiting:
        return "waits"
    if decision.replicas == decision.present or not decision.present:
        return plural(decision.replicas, "replica")
    return f"{decision.present} -> {plural(decision.replicas, 'replica')}"


def _counts_table(decision: DecisionView) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), header_style="bold", show_edge=False)
    for header in ("replicas", "predicted per second", "time left"):
        table.add_column(header, justify="right")
    gives = any(each.given for each in decision.counts)
    if gives:
        table.add_column("others would give")
    table.add_column("why", ratio=1)
    shown = {decision.reason, *(limit.reason for limit in decision.limits)}
    for each in decision.counts:
        cells = [
            str(each.replicas),
            "" if each.goodput is None else significant(each.goodput),
            "" if each.seconds_left is None else duration(each.seconds_left),
            *([_given(each)] if gives else []),
            "" if each.reason in shown else each.reason,
        ]
        table.add_row(*cells, style="bold" if each.replicas == decision.replicas else "")
    return table


def _given(count: CountView) -> str:
    return ", ".join(f"{each.job}: {each.replicas}" for each in count.given)


# -- its valid replica counts --------------------------------------------------------------------------------

MAX_ROWS = 64


def render_valid_replicas(job: JobDefinition) -> RenderableType:
    """Return a table of the valid replica counts of a job, with the batches that each may use."""
    spec = job.declaration
    counts = require_valid_replicas(spec.bounds, spec.min_replicas, spec.max_replicas)
    rows = [(replicas, batch_choice(spec.bounds, replicas)) for replicas in counts[:MAX_ROWS]]
    table = numbers_table(
        {
            "replicas": [str(replicas) for replicas, _ in rows],
            "local batch": [_format_range(each.local_bsz[0], each.local_bsz[-1]) for _, each in rows],
            "accumulation": [str(each.accumulation) for _, each in rows],
            "global batch": [_format_range(each[0].global_bsz, _largest_batch(each)) for _, each in rows],
            "largest scale": [trimmed(_largest_batch(each) / spec.batch_size) for _, each in rows],
        },
        padding=(0, 1),
    )
    parts: list[RenderableType] = [table]
    if len(counts) > MAX_ROWS:
        others = counts[MAX_ROWS:]
        parts.append(Text(f" and {plural(len(others), 'more count')} up to {others[-1]}"))
    invalid = sorted(set(range(spec.min_replicas, spec.max_replicas + 1)) - set(counts))
    if invalid:
        parts.append(Text(f" not valid: {_format_ranges(invalid)}", "yellow"))
    return Group(*parts)


def _largest_batch(choice: BatchChoice) -> int:
    return choice[len(choice) - 1].global_bsz


def _format_range(low: int, high: int) -> str:
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _format_ranges(numbers: list[int]) -> str:
    """Return ascending numbers, with consecutive ones as a range: `1, 3 to 5`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])
    return ", ".join(_format_range(numbers[0], numbers[-1]) for numbers in ranges)


def describe_deadline(job: JobDefinition) -> str | None:
    """Return what the deadline of a job needs, and where to see whether it can be met; None without one."""
    seconds, steps = job.spec.completion_deadline_seconds, job.declaration.steps
    if seconds is None:
        return None
    if steps is None:
        need = (
            "can be compared with the end of training once the program reports it: set scaleInvariantSteps "
            "or trainSamples"
        )
    else:
        need = f"needs {significant(steps / seconds)} steps at batchSize per second for {count(steps)} steps"
    return (
        f"completionDeadlineSeconds {count(seconds)} {need}. Whether a replica count meets it is predicted "
        "from step times, of this job or of earlier jobs of its template: see the condition "
        "DeadlineFeasible, or the messages of `adascale run`"
    )
