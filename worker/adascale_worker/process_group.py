"""The process group of a generation: its formation, communication between ranks, and lost peers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from adascale_worker.environment import RankAssignment
from adascale_worker.torch_private import default_store, tcp_store

RELEASE_TIME = 0.05
"""Seconds for Gloo's threads to release the tensors of the last collective, before the interpreter ends."""
POLL_INTERVAL = 0.05
"""Seconds between two readings of the store."""
INIT_TIMEOUT = timedelta(minutes=5)
"""How long a replica waits for the others, when the group is formed and in every collective."""


class ReplicaGroup:
    """The replicas of this generation, in the process of one replica.

    All replicas must call a collective method in the same order. With one replica, every method returns its
    argument without communication.

    Args:
        assignment: rank of this replica, number of replicas, and the address of rank 0.
        device: device of the tensors that the replicas exchange; "cuda" selects NCCL, otherwise Gloo.
    """

    def __init__(self, assignment: RankAssignment, device: torch.device) -> None:
        self.rank = assignment.rank
        self.replicas = assignment.replicas
        self._assignment = assignment
        self._device = device
        self._formed = False

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def form(self, generation: int, listen_fd: int | None) -> None:
        """Initialize torch's default process group, unless the program has done so or there is one replica.

        The agents assign the ranks and the address of rank 0, so no rendezvous is needed: rank 0 serves the
        store on a socket that its agent already listens on. A key prefix per generation keeps late members
        of an earlier generation out.

        Args:
            generation: number of the allocation; 0 without an agent, where torchrun's variables are used.
            listen_fd: on rank 0, the file descriptor of the listening socket; None on other ranks.
        """
        assignment = self._assignment
        if self.replicas == 1 or dist.is_initialized():
            return
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        if generation == 0 or assignment.master_addr is None or assignment.master_port is None:
            dist.init_process_group(backend, timeout=INIT_TIMEOUT)
        else:
            tcp = tcp_store(
                assignment.master_addr,
                assignment.master_port,
                self.replicas,
                is_master=self.is_main,
                timeout=INIT_TIMEOUT,
                listen_fd=listen_fd,
            )
            store = PrefixStore(f"generation-{generation}", tcp)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.replicas, timeout=INIT_TIMEOUT
            )
        self._formed = True

    def destroy(self) -> None:
        """Destroy the process group if `form` initialized it. May be called again."""
        if self._formed and dist.is_initialized():
            dist.destroy_process_group()
        self._formed = False

    def destroy_before_finalization(self) -> None:
        """Destroy the process group, in a process whose interpreter is finalized next.

        Gloo's threads can still hold tensors of the last collective, and need the GIL to release them. A
        thread that asks for the GIL during finalization aborts the process ("terminate called without an
        active exception", github.com/pytorch/pytorch/pull/179291). Sleeping lets them have it before.
        """
        if self._formed:
            self.destroy()
            time.sleep(RELEASE_TIME)

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on all ranks. The value can be any object that pickle supports."""
        if self.replicas == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self._device)
        return values[0]

    def broadcast_integers(self, numbers: list[int]) -> list[int]:
        """Return rank 0's `numbers` on all ranks: cheaper than `broadcast`, for lists of equal length."""
        if self.replicas == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(tensor, src=0)
        return [int(number) for number in tensor.tolist()]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on all ranks."""
        if self.replicas == 1:
            return [value]
        values: list[Any] = [None] * self.replicas
        dist.all_gather_object(values, value)
        return values

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Return the elementwise sums of all ranks' `numbers`, on all ranks."""
        if self.replicas == 1:
            return tuple(numbers)
        tensor = torch.tensor(numbers, device=self._device)
        dist.all_reduce(tensor)
        return tuple(tensor.tolist())

    def announce(self, event: str) -> None:
        """Let the other replicas know that this one has reached `event`. Not a collective call."""
        if self.replicas > 1:
            default_store().set(f"adascale/{event}/{self.rank}", "")

    def missing(self, event: str, timeout: float) -> list[int]:
        """Return the ranks that have not announced `event` within `timeout` seconds.

        Empty if the store is gone: the process that serves it ends after it has seen all the others.
        """
        if self.replicas == 1:
            return []
        try:
            store, deadline = default_store(), time.monotonic() + timeout
            while missing := [
                rank for rank in range(self.replicas) if not store.check([f"adascale/{event}/{rank}"])
            ]:
                if time.monotonic() >= deadline:
                    return missing
                time.sleep(POLL_INTERVAL)
        except RuntimeError:
            pass
        return []

    def extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elementwise least and greatest of all ranks' `values`, on all ranks."""
        if self.replicas == 1:
            return values, values
        both = torch.cat([-values, values]).to(self._device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        return -both[: len(values)], both[len(values) :]


_CONNECTION_ERRORS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "software caused connection abort",
    "connection refused",
)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether `error`, or an error that caused it, means that the connection to another replica is lost.

    Gloo raises a plain RuntimeError for this, so only its message identifies it.
    """
    while error is not None:
        if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError):
            message = str(error).lower()
            from_backend = "gloo" in message or "nccl" in message
            if from_backend and any(fragment in message for fragment in _CONNECTION_ERRORS):
                return True
        error = error.__cause__ or error.__context__
    return False
