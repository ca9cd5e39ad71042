"""The optimizer on two ranks. The cases are in `adascale_cases`; all run in one pair of processes."""

import pytest
from torch.distributed.fsdp import FSDPModule

from worker.adascale_cases import CASES, FSDP_CASES
from worker.adascale_ranks import run_cases

HAS_FSDP = hasattr(FSDPModule, "set_custom_reduce_scatter")
SELECTED = {name: case for name, case in CASES.items() if HAS_FSDP or name not in FSDP_CASES}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return run_cases(SELECTED, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_on_two_ranks(name: str, failures: dict[str, list[str]]) -> None:
    if name not in SELECTED:
        pytest.skip("this version of torch has no FSDPModule.set_custom_reduce_scatter")
    assert not failures[name], "\n".join(failures[name])
