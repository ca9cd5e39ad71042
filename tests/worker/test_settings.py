"""Tests of the settings: the job overrides the program."""

import re
from typing import Any

import pytest

from adascale import ElasticTrainer
from adascale_core.batch.plans import BatchBounds, EfficiencyBound, InvalidBoundsError
from adascale_core.errors import InvalidJobError
from adascale_worker.process.environment import JobSettings, describe_differences, resolve_settings
from support.training import MakeTrainer, network, sgd


def test_the_programs_arguments_are_used_if_the_job_sets_nothing() -> None:
    program = JobSettings(32, 512, (16, 128), 0.7, 1000, epochs=5)
    settings = resolve_settings(program, JobSettings())
    assert settings.bounds == BatchBounds(32, 512, (16, 128))
    assert (settings.efficiency, settings.scale_invariant_steps) == (EfficiencyBound(0.7), 1000)
    assert describe_differences(program, JobSettings()) == []


def test_the_efficiency_target_of_the_job_holds_for_the_length_of_the_program() -> None:
    program = JobSettings(32, 512, (16, 128), 0.7, train_samples=10_000)
    job = JobSettings(32, 512, (16, 128))
    assert resolve_settings(program, job).efficiency == EfficiencyBound(0.7, counts_samples=True)
    job = JobSettings(32, 512, (16, 128), 0.6)
    assert resolve_settings(program, job).efficiency == EfficiencyBound(0.6, counts_samples=True)
    job = JobSettings(32, 512, (16, 128), scale_invariant_steps=1000)
    assert resolve_settings(program, job).efficiency == EfficiencyBound(0.7)


def test_the_jobs_settings_are_used_if_the_program_sets_nothing() -> None:
    job = JobSettings(32, 512, (16, 128), 0.7, 1000, elastic_single_replica=True, local_bsz_limit=64)
    settings = resolve_settings(JobSettings(), job)
    assert settings.bounds == BatchBounds(32, 512, (16, 128), True, 64)
    assert (settings.efficiency, settings.scale_invariant_steps) == (EfficiencyBound(0.7), 1000)
    assert describe_differences(JobSettings(), job) == []


def test_the_job_overrides_the_program_and_what_changes_the_result_is_described() -> None:
    program = JobSettings(32, 512, (16, 128), scale_invariant_steps=1000, epochs=5)
    job = JobSettings(64, 512, None, scale_invariant_steps=2000)
    settings = resolve_settings(program, job)
    assert settings.bounds == BatchBounds(64, 512)
    assert settings.scale_invariant_steps == 2000
    assert describe_differences(program, job) == [
        "the program sets batch_size to 32, the job sets it to 64; the job's setting is used",
        "the program sets scale_invariant_steps to 1000, the job sets it to 2000; the job's setting is used",
        "the program sets epochs to 5, the job sets scale_invariant_steps to 2000; the job's setting is used",
    ]


@pytest.mark.parametrize(
    ("program", "job", "steps", "samples"),
    [
        (JobSettings(32, train_samples=1000), JobSettings(), 32, 1000),
        (JobSettings(32), JobSettings(train_samples=1000), 32, 1000),
        (JobSettings(32, train_samples=1024), JobSettings(64), 16, 1024),
        (JobSettings(32, train_samples=1000), JobSettings(scale_invariant_steps=7), 7, None),
        (JobSettings(32, scale_invariant_steps=7), JobSettings(train_samples=1), 1, 1),
    ],
)
def test_training_ends_by_samples_or_by_steps_as_the_job_sets_it(
    program: JobSettings, job: JobSettings, steps: int, samples: int | None
) -> None:
    settings = resolve_settings(program, job)
    assert (settings.scale_invariant_steps, settings.train_samples) == (steps, samples)


def test_another_kind_of_end_in_the_job_is_described() -> None:
    program = JobSettings(32, scale_invariant_steps=1000, epochs=5)
    assert describe_differences(program, JobSettings(train_samples=64)) == [
        "the program sets scale_invariant_steps to 1000, the job sets train_samples to 64; the job's setting "
        "is used",
        "the program sets epochs to 5, the job sets train_samples to 64; the job's setting is used",
    ]


@pytest.mark.parametrize("of_job", [False, True])
def test_two_ends_of_training_are_an_error(of_job: bool) -> None:
    both = JobSettings(32, scale_invariant_steps=1000, train_samples=64)
    with pytest.raises(
        InvalidJobError, match=r"scale_invariant_steps \(1000\) and train_samples \(64\) are both"
    ):
        resolve_settings(JobSettings(32) if of_job else both, both if of_job else JobSettings())


