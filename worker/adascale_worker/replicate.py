"""Training on several replicas: the process group, and a model made data-parallel in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from adascale_worker.environment import RankAssignment
from adascale_worker.patching import StandIn
from adascale_worker.torch_private import rebuild_buckets, tcp_store

JOIN_TIMEOUT = timedelta(minutes=5)


def join(place: RankAssignment, device: torch.device, generation: int, listen_fd: int | None) -> bool:
    """Form the process group of this generation, unless the program has, or is alone.

    Ranks and the address of rank 0 are known, so there is nothing to agree on: rank 0 serves the store on
    the socket that its agent keeps listening for it, and a prefix keeps generations apart on it.

    Returns:
        whether a group was formed here, and so is to be destroyed here.
    """
    if place.replicas == 1 or dist.is_initialized():
        return False
    backend = "nccl" if device.type == "cuda" else "gloo"
    if generation == 0 or place.master_addr is None or place.master_port is None:
        dist.init_process_group(backend, timeout=JOIN_TIMEOUT)
        return True
    tcp = tcp_store(
        place.master_addr,
        place.master_port,
        place.replicas,
        is_master=place.rank == 0,
        timeout=JOIN_TIMEOUT,
        listen_fd=listen_fd,
    )
    store = PrefixStore(f"generation-{generation}", tcp)
    dist.init_process_group(
        backend, store=store, rank=place.rank, world_size=place.replicas, timeout=JOIN_TIMEOUT
    )
    return True


class Peers:
    """The replicas of this generation, as this one sees them.

    Args:
        place: which of them this is.
        device: where tensors that they exchange have to be.
    """

    def __init__(self, place: RankAssignment, device: torch.device) -> None:
        self.rank = place.rank
        self.replicas = place.replicas
        self._device = device

    def from_main(self, value: Any) -> Any:
        """What rank 0 gives, on all of them; it may be any object that can be pickled."""
        if self.replicas == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self._device)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """What each of them gives, by rank."""
        if self.replicas == 1:
            return [value]
        values: list[Any] = [None] * self.replicas
        dist.all_gather_object(values, value)
        return values

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """The sums of what each of them gives, on all of them."""
        if self.replicas == 1:
            return tuple(numbers)
        told = torch.tensor(numbers, device=self._device)
        dist.all_reduce(told)
        return tuple(told.tolist())

    def numbers_from_main(self, numbers: list[int]) -> list[int]:
        """As `from_main`, cheaper, for a list that is as long on all of them."""
        if self.replicas == 1:
            return numbers
        told = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        dist.broadcast(told, src=0)
        return [int(number) for number in told.tolist()]


def replicate(
    model: torch.nn.Module, device: torch.device, *, find_unused_parameters: bool = False
) -> DistributedDataParallel:
    """Make `model` data-parallel in place: its own forward goes through DDP while it trains.

    The program keeps its model, its parameters' names and its training loop. While the model evaluates,
    or gradients are off, its forward is its own, so that one replica alone may evaluate.

    Returns:
        the DDP around the model.
    """
    shell = _Shell(model, last_first=not find_unused_parameters)
    ddp = DistributedDataParallel(
        shell,
        device_ids=[device] if device.type == "cuda" else None,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,
    )

    if not find_unused_parameters:
        rebuild_buckets(ddp)
    model.forward = _Forward(shell, ddp)
    return ddp


class _Forward(StandIn):
    """The forward of a model that is data-parallel in place."""

    def __init__(self, shell: _Shell, ddp: DistributedDataParallel) -> None:
        super().__init__(shell.own_forward)
        self._shell = shell
        self._ddp = ddp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self._shell.model.training:
            return self._ddp(*args, **kwargs)
        return self.own(*args, **kwargs)


class _Shell(torch.nn.Module):
    """What DDP wraps: the model under the forward that it had.

    Args:
        model: the program's.
        last_first: list its parameters in the order in which their gradients mostly come, for DDP to
            exchange the first ones while the others are still computed.
    """

    def __init__(self, model: torch.nn.Module, *, last_first: bool) -> None:
        super().__init__()
        if last_first:
            self.last_first = torch.nn.ParameterList(reversed(list(model.parameters())))
        self.own_forward: Callable[..., Any] = model.forward
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.own_forward(*args, **kwargs)


_LOST_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "software caused connection abort",
    "connection refused",
)


def is_lost_peer(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, says that another replica is gone.

    Gloo tells it by a plain RuntimeError, so its words are all there is to go by.
    """
    while error is not None:
        if isinstance(error, (dist.DistNetworkError, dist.DistBackendError, dist.DistStoreError)):
            return True
        if isinstance(error, RuntimeError):
            words = str(error).lower()
            if ("gloo" in words or "nccl" in words) and any(sign in words for sign in _LOST_PEER_SIGNS):
                return True
        error = error.__cause__ or error.__context__
    return False
