"""Trackers of experiments: TensorBoard, Weights & Biases and MLflow, or one of the program's own.

Rank 0 sends what it reports to a tracker from a thread, so that no step waits for it. When another replica
becomes rank 0, or the job resumes, it continues the same run of the tracker.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from adascale_core.messages.reports import GainReport
from adascale_worker.errors import WorkerError


class Tracker(Protocol):
    """Where rank 0 sends the values that it reports. All methods are called from one thread."""

    def begin(self, run: str, step: int, progress: float) -> None:
        """Continue a run, or begin it if there is none.

        The id of the run is the same on each rank 0 of the job, also after it resumes. What the run has of
        optimizer step `step` and of later ones is repeated. `progress` is that after the step before.
        """

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        """Record values of an optimizer step, by name. `progress` is in scale-invariant steps."""

    def close(self) -> None:
        """Write what is kept in memory."""


class TensorBoard:
    """Writes event files for TensorBoard, in a folder for each run in `folder`, which all replicas share.

    The same values are in `progress`, over progress, and in `steps`, over optimizer steps. Curves over
    progress can be compared with those of jobs with other batch sizes.
    """

    def __init__(self, folder: str | Path = "runs") -> None:
        _require("tensorboard")
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def begin(self, run: str, step: int, progress: float) -> None:
        """Open new event files; TensorBoard discards what earlier files have from here on."""
        from torch.utils.tensorboard import SummaryWriter

        folder = self._folder / run
        self._writers = {
            axis: SummaryWriter(str(folder / axis), purge_step=first)
            for axis, first in (("progress", round(progress)), ("steps", step))
        }

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        """Write values over both axes."""
        for axis, place in (("progress", round(progress)), ("steps", step)):
            for name, value in values.items():
                self._writers[axis].add_scalar(name, value, place)
            # Others may look at the files at any time.
            self._writers[axis].flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()


class WeightsAndBiases:
    """Logs to a run of Weights & Biases, whose axes are `progress` and `optimizer_step`.

    `project` is by default that of the environment. The other options are those of `wandb.init`.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        # It asks at a terminal for an account, which no replica has.
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = _require("wandb")
        self._options = {"project": project, **options}
        self._run: Any = None

    def begin(self, run: str, step: int, progress: float) -> None:  # noqa: ARG002
        """Continue or create the run of this id."""
        self._run = self._wandb.init(id=run, resume="allow", **{"name": run, **self._options})
        self._run.define_metric("progress")
        self._run.define_metric("*", step_metric="progress")

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        """Log values with both axes."""
        self._run.log({**values, "progress": progress, "optimizer_step": step})

    def close(self) -> None:
        """Upload what is left."""
        if self._run is not None:
            self._run.finish()


class MLflow:
    """Logs to a run of MLflow over progress, with the metric `optimizer_step` for the other axis.

    The run has the tag `adascale.run`, by which another rank 0 finds it. `tracking_uri` is a server or a
    folder, by default that of the environment.
    """

    def __init__(self, experiment: str = "Default", tracking_uri: str | None = None) -> None:
        mlflow = _require("mlflow")
        self._client = mlflow.MlflowClient(tracking_uri)
        self._experiment = experiment
        self._run = ""

    def begin(self, run: str, step: int, progress: float) -> None:  # noqa: ARG002
        """Continue the run with this tag, or create it."""
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        )
        runs = self._client.search_runs([experiment], f"tags.`adascale.run` = '{run}'", max_results=1)
        if not runs:
            runs = [self._client.create_run(experiment, tags={"adascale.run": run}, run_name=run)]
        self._run = runs[0].info.run_id
        self._client.update_run(self._run, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        """Log values over progress."""
        for name, value in {**values, "optimizer_step": float(step)}.items():
            self._client.log_metric(self._run, name, value, step=round(progress))

    def close(self) -> None:
        """Mark the run as finished; another rank 0 marks it as running again."""
        if self._run:
            self._client.set_terminated(self._run)


_NAMED = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow}


