"""What it costs that an agent keeps the state of a single replica in memory, and what a restart reads.

    OMP_NUM_THREADS=1 python bench/agent_snapshots.py [--gigabytes 1] [--blocks 10] [--steps 300]

Trains the network of `examples/digits.py` with AdamW and batches of 64. Blocks of `--steps` with copies and
without take turns in one process. Printed are the processor time of a step with copies, relative to one
without in the block before, as the median of the ratios and their quartiles; the same for two blocks without
copies, which is the noise; the duration of a copy, and the steps per copy.

Then a state of `--gigabytes` in tensors of 64 MB is copied and read again: in the memory of the agent, and as
a checkpoint in a folder, whose file the kernel has in its cache. Printed are the times, medians of three.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from adascale import ElasticTrainer
from adascale_storage.folder import Folder
from adascale_worker.process.snapshot_place import make_snapshot_files
from adascale_worker.state import state as state_module
from adascale_worker.state.file import Snapshot
from adascale_worker.state.state import SnapshotMemory
from adascale_worker.state.store import CheckpointInfo, CheckpointStore

BATCH = 64
INFO = CheckpointInfo(step=1, progress=1.0, epoch=0, replicas=1, generation=1, finished=False, saved_at=0.0)


def tiny() -> tuple[nn.Module, TensorDataset]:
    data = TensorDataset(torch.randn(1347, 64), torch.randint(10, (1347,)))
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), data


def measure_steps(blocks: int, steps: int) -> None:
    """Print what copies cost."""
    state_module.SNAPSHOT_DELAY = 0.0
    trainer = ElasticTrainer(batch_size=BATCH, device="cpu")
    memory = SnapshotMemory(make_snapshot_files().split(":"))
    trainer._replica.snapshot_memory = memory
    model, data = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    trainer.program_reentry(model, optimizer)
    assert trainer._training is not None
    state, own = trainer._training.state, memory.save
    copies: list[float] = []

    def save(*arguments: Any) -> None:
        copies.append(timed(lambda: own(*arguments)))

    memory.save = save  # type: ignore[method-assign, assignment]
    batches = endless(trainer, data)

    def block(*, with_copies: bool) -> float:
        """Train some steps, and return the processor time that they take."""
        state._memory = memory if with_copies else None
        begun = time.process_time()
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        return time.process_time() - begun

    for with_copies in (False, True, True):
        block(with_copies=with_copies)
    copies.clear()
    ratios, noise = [], []
    for _ in range(blocks):
        before = block(with_copies=False)
        ratios.append(block(with_copies=True) / before)
        noise.append(block(with_copies=False) / before)
    print(f"processor time of a step with copies, relative to one without: {quartiles(ratios)}")
    print(f"without copies again: {quartiles(noise)}")
    distance = blocks * steps / len(copies)
    print(f"a copy: {1e3 * statistics.median(copies):.2f} ms; steps per copy: {distance:.0f}")
    trainer.close()


def measure_copies(gigabytes: float) -> None:
    """Print how long a state takes that is copied, and read again."""
    state = {"weights": [torch.rand(16_000_000) for _ in range(round(gigabytes * 1e9 / 64e6))]}
    paths = make_snapshot_files().split(":")
    memory, snapshot = SnapshotMemory(paths), Snapshot()
    first = [timed(lambda: memory.save(state, INFO, {})) for _ in range(2)]
    copies = [timed(lambda: memory.save(state, INFO, {})) for _ in range(3)]
    kept = memory.newest()
    assert kept is not None
    reads = [timed(kept.read) for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        store = CheckpointStore(Folder(Path(folder)))
        snapshot.copy(state)
        saved = timed(lambda: store.save(snapshot, INFO))
        loads = [timed(store.load) for _ in range(3)]
    print(f"{gigabytes:g} GB: the first two copies: {first[0]:.2f} s and {first[1]:.2f} s")
    print(f"a copy: {statistics.median(copies):.2f} s; to read it: {statistics.median(reads):.2f} s")
    print(f"a checkpoint is written in {saved:.2f} s; to read it: {statistics.median(loads):.2f} s")


def endless(trainer: ElasticTrainer, data: TensorDataset) -> Iterator[list[torch.Tensor]]:
    """Yield batches of one epoch after the other."""
    epoch = 0
    while True:
        yield from trainer.dataloader(data)
        trainer.step(epoch)
        epoch += 1


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print(f"load average {os.getloadavg()[0]:.0f}")
    measure_steps(options.blocks, options.steps)
    measure_copies(options.gigabytes)


if __name__ == "__main__":
    main()