@pytest.mark.parametrize(
    "job",
    [
        JobSettings(32, 256, (8, 64), scale_invariant_steps=1000),
        JobSettings(32),
        JobSettings(32, efficiency_target=0.3, checkpoint_interval=5.0, checkpoint_dir="elsewhere"),
    ],
)
def test_other_bounds_and_what_does_not_change_the_result_are_not_described(job: JobSettings) -> None:
    assert describe_differences(JobSettings(32, 512, (16, 128), scale_invariant_steps=1000), job) == []


def test_bounds_of_the_program_are_not_combined_with_a_batch_size_of_the_job() -> None:
    assert resolve_settings(JobSettings(4, 8), JobSettings(64)).bounds == BatchBounds(64)


def test_a_missing_batch_size_is_an_error() -> None:
    with pytest.raises(
        InvalidJobError, match=r"batch_size is not set: pass ElasticTrainer\(batch_size=...\)"
    ):
        resolve_settings(JobSettings(), JobSettings())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, "epochs must be an integer of at least 1, got 0"),
        ({"epochs": 1.5}, "epochs must be an integer of at least 1, got 1.5"),
        ({"scale_invariant_steps": 0}, "scale_invariant_steps must be an integer of at least 1, got 0"),
        (
            {"scale_invariant_steps": 2e4},
            "scale_invariant_steps must be an integer of at least 1, got 20000.0",
        ),
        ({"train_samples": 0}, "train_samples must be an integer of at least 1, got 0"),
        ({"max_nonfinite_steps": 0}, "max_nonfinite_steps must be an integer of at least 1, got 0"),
        ({"max_nonfinite_steps": True}, "max_nonfinite_steps must be an integer of at least 1, got True"),
        ({"efficiency_target": 2}, "efficiency_target must be a number above 0 and at most 1, got 2"),
        ({"efficiency_target": 0.0}, "efficiency_target must be a number above 0 and at most 1, got 0.0"),
        ({"efficiency_target": "0.5"}, "efficiency_target must be a number above 0 and at most 1, got '0.5'"),
        ({"checkpoint_interval": -1}, "checkpoint_interval must be a number of seconds, at least 0, got -1"),
        (
            {"checkpoint_interval": "30"},
            "checkpoint_interval must be a number of seconds, at least 0, got '30'",
        ),
        ({"max_gain": 1}, "max_gain must be a finite number above 1, got 1"),
        ({"max_gain": float("inf")}, "max_gain must be a finite number above 1, got inf"),
        ({"max_gain": "20"}, "max_gain must be a finite number above 1, got '20'"),
        ({"checkpoint_dir": 5}, "checkpoint_dir must be a folder or a URL, got 5"),
    ],
)
def test_an_argument_of_the_program_that_is_out_of_range_is_an_error(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidJobError, match=re.escape(message)):
        resolve_settings(JobSettings(32, **arguments), JobSettings())


def test_contradictory_bounds_are_an_error() -> None:
    with pytest.raises(InvalidBoundsError, match="max_batch_size 16 is less than batch_size 32"):
        resolve_settings(JobSettings(32, 16), JobSettings())


# -- what a trainer prints of them --------------------------------------------------------------------------


def reenter(trainer: ElasticTrainer) -> None:
    model = network()
    trainer.program_reentry(model, sgd(model))


@pytest.fixture
def job(make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment of a trainer of `deploy/adascalejob.yaml`; `make_trainer` has emptied it."""
    del make_trainer
    monkeypatch.setenv("ADASCALE_BATCH_SIZE", "4")
    monkeypatch.setenv("ADASCALE_MAX_BATCH_SIZE", "256")
    monkeypatch.setenv("ADASCALE_LOCAL_BSZ_BOUNDS", "4,64")
    monkeypatch.setenv("ADASCALE_SCALE_INVARIANT_STEPS", "200000")


@pytest.mark.usefixtures("job")
def test_a_trainer_without_arguments_takes_those_of_the_job(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer()
    reenter(trainer)
    assert (trainer.get_local_bsz(), trainer.scale_invariant_steps) == (4, 200_000)
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("job")
def test_a_program_that_follows_the_jobs_steps_prints_nothing(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(batch_size=4, max_batch_size=64, scale_invariant_steps=20_000)
    assert trainer.scale_invariant_steps == 200_000
    reenter(trainer)
    assert capfd.readouterr().out == ""


@pytest.mark.usefixtures("job")
def test_a_program_with_a_schedule_of_its_own_prints_the_differences(
    make_trainer: MakeTrainer, capfd: pytest.CaptureFixture[str]
) -> None:
    reenter(make_trainer(batch_size=8, scale_invariant_steps=20_000))
    assert capfd.readouterr().out == (
        "adascale: the program sets batch_size to 8, the job sets it to 4; the job's setting is used\n"
        "adascale: the program sets scale_invariant_steps to 20000, the job sets it to 200000; the job's "
        "setting is used\n"
    )
