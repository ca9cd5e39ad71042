"""A length of training in samples: where it ends, and what the schedule follows, at any batch size."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from adascale_worker.errors import UnusableCheckpointError, WorkerError
from adascale_worker.process import environment
from adascale_worker.reporting.progress import TrainingProgress
from support.members import Members
from support.training import FIXED, MakeTrainer, entered, network, sgd, train

SAMPLES = 1200
"""The first replica alone takes 5 s for them."""


def test_training_ends_in_the_batch_with_the_last_sample(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, batch_size=8, train_samples=60)
    assert (trainer.train_samples, trainer.scale_invariant_steps) == (60, 8)
    train(trainer, model, optimizer, epochs=range(1))
    assert (trainer.samples, trainer.progress, trainer.finished) == (48, 6.0, False)
    train(trainer, model, optimizer, epochs=range(1, 2))
    assert (trainer.samples, trainer.steps, trainer.progress, trainer.finished) == (64, 8, 8.0, True)


def test_training_ends_at_the_last_sample_if_a_larger_batch_ends_there(make_trainer: MakeTrainer) -> None:
    """Three batches of 20 are 7.5 steps at the initial batch size, and all samples."""
    trainer = make_trainer(batch_size=8, train_samples=60)
    model = network()
    trainer.program_reentry(model, sgd(model))
    progress = trainer._replica.progress
    for finished in (False, False, True):
        progress.advance(gain=1.5, samples=20, batch_size=8)
        assert trainer.finished is finished
    assert (trainer.progress, trainer._replica.job.unfinished) == (7.5, None)


def test_progress_is_that_of_the_samples_whatever_the_gain_is_without_a_rounding_error() -> None:
    progress = TrainingProgress(counts_samples=True)
    for step in range(1, 601):
        progress.advance(gain=1.5, samples=10, batch_size=3)
        assert progress.progress == 10 * step / 3
    assert progress.progress == 2000


def test_a_program_that_ends_too_early_is_reported_in_samples(make_trainer: MakeTrainer) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED, train_samples=480)
    train(trainer, model, optimizer, epochs=range(1))
    assert trainer._replica.job.unfinished == "48 of 480 samples"


def test_a_resumed_job_ends_at_the_same_sample(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    for samples in (96, 144):
        trainer = make_trainer(**FIXED, train_samples=samples, checkpoint_dir=tmp_path)
        model = network()
        optimizer = sgd(model)
        state = trainer.program_reentry(model, optimizer)
        train(trainer, model, optimizer, epochs=range(state.epoch, samples // 48))
        assert (trainer.samples, trainer.progress, trainer.finished) == (samples, samples / 8, True)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"train_samples": 96},
            {"scale_invariant_steps": 24},
            r"in samples, but the job now in gains: set train",
        ),
        (
            {"scale_invariant_steps": 12},
            {"train_samples": 192},
            r"in gains, but the job now in samples: leave out",
        ),
    ],
)
def test_a_job_cannot_change_what_its_progress_counts(
    make_trainer: MakeTrainer,
    tmp_path: Path,
    before: dict[str, int],
    after: dict[str, int],
    message: str,
) -> None:
    trainer, model, optimizer = entered(make_trainer, **FIXED, **before, checkpoint_dir=tmp_path)
    train(trainer, model, optimizer, epochs=range(2))
    assert trainer.finished
    changed = make_trainer(**FIXED, **after, checkpoint_dir=tmp_path)
    with pytest.raises(UnusableCheckpointError, match=message):
        changed.program_reentry(model, sgd(model))


def test_an_edit_of_a_running_job_may_change_the_samples_but_not_leave_them_out(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADASCALE_TRAIN_SAMPLES", "480")
    monkeypatch.setenv("ADASCALE_SCALE_INVARIANT_STEPS", "")  # restored after what `adopt` sets
    trainer, model, optimizer = entered(make_trainer, **FIXED)
    train(trainer, model, optimizer, epochs=range(1))
    job = trainer._replica.job
    job.adopt({"ADASCALE_TRAIN_SAMPLES": "96"})
    assert (trainer.train_samples, trainer.scale_invariant_steps) == (96, 12)
    with pytest.raises(WorkerError, match="train_samples was 96 and is now None"):
        job.adopt({"ADASCALE_TRAIN_SAMPLES": None, "ADASCALE_SCALE_INVARIANT_STEPS": "12"})


def test_the_environment_has_the_samples() -> None:
    assert environment.read_job_settings({"ADASCALE_TRAIN_SAMPLES": "512"}).train_samples == 512


def test_a_job_that_grows_ends_at_its_samples_with_its_schedule_in_progress(
    make_members: Callable[..., Members],
) -> None:
    """From 1 to 2 replicas in real processes; on 2, a step has twice the samples."""
    bounds = {
        "batch_size": 12,
        "max_batch_size": 24,
        "local_bsz_bounds": [12, 12],
        "train_samples": SAMPLES,
    }
    job = make_members(BOUNDS=json.dumps(bounds), EVALUATES="finished", STEP_SECONDS=0.05)
    trainers = job.start(2)
    job.activate(trainers[:1])
    job.wait_step(6)
    job.activate(trainers)
    job.finish()
    steps = {record["step"]: record for record in job.records()}
    assert {record["replicas"] for record in steps.values()} == {1, 2}
    assert all(record["progress"] == record["samples"][1] / 12 for record in steps.values())
    # The scheduler of the program multiplies the lr by 0.9 after each 7 steps at the initial batch size.
    assert all(
        record["lr"] == pytest.approx(0.1 * 0.9 ** (record["samples"][1] // 12 // 7))
        for record in steps.values()
    )
    last = steps[max(steps)]
    assert SAMPLES <= last["samples"][1] < SAMPLES + 24
    assert len(steps) < SAMPLES // 12
