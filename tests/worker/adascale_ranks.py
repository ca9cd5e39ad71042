"""Runs many short cases in one set of gloo ranks, each in a process of its own."""

import importlib
import os
import subprocess
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from adascale_worker.membership import gloo
from support.fast_python import PYTHON

TIMEOUT = timedelta(seconds=20)

Cases = Mapping[str, Callable[[], None]]


def run_cases(module: str, name: str, world_size: int, folder: Path) -> dict[str, list[str]]:
    """Run each case on all ranks, one after the other.

    Args:
        module, name: where the cases are.
        world_size: number of ranks.
        folder: for the files of the ranks.

    Returns:
        for each case, the tracebacks of the ranks on which it failed; empty for a case that passes.
    """
    tests = Path(__file__).parents[1]
    program = "import sys; from worker.adascale_ranks import run_rank; run_rank(*sys.argv[1:])"
    arguments = [module, name, str(world_size), str(folder)]
    ranks = [
        subprocess.Popen(
            [*PYTHON, "-c", program, str(rank), *arguments],
            cwd=tests,
            env={**os.environ, "PYTHONPATH": str(tests)},
        )
        for rank in range(world_size)
    ]
    assert [rank.wait() for rank in ranks] == [0] * world_size
    return {
        case: [file.read_text() for rank in range(world_size) if (file := folder / f"{case}.{rank}").exists()]
        for case in cases_of(module, name)
    }


def cases_of(module: str, name: str) -> Cases:
    """Return the cases of this name in a module."""
    cases: Cases = getattr(importlib.import_module(module), name)
    return cases


def run_rank(rank_text: str, module: str, name: str, world_size_text: str, folder: str) -> None:
    """Run the cases on one rank."""
    rank, world_size, cases = int(rank_text), int(world_size_text), cases_of(module, name)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("error")
    store = FileStore(os.fspath(Path(folder) / "store"), world_size)
    store.set_timeout(TIMEOUT)
    generation = 0
    _join(store, generation, rank, world_size)
    for name, case in cases.items():
        failure = ""
        try:
            torch.manual_seed(0)
            case()
        except BaseException:  # noqa: BLE001 (reported as the result of the case)
            failure = traceback.format_exc()
            (Path(folder) / f"{name}.{rank}").write_text(failure)
        # A failed case may leave unfinished collectives, so the next case gets a new process group.
        store.set(f"{name}/{rank}", "failed" if failure else "passed")
        if any(store.get(f"{name}/{other}") == b"failed" for other in range(world_size)):
            dist.destroy_process_group()
            generation += 1
            _join(store, generation, rank, world_size)
    dist.destroy_process_group()
    gloo.wait_until_idle()


def _join(store: Store, generation: int, rank: int, world_size: int) -> None:
    own = PrefixStore(f"generation{generation}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=TIMEOUT)
