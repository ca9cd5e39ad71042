"""Trackers of experiments, with real trainers and real event files."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from adascale_core.messages.reports import GainReport
from adascale_worker.errors import WorkerError
from adascale_worker.reporting.trackers import (
    MLflow,
    TensorBoard,
    TrackedRun,
    WeightsAndBiases,
    make_tracker,
    tracked_values,
)
from support.launch import PROGRAMS
from support.members import Members

TRACKS = PROGRAMS / "tracks.py"
REPORT = GainReport(
    generation=1, step=1, progress=2.0, epoch=0, replicas=2, local_bsz=8, accumulation=3, scale=4.0, gain=2.0,
    grad_sqr=0.5, grad_var=1.5, step_time=0.02, time=1.76e9, loss=0.7, metrics={"accuracy": 0.5}, lr=0.1,
)  # fmt: skip

board = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not installed"
)


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Return what TensorBoard shows of a folder: the values by step, of each name."""
    events = board.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        values = [(each.step, each.value) for each in events.Scalars(name)]
        assert len(values) == len(dict(values)), f"a step has several values: {values}"
        found[name] = dict(values)
    return found


def test_another_rank_0_continues_the_run_of_the_tracker(make_members: Callable[..., Members]) -> None:
    job = make_members(PROGRAM=TRACKS)
    first, second = job.start(2)
    job.activate([first, second])
    job.wait_step(3)
    first.kill()
    job.wait_holding([second])
    job.activate([second])
    job.finish()
    records = job.records()
    assert list(dict.fromkeys(record["process"] for record in records)) == [first.pid, second.pid]
    (journal,) = (job.folder / "journal").glob("*.jsonl")
    folder = job.folder / "journal" / "board" / journal.stem
    steps, progress = scalars(folder / "steps"), scalars(folder / "progress")
    # What the second one made is there, and what the first one had made before, each step once.
    last = {record["step"]: record["loss"] for record in records if "loss" in record}
    # The first one may be killed between a value in TensorBoard and its record.
    assert set(steps["loss"]) - set(last) <= {max(set(steps["loss"]) - set(last), default=0)}
    assert {step: steps["loss"].get(step) for step in last} == pytest.approx(last)
    assert max(last) == 40
    assert set(steps["loss"].values()) <= set(progress["loss"].values())
    assert set(steps["adascale/replicas"].values()) == {1.0, 2.0}


def test_what_is_repeated_after_a_resume_is_shown_once(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path)
    tracker.begin("job", 1, 2.0)
    for step in range(1, 11):
        tracker.log({"loss": 1.0 / step}, step, 2.0 * step)
    # It is killed, and resumes from its checkpoint of step 6 with another gain.
    resumed = TensorBoard(tmp_path)
    resumed.begin("job", 7, 15.0)
    resumed.log({"loss": 0.5}, 7, 15.0)
    resumed.close()
    kept = {step: pytest.approx(1.0 / step) for step in range(1, 7)}
    assert scalars(tmp_path / "job" / "steps")["loss"] == {**kept, 7: 0.5}
    over_progress = {2 * step: value for step, value in kept.items()}
    assert scalars(tmp_path / "job" / "progress")["loss"] == {
        **over_progress,
        14: pytest.approx(1 / 7),
        15: 0.5,
    }


def test_a_report_is_tracked_with_what_the_program_has_logged() -> None:
    assert tracked_values(REPORT) == {
        "loss": 0.7, "accuracy": 0.5, "adascale/gain": 2.0, "adascale/efficiency": 0.5,
        "adascale/replicas": 2,
        "adascale/batch_size": 48, "adascale/learning_rate": 0.1,
    }  # fmt: skip


class Failing:
    """A tracker that fails at its second value."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self, run: str, step: int, progress: float) -> None:
        self.calls.append(f"begin {run} {step} {progress}")

    def log(self, values: Mapping[str, float], step: int, progress: float) -> None:
        self.calls.append(f"log {step}")
        if len(self.calls) > 2:
            raise OSError("the disk is full")

    def close(self) -> None:
        self.calls.append("close")


def test_a_tracker_that_fails_does_not_end_training(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Failing()
    run = TrackedRun(tracker, "job")
    for step in range(1, 2001):
        run.report(replace(REPORT, step=step))
    run.close()
    run.close()
    assert tracker.calls == ["begin job 1 2.0", "log 1", "log 2"]
    assert capsys.readouterr().out == (
        "adascale: Failing has failed: OSError: the disk is full; training continues without the tracker\n"
    )


def test_a_tracker_that_does_not_answer_delays_the_end_for_a_limited_time() -> None:
    class Silent(Failing):
        def begin(self, run: str, step: int, progress: float) -> None:
            time.sleep(60)

    run = TrackedRun(Silent(), "job")
    run.report(REPORT)
    began = time.monotonic()
    run.close(timeout=0.1)
    assert time.monotonic() - began < 30


def test_an_unknown_name_of_a_tracker_is_refused() -> None:
    with pytest.raises(WorkerError, match=r"tracker='comet': use 'tensorboard', 'wandb'"):
        make_tracker("comet")


@pytest.mark.parametrize(("kind", "package"), [(WeightsAndBiases, "wandb"), (MLflow, "mlflow")])
def test_a_tracker_whose_package_is_missing_names_it(
    kind: Callable[[], object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(WorkerError, match=rf"needs the package {package}, .*: pip install {package}"):
        kind()


def test_weights_and_biases_has_both_axes(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    for step in (1, 2):
        tracker = WeightsAndBiases("project", mode="offline", dir=str(tmp_path))
        tracker.begin("job", step, 2.0 * step)
        tracker.log({"loss": 0.5}, step, 2.0 * step)
        summary = dict(wandb.run.summary)
        tracker.close()
        assert (summary["loss"], summary["progress"], summary["optimizer_step"]) == (0.5, 2.0 * step, step)
    assert len(list((tmp_path / "wandb").glob("offline-run-*-job"))) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mlflow_continues_a_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for step in (1, 2):
        tracker = MLflow("experiment", uri)
        tracker.begin("job", step, 2.0 * step)
        tracker.log({"loss": 0.5}, step, 2.0 * step)
        tracker.close()
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "optimizer_step")
    assert [(each.step, each.value) for each in history] == [(2, 1.0), (4, 2.0)]
