"""The manager of torchft for a replica group of one process, as the programs of benchmarks use it."""

import os
from datetime import timedelta

from torch import nn, optim
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager  # type: ignore[import-not-found]

STORE = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
"""That of the group. It ends with this object."""


def make(model: nn.Module, optimizer: optim.Optimizer, process_group, timeout: timedelta):  # type: ignore[no-untyped-def]
    """Return the manager of the replica group REPLICA, which sends state to the others.

    Args:
        model: the model.
        optimizer: torch's own optimizer of it.
        process_group: a process group of torchft.
        timeout: of torchft's calls.
    """

    def load_state_dict(state):  # type: ignore[no-untyped-def]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return Manager(
        pg=process_group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"bench-{os.environ['REPLICA']}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=STORE.port,
        timeout=timeout,
    )
