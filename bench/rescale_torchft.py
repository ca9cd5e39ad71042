"""The training program of `bench/rescale.py` with torchft: one process is one replica group.

It runs in an environment of its own, which has torchft and not AdaScale:

    .venv/bin/uv venv --python .venv/bin/python .venv-torchft
    VIRTUAL_ENV=.venv-torchft .venv/bin/uv pip install torchft-nightly numpy torch==<version of .venv>

Environment: BENCH_STATE, BENCH_FOLDER, REPLICA, TORCHFT_LIGHTHOUSE. It uses the GPU that it sees, with NCCL,
or else the CPU, with gloo. Records its steps as `step_times.py` does, with torchft's own count of committed
steps and of participants.
"""

import os
import time
from datetime import timedelta
from pathlib import Path

import rescale_model
import torch
import torchft_manager
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Optimizer,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)

STATE = os.environ["BENCH_STATE"]
features, targets = rescale_model.samples(STATE)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model, sgd = rescale_model.make(STATE)
model.to(device)
group = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo
timeout = timedelta(seconds=60)
manager = torchft_manager.make(model, sgd, group(timeout=timeout), timeout)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, sgd)
lines = (Path(os.environ["BENCH_FOLDER"]) / f"steps-{os.getpid()}").open("a", buffering=1)


def stepped(*_):  # type: ignore[no-untyped-def]
    if device.type == "cuda":
        torch.cuda.synchronize()
    participants = manager.num_participants()
    lines.write(f"{time.time()} {manager.current_step()} 0 {participants} {os.environ['REPLICA']}\n")


register_optimizer_step_post_hook(stepped)
generator = torch.Generator().manual_seed(int(os.environ["REPLICA"]))
while True:
    chosen = torch.randint(len(features), (rescale_model.LOCAL_BSZ,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(features[chosen].to(device)), targets[chosen].to(device))
    loss.backward()
    optimizer.step()
