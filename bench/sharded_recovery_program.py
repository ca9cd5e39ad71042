"""The training program of `bench/sharded_recovery.py`: with AdaScale, or with `--plain` FSDP2 alone.

Environment: BENCH_GB, the size of the state; BENCH_FOLDER, of the records.
"""

import itertools
import os
import sys

import sharded_recovery_model as shared
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from adascale import ElasticTrainer

GB, FOLDER = float(os.environ["BENCH_GB"]), os.environ["BENCH_FOLDER"]


def elastic() -> None:
    """Train with AdaScale."""
    records = shared.Records(FOLDER, int(os.environ.get("ADASCALE_LOCAL_RANK", "0")))
    trainer = ElasticTrainer()
    model, optimizer = shared.make(GB, trainer.mesh)
    shared.forget_peak()
    state = trainer.program_reentry(model, optimizer)
    records.record_peak("joined")
    for epoch in itertools.count(state.epoch):
        for number, y in trainer.dataloader(shared.samples()):
            records.drawn(number.tolist())
            before = trainer.steps
            shared.learn(model, optimizer, number, y)
            # Otherwise the step was discarded, and its samples come again.
            if trainer.steps > before:
                records.made(
                    trainer.steps, trainer.generation, trainer.replicas, trainer.rank, number.tolist()
                )
        trainer.step(epoch)


def plain() -> None:
    """Train with FSDP2 alone."""
    dist.init_process_group("gloo")
    records = shared.Records(FOLDER, dist.get_rank())
    model, optimizer = shared.make(GB, init_device_mesh("cpu", (dist.get_world_size(),)))
    loader = DataLoader(shared.samples(), batch_size=shared.LOCAL_BSZ // dist.get_world_size())
    for step, (number, y) in enumerate(loader, start=1):
        shared.learn(model, optimizer, number, y)
        records.made(step, 0, 1, 0, number.tolist())


torch.set_num_threads(1)
plain() if "--plain" in sys.argv else elastic()
