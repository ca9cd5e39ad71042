"""The training program of `bench/goodput.py` with torchft: one process is one replica group.

It runs in the environment that `rescale_torchft.py` describes. The samples of a group follow from torchft's
number of the step, so that a discarded step is repeated with the same ones, and a group that joins continues
where the others are. Environment: REPLICA; TORCHFT_LIGHTHOUSE; BENCH_TIMEOUT, seconds of torchft's timeouts.
"""

import os
from datetime import timedelta

import goodput_model
import torchft_manager
from torchft import (  # type: ignore[import-not-found]
    DistributedDataParallel,
    Optimizer,
    ProcessGroupGloo,
)

REPLICA, REPLICAS = int(os.environ["REPLICA"]), int(os.environ["BENCH_REPLICAS"])
timeout = timedelta(seconds=float(os.environ["BENCH_TIMEOUT"]))
model, sgd = goodput_model.make()
records = goodput_model.Records(model)
manager = torchft_manager.make(model, sgd, ProcessGroupGloo(timeout=timeout), timeout)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, sgd)
replicas = 0
while True:
    before = manager.current_step()
    numbers = goodput_model.share(before, REPLICA, REPLICAS)
    # Those of the last step: torchft decides during a step who takes part in it.
    records.learn(ddp, optimizer, numbers, step=before + 1, replicas=replicas, rank=REPLICA)
    replicas = manager.num_participants()
    # A group that joins has no part in its first step.
    records.end(made=manager.current_step() > before and manager.is_participating(), replicas=replicas)
