"""The processes of this replica, which share one copy of the model. They stay the same until it ends.

They are torch's default process group. What the replicas exchange is decided in process 0 of each, the
leader, which shares the result here, so that all processes of a replica do the same.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from adascale_worker.membership.process_watch import ProcessWatch
from adascale_worker.membership.replica_messages import ReplicaMessages
from adascale_worker.torch_private.distributed import (
    nccl_options,
    process_group_beside,
    set_timeout_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESSAGE_TIMEOUT = timedelta(hours=24)
"""How long a thread waits for those of the other processes, which may write to a slow storage."""


class ReplicaProcesses:
    """The processes of one replica.

    All of them call the methods in the same order.
    """

    def __init__(self, rank: int, count: int, device: torch.device) -> None:
        self.rank = rank
        self.count = count
        self._device = device
        self._mesh: DeviceMesh | None = None
        self._is_formed = False
        self._messages: ReplicaMessages | None = None
        self._watch: ProcessWatch | None = None

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which communicates for its replica."""
        return self.rank == 0

    def form(self, store: Any, backend: str, timeout: timedelta) -> None:
        """Initialize torch's default process group."""
        hook = sys.excepthook
        options = nccl_options(self._device, timeout) if "nccl" in backend else {}
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.count, timeout=timeout, **options
        )
        # torch replaces it by a hook that adds the rank.
        sys.excepthook = hook
        self._is_formed = True
        if self.count > 1:
            host = torch.device("cpu")
            own = dist.PrefixStore("beside", store)  # type: ignore[attr-defined]
            beside = process_group_beside(own, self.rank, self.count, host, timeout, share_a_gpu=False)
            set_timeout_of(beside, MESSAGE_TIMEOUT)
            self._messages = ReplicaMessages(beside)

    def watch(self, path: str, timeout: float) -> None:
        """End this process when another one is frozen, until `close`."""
        self._watch = ProcessWatch(path, self.rank, self.count, timeout)
        self._watch.start()

    def close(self) -> None:
        """Destroy torch's default process group, if `form` has made it. May be called again."""
        if self._watch is not None:
            self._watch.stop()
        was_formed, self._is_formed, self._messages = self._is_formed, False, None
        if was_formed and dist.is_initialized():
            dist.destroy_process_group()

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh of these processes: shape (G,), with the dimension "shard"."""
        if self._mesh is None:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(self._device.type, (self.count,), mesh_dim_names=("shard",))
        return self._mesh

    def share(self, value: Any) -> Any:
        """Return the leader's `value` on all processes. It consists of what JSON has."""
        return value if self.count == 1 else ReplicaMessages(_default_group()).share(value)

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order. They consist of what JSON has."""
        return [value] if self.count == 1 else ReplicaMessages(_default_group()).gather(value)

    @property
    def messages(self) -> ReplicaMessages | None:
        """Messages of threads beside the main one, over a group of their own; None with one process."""
        return self._messages

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true in one of the processes."""
        return self.sum([float(flag)])[0] > 0.0

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise sums of the processes' `numbers`, which are exchanged on the host."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        self.add(tensor)
        return tensor.tolist()

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over the processes."""
        if self.count > 1:
            dist.all_reduce(tensor)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None, "form is called first"
    return group
