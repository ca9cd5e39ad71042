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
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from adascale_core.failures import EXIT_PEER_LOST
from adascale_worker.process.exit import end_process
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


class ReplicaMessages:
    """Exchanges values over a process group of processes, such as those of a replica.

    All of them call the methods in the same order. Values consist of what JSON has, so they can't run code.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device = _HOST) -> None:
        self._group = group
        self._device = device

    @property
    def process(self) -> int:
        """Index of this process in the group, from 0."""
        return self._group.rank()

    @property
    def count(self) -> int:
        """Number of processes of the group."""
        return self._group.size()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order, on all processes."""
        document = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        message = torch.zeros(SMALL, dtype=torch.uint8)
        message[:_HEADER] = torch.tensor([len(document)]).view(torch.uint8)
        message[_HEADER : _HEADER + len(document)] = document[: SMALL - _HEADER]
        message, document = message.to(self._device), document.to(self._device)
        messages = [torch.empty_like(message) for _ in range(self.count)]
        self._group.allgather([messages], [message]).wait()
        return [self._complete(*each, document) for each in enumerate(messages)]

    def _complete(self, process: int, message: Tensor, own: Tensor) -> Any:
        """Return the value of a process, whose document is sent on its own if it is long."""
        length = int(message[:_HEADER].clone().view(torch.int64))
        document = message[_HEADER : _HEADER + length]
        if len(document) < length:
            empty = torch.empty(length, dtype=torch.uint8, device=self._device)
            document = own if process == self.process else empty
            self._group.broadcast(document, process).wait()
        return json.loads(document.cpu().numpy().tobytes())


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


CHECKS: Final = 10
"""Number of checks in succession in which a process must show no sign of life. No duration is measured,
because time passes also while this process is frozen."""


class ProcessWatch:
    """Shows the other processes of a replica that this one runs, and checks whether they run.

    Each process has a file, which exists from `start` to `stop`, and changes its time of modification.
    """

    def __init__(
        self, path: str, process: int, count: int, timeout: float, end: Callable[[int], None] | None = None
    ) -> None:
        self._files = [Path(f"{path}-{index}") for index in range(count)]
        self._own = self._files[process]
        self._others = [index for index in range(count) if index != process]
        self._timeout = timeout
        self._end = self._end_process if end is None else end
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="adascale-process-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._own.touch()
        self._thread.start()

    def stop(self) -> None:
        """Stop: this process ends, or does not need the others. May be called again."""
        self._is_stopped.set()
        self._own.unlink(missing_ok=True)

    def _run(self) -> None:
        seen: dict[int, tuple[int, int]] = {}
        while not self._is_stopped.wait(self._timeout / CHECKS):
            # The file is missing if the agent has ended, or this process ends.
            with contextlib.suppress(OSError):
                os.utime(self._own)
            for other in self._others:
                try:
                    changed = self._files[other].stat().st_mtime_ns
                except OSError:
                    seen.pop(other, None)  # That process has not begun, or has stopped.
                    continue
                before, checks = seen.get(other, (changed, 0))
                seen[other] = changed, checks + 1 if changed == before else 0
                if seen[other][1] > CHECKS:
                    self._end(other)
                    return

    def _end_process(self, other: int) -> None:
        # The main thread waits for the other process.
        end_process(
            EXIT_PEER_LOST,
            f"process {other} of this replica has shown no sign of life for {self._timeout:g} s: ending the "
            "replica, so that another one joins the others",
        )


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
        self.messages: ReplicaMessages | None = None
        """Messages of threads beside the main one, over a group of their own; None with one process."""
        self._watch: ProcessWatch | None = None

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
            beside = process_group_beside(own, self.rank, self.count, _HOST, timeout, share_a_gpu=False)
            set_timeout_of(beside, MESSAGE_TIMEOUT)
            self.messages = ReplicaMessages(beside)

    def watch(self, path: str, timeout: float) -> None:
        """End this process when another one is frozen, until `close`."""
        self._watch = ProcessWatch(path, self.rank, self.count, timeout)
        self._watch.start()

    def close(self) -> None:
        """Destroy torch's default process group, if `form` has made it. May be called again."""
        if self._watch is not None:
            self._watch.stop()
        was_formed, self._is_formed, self.messages = self._is_formed, False, None
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
        return ReplicaMessages(group).gather(value)

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
