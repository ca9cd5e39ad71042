"""The optimizer on two ranks. Those of a module run in one pair of processes."""

import pytest

from worker import adascale_cases, adascale_sharded_cases
from worker.adascale_ranks import run_cases


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases("worker.adascale_cases", "CASES", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", adascale_cases.CASES)
def test_on_two_ranks(name: str, failures: dict[str, list[str]]) -> None:
    assert not failures[name], "\n".join(failures[name])


@pytest.fixture(scope="module")
def sharded_failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases("worker.adascale_sharded_cases", "CASES", 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", adascale_sharded_cases.CASES)
def test_sharded_on_two_ranks(name: str, sharded_failures: dict[str, list[str]]) -> None:
    assert not sharded_failures[name], "\n".join(sharded_failures[name])
