"""Runs many short cases in one set of spawned gloo ranks, because spawning takes seconds."""

import os
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.multiprocessing.spawn import spawn

from adascale_worker import gloo_threads

TIMEOUT = timedelta(seconds=20)

Cases = Mapping[str, Callable[[], None]]


def run_cases(cases: Cases, world_size: int, folder: Path) -> dict[str, list[str]]:
    """Run each case on all ranks, one after the other.

    Returns:
        for each case, the tracebacks of the ranks on which it failed; empty for a case that passes.
    """
    spawn(_rank, (world_size, dict(cases), str(folder)), nprocs=world_size)
    return {
        name: [file.read_text() for rank in range(world_size) if (file := folder / f"{name}.{rank}").exists()]
        for name in cases
    }


def _rank(rank: int, world_size: int, cases: dict[str, Callable[[], None]], folder: str) -> None:
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
    gloo_threads.wait_until_idle()


def _join(store: Store, generation: int, rank: int, world_size: int) -> None:
    own = PrefixStore(f"generation{generation}", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=world_size, timeout=TIMEOUT)