def make_tracker(tracker: str | Tracker | None) -> Tracker | None:
    """Return the tracker that the program has chosen, by its name or as an object."""
    if tracker is None:
        return None
    if isinstance(tracker, str):
        if tracker not in _NAMED:
            raise WorkerError(
                f"ElasticTrainer got tracker={tracker!r}: use {', '.join(map(repr, _NAMED))}, or an object "
                "with the methods begin, log and close"
            )
        named: Tracker = _NAMED[tracker]()
        return named
    return tracker


def _require(package: str) -> Any:
    try:
        return import_module(package)
    except ImportError as error:
        raise WorkerError(
            f"the tracker needs the package {package}, which is not installed ({error}): "
            f"pip install {package}"
        ) from None


MAX_QUEUED = 1000
"""Reports that are queued while the tracker does not answer; further ones are dropped."""


CLOSE_TIMEOUT = 10.0
"""Seconds in which a replica that is no longer rank 0 closes its run."""
HANDOVER_TIME = CLOSE_TIMEOUT + 5.0
"""Seconds after which another rank 0 continues the run: closing it later would show it as finished."""


class TrackedRun:
    """A run in a tracker, as long as this replica is rank 0."""

    def __init__(
        self,
        tracker: Tracker,
        run: str,
        *,
        is_taken_over: bool = False,  # whether another replica may have had the run
    ) -> None:
        self._tracker = tracker
        self._run = run
        self._delay = HANDOVER_TIME if is_taken_over else 0.0
        self._is_closing = threading.Event()
        self._queue: queue.Queue[GainReport | None] = queue.Queue(MAX_QUEUED)
        self._thread = threading.Thread(target=self._send, name="adascale-tracker", daemon=True)
        self._thread.start()

    def report(self, report: GainReport) -> None:
        """Queue a report. Does not wait for the tracker."""
        # The queue is full if the tracker does not answer; its thread prints the reason when its call fails.
        with suppress(queue.Full):
            self._queue.put_nowait(report)

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Send what is queued, and close the run. May be called again."""
        self._is_closing.set()
        if self._thread.is_alive():
            try:
                self._queue.put(None, timeout=timeout)
            except queue.Full:
                return
            self._thread.join(timeout)

    def _send(self) -> None:
        self._is_closing.wait(self._delay)
        has_begun, step = False, -1
        sent: set[str] = set()
        try:
            while (report := self._queue.get()) is not None:
                if not has_begun:
                    self._tracker.begin(self._run, report.step, report.progress)
                    has_begun = True
                # The last report of a job is of the same step as the one before: a step has one value.
                values = tracked_values(report)
                if report.step == step:
                    values = {name: value for name, value in values.items() if name not in sent}
                if values:
                    self._tracker.log(values, report.step, report.progress)
                step, sent = report.step, set(values) | (sent if report.step == step else set())
            if has_begun:
                self._tracker.close()
        except Exception as error:  # noqa: BLE001
            # What a tracker raises is not known, and training must not end by it.
            print(
                f"adascale: {type(self._tracker).__name__} has failed: {type(error).__name__}: {error}; "
                "training continues without the tracker",
                flush=True,
            )
            while self._queue.get() is not None:
                pass


def tracked_values(report: GainReport) -> Mapping[str, float]:
    """Return what a tracker records of a report: what the program has logged, and what AdaScale measures."""
    measured: dict[str, float | None] = {
        "loss": report.loss,
        **report.metrics,
        "adascale/gain": report.gain,
        "adascale/efficiency": report.efficiency,
        "adascale/replicas": report.replicas,
        "adascale/batch_size": report.replicas * report.local_bsz * report.accumulation,
        "adascale/learning_rate": report.lr,
        "adascale/goodput": report.goodput,
    }
    return {name: value for name, value in measured.items() if value is not None}
