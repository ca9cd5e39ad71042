"""Tests of the variables of launchers."""

from adascale_core.names import LAUNCHER_VARIABLES
from adascale_frameworks.launchers import hide_launcher

OTHERS = {"PATH": "/bin", "SLURM_JOB_ID": "7", "ADASCALE_RANK": "1", "OMP_NUM_THREADS": "1"}


def test_the_variables_of_launchers_are_removed_and_others_stay() -> None:
    environ = dict.fromkeys(LAUNCHER_VARIABLES, "3") | OTHERS
    removed = hide_launcher(environ)
    assert environ == OTHERS
    assert removed == dict.fromkeys(LAUNCHER_VARIABLES, "3")


def test_what_was_removed_can_be_put_back() -> None:
    before = {"RANK": "0", "LOCAL_RANK": "0", "PMI_SIZE": "2"} | OTHERS
    environ = dict(before)
    environ.update(hide_launcher(environ))
    assert environ == before


def test_without_a_launcher_nothing_is_removed() -> None:
    environ = dict(OTHERS)
    assert hide_launcher(environ) == {}
    assert environ == OTHERS
