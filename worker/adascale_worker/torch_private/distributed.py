"""Process groups and stores."""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Joinable

from adascale_worker.torch_private import private_part


def default_store() -> Any:
    """Return the store of torch's default process group, for keys that need no collective call."""
    return private_part(dist.distributed_c10d, "_get_default_store", "to learn which replicas end training")()


def tcp_store(
    host: str, port: int, world_size: int, *, is_master: bool, timeout: timedelta, listen_fd: int | None
) -> TCPStore:
    """Return a TCPStore that does not wait for the other ranks, served on a socket that already listens."""

    return TCPStore(
        host,
        port,
        world_size,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listen_fd,
    )


def process_group_beside(
    store: Any, rank: int, size: int, device: torch.device, timeout: timedelta, *, share_a_gpu: bool
) -> dist.ProcessGroup:
    """Return a process group of processes that have different default process groups.

    `torch.distributed.new_group` requires a default process group of which it is a part.
    """
    group = dist.ProcessGroup(store, rank, size)
    register = private_part(group, "_register_backend", "to make a group of the replicas")
    set_default = private_part(group, "_set_default_backend", "to make a group of the replicas")
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)  # type: ignore[attr-defined]
    register(torch.device("cpu"), kinds.GLOO, gloo)
    set_default(kinds.GLOO)
    if device.type == "cuda" and share_a_gpu:
        register(torch.device("cuda"), kinds.GLOO, gloo)
    elif device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, size, options)  # type: ignore[attr-defined]
        register(torch.device("cuda"), kinds.NCCL, nccl)
        set_default(kinds.NCCL)
    return group


@contextmanager
def loopback_gloo() -> Iterator[None]:
    """Let groups of gloo that are made meanwhile listen on the loopback interface only."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    interface = next((each for _, each in socket.if_nameindex() if each in ("lo", "lo0")), None)
    if interface is not None:
        os.environ[name] = interface
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif interface is not None:
            del os.environ[name]


_ended_groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def end_default_group(error: Callable[[], Exception]) -> None:
    """Destroy the default process group and all that were made beside it, and refuse their use from now on.

    A program may still have one of them. torch would let it communicate with the processes that were in it,
    or with itself alone, which is a wrong result.
    """
    module = dist.distributed_c10d
    groups = list(private_part(module, "_world", _PURPOSE).pg_map)
    dist.destroy_process_group()
    refuse_groups(groups, error)


_PURPOSE = "to refuse groups whose members have changed"


def refuse_groups(groups: Iterable[dist.ProcessGroup], error: Callable[[], Exception]) -> None:
    """Refuse collective calls of the program with `groups` from now on."""
    module = dist.distributed_c10d
    _ended_groups.update(groups)
    # All collective calls with a group ask this function first.
    is_other = private_part(module, "_rank_not_in_group", _PURPOSE)
    if not hasattr(is_other, "refuses_ended_groups"):

        def refuse_ended(group: Any) -> Any:
            if group is not None and group in _ended_groups:
                raise error()
            return is_other(group)

        refuse_ended.refuses_ended_groups = True  # type: ignore[attr-defined]
        module._rank_not_in_group = refuse_ended  # type: ignore[assignment]


def reset_group_names() -> None:
    """Let the default process group that is made next have the name that it has in a new process.

    torch names groups by counting those of a process, and one whose formation fails counts until a default
    group is destroyed. Members with another name would wait for each other in vain.
    """
    world = private_part(dist.distributed_c10d, "_world", "to form a group again after a failed formation")
    world.group_count = 0


def set_timeout_of(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of collectives of a process group."""
    purpose = "to wait longer for a collective than for the formation"
    for backend in _backends_of(group, purpose):
        private_part(backend, "_set_default_timeout", purpose)(timeout)


def _backends_of(group: dist.ProcessGroup, purpose: str) -> list[Any]:
    devices = private_part(group, "_device_types", purpose)
    get = private_part(group, "_get_backend", purpose)
    return list({id(backend): backend for backend in map(get, devices)}.values())


def nccl_options(device: torch.device, timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` with which NCCL connects at the first collective on a GPU.

    torch 2.15 would connect at once, on the GPU of LOCAL_RANK or of the rank, which may be another one. And
    the sockets of NCCL would be taken for those of Gloo, which are found among the new ones.
    """
    # torch 2.9 connects at the first collective anyway, as does 2.15 with TORCH_DIST_USE_NCCL2=0.
    options = dist.ProcessGroupNCCL.Options()
    if not hasattr(options, "lazy_init") or os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        return {}
    options.lazy_init, options._timeout = True, timeout
    return {"device_id": device, "pg_options": options}


def init_default_group(backend: str, device: torch.device, timeout: timedelta, **place: Any) -> None:
    """Initialize torch's default process group, with a store, rank and world size or by the environment."""
    options = nccl_options(device, timeout) if "nccl" in backend else {}
    hook = sys.excepthook
    dist.init_process_group(backend, timeout=timeout, **place, **options)
    if place:
        # torch replaces it by a hook that adds the rank, once more for each group.
        sys.excepthook = hook


def abort_process_group(group: dist.ProcessGroup | None) -> None:
    """End the NCCL kernels of a process group, by default torch's, that wait for a lost peer."""
    group = dist.group.WORLD if group is None else group
    backend = private_part(group, "_get_backend", "to end kernels that wait for a lost peer")(
        torch.device("cuda")
    )
    backend.abort()


def is_in_join(joinable: Joinable) -> bool:
    """Whether `joinable` takes part in a `torch.distributed.algorithms.join.Join` context now."""
    config = private_part(joinable, "_join_config", "to detect whether peers may have run out of data")
    return bool(config.enable)


_CONNECTION_ERRORS = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket timeout",
    "timed out waiting",
    "software caused connection abort",
    "connection refused",
    # Of a network that has become silent, and of hosts and routes that are gone.
    "connection timed out",
    "no route to host",
    "network is unreachable",
    "network is down",
    "host is down",
    # Of NCCL, and of torch after the communicator is aborted.
    "remote process exited or there was a network error",
    "communicator was aborted",
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
