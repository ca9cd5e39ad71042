"""Tests of the settings: the job overrides the program."""

import re
from typing import Any

import pytest

from adascale_core.batch.plans import BatchBounds, InvalidBoundsError
from adascale_core.errors import InvalidJobError
from adascale_worker.process.environment import JobSettings
from adascale_worker.process.settings import resolve_settings


def test_the_programs_arguments_are_used_if_the_job_sets_nothing() -> None:
    settings, differences = resolve_settings(JobSettings(32, 512, (16, 128), 0.7, 1000), JobSettings())
    assert settings.bounds == BatchBounds(32, 512, (16, 128))
    assert (settings.efficiency_target, settings.scale_invariant_steps) == (0.7, 1000)
    assert differences == []


def test_the_job_overrides_the_program_and_each_difference_is_described() -> None:
    settings, differences = resolve_settings(
        JobSettings(32, 512, (16, 128), scale_invariant_steps=1000),
        JobSettings(64, 512, None, scale_invariant_steps=2000),
    )
    assert settings.bounds == BatchBounds(64, 512)
    assert settings.scale_invariant_steps == 2000
    assert differences == [
        "the program sets batch_size to 32, the job sets it to 64",
        "the program sets local_bsz_bounds to (16, 128), the job does not set local_bsz_bounds",
        "the program sets scale_invariant_steps to 1000, the job sets it to 2000",
    ]


def test_bounds_of_the_program_are_not_combined_with_a_batch_size_of_the_job() -> None:
    settings, _ = resolve_settings(JobSettings(4, 8), JobSettings(64))
    assert settings.bounds == BatchBounds(64)


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
