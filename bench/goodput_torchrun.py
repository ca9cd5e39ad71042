"""The training program of `bench/goodput.py` with torchrun: DDP, and asynchronous checkpoints of torch.

It continues from the newest complete checkpoint, with the samples after it. Environment: BENCH_CHECKPOINTS, a
folder; BENCH_CHECKPOINT_STEPS, steps between two checkpoints; BENCH_TIMEOUT, seconds after which a collective
call fails.
"""

import os
import shutil
import signal
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import goodput_model
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.nn.parallel import DistributedDataParallel

FOLDER, EVERY = Path(os.environ["BENCH_CHECKPOINTS"]), int(os.environ["BENCH_CHECKPOINT_STEPS"])


def state(step: int) -> dict[str, Any]:
    """Return what a checkpoint has."""
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments, "step": step}


def terminated(_number: int, _frame: FrameType | None) -> None:
    """End at the SIGTERM of torchrun, which has noticed a loss."""
    raise SystemExit(1)


signal.signal(signal.SIGTERM, terminated)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["BENCH_TIMEOUT"])))
rank, replicas = dist.get_rank(), dist.get_world_size()
saving: Any = dist.new_group(backend="gloo")
model, optimizer = goodput_model.make()
records = goodput_model.Records(model)
step = 0
complete = sorted(FOLDER.glob("*/.metadata"))
if complete:
    loaded = state(0)
    load(loaded, checkpoint_id=complete[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    step = loaded["step"]
ddp = DistributedDataParallel(model)
saved: Any = None
while True:
    try:
        numbers = goodput_model.share(step, rank, replicas)
        records.learn(ddp, optimizer, numbers, step=step + 1, replicas=replicas, rank=rank)
    except (RuntimeError, SystemExit):
        records.end(made=False)
        raise
    step += 1
    records.end(made=True)
    if step % EVERY == 0:
        if saved is not None:
            saved.result()
        if rank == 0:
            for old in sorted(FOLDER.glob("*/.metadata"))[:-1]:
                shutil.rmtree(old.parent)
        saved = async_save(state(step), checkpoint_id=FOLDER / f"{step:08}", process_group=saving)
