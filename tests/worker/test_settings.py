"""Settings: the job goes before the program."""

import pytest

from adascale_core.batch import BatchBounds, InvalidBoundsError
from adascale_core.errors import InvalidJobError
from adascale_worker.environment import JobEnvironment
from adascale_worker.settings import settle


def test_the_programs_arguments_stand_where_the_job_says_nothing() -> None:
    settings, differences = settle(JobEnvironment(32, 512, (16, 128), 0.7, 1000), JobEnvironment())
    assert settings.bounds == BatchBounds(32, 512, (16, 128))
    assert (settings.efficiency_target, settings.scale_invariant_steps) == (0.7, 1000)
    assert differences == []


def test_the_job_goes_before_the_program_and_the_difference_is_told() -> None:
    settings, differences = settle(
        JobEnvironment(32, 512, (16, 128), scale_invariant_steps=1000),
        JobEnvironment(64, 512, None, scale_invariant_steps=2000),
    )
    assert settings.bounds == BatchBounds(64, 512)
    assert settings.scale_invariant_steps == 2000
    assert differences == [
        "the program asks for batch_size 32, the job says 64",
        "the program asks for local_bsz_bounds (16, 128), the job says none",
        "the program asks for scale_invariant_steps 1000, the job says 2000",
    ]


def test_bounds_of_the_program_never_mix_with_a_batch_size_of_the_job() -> None:
    settings, _ = settle(JobEnvironment(4, 8), JobEnvironment(64))
    assert settings.bounds == BatchBounds(64)


def test_no_batch_size_is_told() -> None:
    with pytest.raises(
        InvalidJobError, match=r"no batch size is given: pass ElasticTrainer\(batch_size=...\)"
    ):
        settle(JobEnvironment(), JobEnvironment())


def test_bounds_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(InvalidBoundsError, match="max_batch_size 16 is below batch_size 32"):
        settle(JobEnvironment(32, 16), JobEnvironment())
