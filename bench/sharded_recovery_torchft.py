"""The training program of `bench/sharded_recovery.py` with torchft: replica groups of several processes.

As torchtitan does (`torchtitan/experiments/torchft`): FSDP2 inside a group, whose all-reduce hook averages
the reduce-scattered gradients over the groups by torchft's manager. It runs in an environment of its own:

    .venv/bin/uv venv --python .venv/bin/python .venv-torchft
    VIRTUAL_ENV=.venv-torchft .venv/bin/uv pip install torchft-nightly numpy torch==<version of .venv>

Environment: BENCH_GB, BENCH_FOLDER, BENCH_GROUPS, the largest number of groups, REPLICA, TORCHFT_LIGHTHOUSE,
and those of torchrun for the processes of a group.
"""

import os
from datetime import timedelta

import sharded_recovery_model as shared
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from torchft import (  # type: ignore[import-not-found]
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft.process_group import ManagedProcessGroup  # type: ignore[import-not-found]

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, count = dist.get_rank(), dist.get_world_size()
records = shared.Records(os.environ["BENCH_FOLDER"], rank)
model, adamw = shared.make(float(os.environ["BENCH_GB"]), init_device_mesh("cpu", (count,)))


def load_state_dict(state):  # type: ignore[no-untyped-def]
    model.load_state_dict(state["model"])
    adamw.load_state_dict(state["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()},
    replica_id=f"bench-{os.environ['REPLICA']}",
    timeout=timedelta(seconds=120),
    quorum_timeout=timedelta(seconds=120),
    # Otherwise a thread calls state_dict, which reshards the model, during a forward pass of the main thread.
    use_async_quorum=False,
    init_sync=False,
)
group = ManagedProcessGroup(manager)
group.register("replicate")


def average(gradient: torch.Tensor) -> None:
    """Average a gradient over the groups."""
    dist.all_reduce(gradient, group=group, op=dist.ReduceOp.AVG)


for module in model.modules():
    if hasattr(module, "set_all_reduce_hook"):
        module.set_all_reduce_hook(average)  # type: ignore[operator]
optimizer = Optimizer(manager, adamw)
data = shared.samples()
sampler = DistributedSampler(
    data,
    replica_rank=int(os.environ["REPLICA"]),
    num_replica_groups=int(os.environ["BENCH_GROUPS"]),
    group_rank=rank,
    num_replicas=count,
    shuffle=False,
)
for number, y in DataLoader(data, batch_size=shared.LOCAL_BSZ // count, sampler=sampler):
    records.drawn(number.tolist())
    before = manager.current_step()
    shared.learn(model, optimizer, number, y)
    committed = manager.current_step() > before and manager.is_participating()
    if committed:
        records.made(
            manager.current_step(), 0, manager.num_participants(), int(os.environ["REPLICA"]), number.tolist()
        )
