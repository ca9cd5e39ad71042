"""Settings: the job goes before the program."""

import pytest

from adascale_core.batch import BatchBounds, InvalidBoundsError
from adascale_core.errors import InvalidJobError
from adascale_worker.environment import JobSettings
from adascale_worker.settings import resolve_settings


def test_the_programs_arguments_stand_where_the_job_says_nothing() -> None:
    settings, differences = resolve_settings(JobSettings(32, 512, (16, 128), 0.7, 1000), JobSettings())
    assert settings.bounds == BatchBounds(32, 512, (16, 128))
    assert (settings.efficiency_target, settings.scale_invariant_steps) == (0.7, 1000)
    assert differences == []


def test_the_job_goes_before_the_program_and_the_difference_is_told() -> None:
    settings, differences = resolve_settings(
        JobSettings(32, 512, (16, 128), scale_invariant_steps=1000),
        JobSettings(64, 512, None, scale_invariant_steps=2000),
    )
    assert settings.bounds == BatchBounds(64, 512)
    assert settings.scale_invariant_steps == 2000
    assert differences == [
        "the program asks for batch_size 32, the job says 64",
        "the program asks for local_bsz_bounds (16, 128), the job says none",
        "the program asks for scale_invariant_steps 1000, the job says 2000",
    ]


def test_bounds_of_the_program_never_mix_with_a_batch_size_of_the_job() -> None:
    settings, _ = resolve_settings(JobSettings(4, 8), JobSettings(64))
    assert settings.bounds == BatchBounds(64)


def test_no_batch_size_is_told() -> None:
    with pytest.raises(
        InvalidJobError, match=r"no batch size is given: pass ElasticTrainer\(batch_size=...\)"
    ):
        resolve_settings(JobSettings(), JobSettings())


def test_bounds_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidBoundsError, match="max_batch_size 16 is below batch_size 32"):
        resolve_settings(JobSettings(32, 16), JobSettings())
