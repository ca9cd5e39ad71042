"""Trackers of experiments: TensorBoard, Weights & Biases and MLflow, or one of the program's own.

Rank 0 sends what it reports to a tracker from a thread, so that no step waits for it. When another replica
becomes rank 0, or the job resumes, it continues the same run of the tracker.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from adascale_worker.errors import WorkerError


class Tracker(Protocol):
    """Where rank 0 sends the values that it reports. All methods are called from one thread."""

    def begin(self, run: str, step: int, progress: float) -> None:
        """Continue a run, or begin it if there is none."""

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        """Record values of an optimizer step, by name."""

    def close(self) -> None:
        """Write what is kept in memory."""


class TensorBoard:
    """Writes event files for TensorBoard, in the folders `progress` and `steps`.

    Both have the same values: the horizontal axis of the first is progress, that of the other is optimizer
    steps. Curves over progress are those of jobs with other batch sizes too.
    """

    def __init__(self, folder: str | Path = "runs") -> None:
        _require("tensorboard", "tensorboard")
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
    """Logs to a run of Weights & Biases, whose axes are `progress` and `optimizer_step`."""

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._wandb = _require("wandb", "wandb")
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

    The run has the tag `adascale.run`, by which another rank 0 finds it.
    """

    def __init__(self, experiment: str = "Default", tracking_uri: str | None = None) -> None:
        mlflow = _require("mlflow", "mlflow")
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
    missing = [name for name in ("begin", "log", "close") if not callable(getattr(tracker, name, None))]
    if missing:
        raise WorkerError(
            f"ElasticTrainer got a {type(tracker).__name__} as tracker, which has no method "
            f"{', '.join(missing)}: see adascale.Tracker"
        )
    return tracker


def _require(package: str, distribution: str) -> Any:
    # Weights & Biases asks at a terminal for an account, which no replica has.
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        return import_module(package)
    except ImportError as error:
        raise WorkerError(
            f"the tracker needs the package {package}, which is not installed ({error}): "
            f"pip install {distribution}"
        ) from None
