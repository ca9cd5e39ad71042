"""The processes of this replica, which share one copy of the model. They stay the same until it ends.

They are torch's default process group. Process 0, the leader, exchanges with the other replicas, and shares
the result here, so that all processes of a replica continue alike.

When a process is killed, the agent ends the replica at once. A frozen process keeps its connections open, and
the others wait for it in the collective calls of FSDP, so each process checks whether the others run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from adascale_worker.torch_private.distributed import (
    init_default_group,
    process_group_beside,
    set_timeout_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALL = 1024
"""Bytes of a message that is exchanged in one collective call."""
_HEADER = 8
_HOST = torch.device("cpu")


def gather_values(group: dist.ProcessGroup, value: Any, device: torch.device = _HOST) -> list[Any]:
    """Return the values of all processes of a group, in their order, on all of them. A collective call.

    Values consist of what JSON has, so they can't run code.
    """
    document = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    message = torch.zeros(SMALL, dtype=torch.uint8)
    message[:_HEADER] = torch.tensor([len(document)]).view(torch.uint8)
    message[_HEADER : _HEADER + len(document)] = document[: SMALL - _HEADER]
    message = message.to(device)
    messages = [torch.empty_like(message) for _ in range(group.size())]
    group.allgather([messages], [message]).wait()
    values = []
    for process, each in enumerate(messages):
        length = int(each[:_HEADER].clone().view(torch.int64))
        received = each[_HEADER : _HEADER + length]
        if len(received) < length:
            # A long document is sent on its own.
            empty = torch.empty(length, dtype=torch.uint8, device=device)
            received = document.to(device) if process == group.rank() else empty
            group.broadcast(received, process).wait()
        values.append(json.loads(received.cpu().numpy().tobytes()))
    return values


def attempt(
    action: Callable[[], Any], kinds: Sequence[type[Exception]]
) -> tuple[dict[str, Any], Exception | None]:
    """Return what processes share of an action, its result or error, and the error itself."""
    try:
        return {"result": action()}, None
    except Exception as error:  # noqa: BLE001 (the other processes wait for it)
        return {"error": described_error(error, kinds)}, error


def described_error(error: Exception, kinds: Sequence[type[Exception]]) -> tuple[str, str]:
    """Describe an error for other processes. `kinds` are those that they raise alike, subclasses first."""
    name = next((kind.__name__ for kind in kinds if isinstance(error, kind)), "")
    return name, str(error) if name else f"{type(error).__name__}: {error}"


def shared_error(
    described: Sequence[str], kinds: Sequence[type[Exception]], otherwise: Callable[[str], Exception]
) -> Exception:
    """Return the error that `described_error` has described; `otherwise` makes one of another kind."""
    name, message = described
    return next((kind for kind in kinds if kind.__name__ == name), otherwise)(message)


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
        self._is_formed = False
        self.beside: dist.ProcessGroup | None = None
        """The group for threads beside the main one; None with one process."""
        self._signs: list[Path] = []
        """A file of each process, whose time of modification it changes; none if nobody looks at them."""
        self._seen: dict[int, tuple[int, int]] = {}
        """When the file of a process has changed, and in how many checks it has not since, by process."""

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which communicates for its replica."""
        return self.rank == 0

    def form(self, store: Any, backend: str, timeout: timedelta) -> None:
        """Initialize torch's default process group."""
        init_default_group(backend, self._device, timeout, store=store, rank=self.rank, world_size=self.count)
        self._is_formed = True
        if self.count > 1:
            own = dist.PrefixStore("beside", store)  # type: ignore[attr-defined]
            self.beside = process_group_beside(own, self.rank, self.count, _HOST, timeout, share_a_gpu=False)
            set_timeout_of(self.beside, MESSAGE_TIMEOUT)

    def show_signs(self, path: str) -> None:
        """Show the other processes from now on, until `close`, that this one is not frozen."""
        self._signs = [Path(f"{path}-{index}") for index in range(self.count)]
        self._signs[self.rank].touch()

    def find_frozen(self, checks: int) -> int | None:
        """Show a sign of life, and return a process that has shown none in more than `checks` calls of this.

        No duration is measured, because time passes also while this process is frozen.
        """
        signs = self._signs
        # The file is missing if the agent has ended, or this process ends.
        with contextlib.suppress(OSError):
            for own in signs[self.rank : self.rank + 1]:
                os.utime(own)
        for other, file in enumerate(signs):
            try:
                changed = file.stat().st_mtime_ns
            except OSError:
                self._seen.pop(other, None)  # That process has not begun, or has stopped.
                continue
            before, unchanged = self._seen.get(other, (changed, 0))
            self._seen[other] = changed, unchanged + 1 if changed == before else 0
            if other != self.rank and self._seen[other][1] > checks:
                return other
        return None

    def close(self) -> None:
        """Destroy torch's default process group, if `form` has made it. May be called again."""
        signs, self._signs = self._signs, []
        for own in signs[self.rank : self.rank + 1]:
            own.unlink(missing_ok=True)
        was_formed, self._is_formed, self.beside = self._is_formed, False, None
        if was_formed and dist.is_initialized():
            dist.destroy_process_group()

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The device mesh of these processes: shape (G,), with the dimension "shard"."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(self._device.type, (self.count,), mesh_dim_names=("shard",))

    def share(self, value: Any) -> Any:
        """Return the leader's `value` on all processes. It consists of what JSON has."""
        return self.exchange(value if self.is_leader else None)[0]

    def exchange(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order. They consist of what JSON has."""
        if self.count == 1:
            return [value]
        group = dist.group.WORLD
        assert group is not None, "form is called first"
        return gather_values(group, value)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is true in one of the processes."""
        return self.sum([float(flag)])[0] > 0.0

    def all(self, flag: bool) -> bool:
        """Return whether `flag` is true in all of the processes."""
        return not self.any(not flag)

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise sums of the processes' `numbers`, which are exchanged on the host."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        self.add(tensor)
        return tensor.tolist()

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by the sum over the processes."""
        if self.count > 1:
            dist.all_reduce(tensor)
