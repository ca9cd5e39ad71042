"""The process group of a generation: its formation, communication between ranks, and lost peers.

A replica of G processes, which share one copy of the model and stay the same until it ends, has G lanes: lane
j consists of process j of each replica. G is usually 1, and the lane is then torch's default process group;
otherwise that is the group of the processes of the replica, of which process 0 is the leader. Gradients and
the state are exchanged over all lanes at the same time. For all else, each leader shares with the other
processes of its replica what it passes to the other replicas, or has read of their announcements. So all
processes of a replica continue alike after each call, and find out in the same call that members are lost: a
failure in one takes effect at the next `settle`.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from adascale_core.messages.channel import Assignment, encode
from adascale_worker.errors import ReplicationError, WorkerError
from adascale_worker.membership import gloo
from adascale_worker.membership.links import Formation, PeersLostError
from adascale_worker.process.device import gpu_names
from adascale_worker.process.environment import RankAssignment, listen
from adascale_worker.torch_private.distributed import (
    abort_process_group,
    default_store,
    end_default_group,
    init_default_group,
    is_lost_peer,
    loopback_gloo,
    process_group_beside,
    refuse_groups,
    reset_group_names,
    set_timeout_of,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

INIT_TIMEOUT = timedelta(minutes=5)
"""How long a replica waits for the others, when the group is formed and in every collective, without an
agent."""
FORMATION_TIMEOUT = timedelta(seconds=10)
"""How long members wait for each other while they form the group. All of them have arrived, so this takes
milliseconds. A member that waits for the connection of one that is lost meanwhile is not freed earlier."""
MEMBER_TIMEOUT = timedelta(hours=24)
"""How long members wait in a collective. They notice by themselves when one of them is lost."""

FIRST_POLL, POLL_INTERVAL = 0.001, 0.02
"""Seconds between the first two readings of the store, and the most between later ones: the time doubles."""
FAILED = "failed"
"""The event that a replica announces with the message of an error which all replicas raise."""
Values = dict[int, Any]
"""The values of the ranks that have announced an event."""

_NUMBERS = itertools.count()
"""Numbers the groups of this process: all replicas make them in the same order."""


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


class ReplicaProcesses:
    """The processes of one replica.

    All of them call the methods that exchange something in the same order.
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
        self._store: Any = None

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which communicates for its replica."""
        return self.rank == 0

    def form(self, store: Any, backend: str, timeout: timedelta) -> None:
        """Initialize torch's default process group."""
        init_default_group(backend, self._device, timeout, store=store, rank=self.rank, world_size=self.count)
        self._is_formed, self._store = True, store
        if self.count > 1:
            own = dist.PrefixStore("beside", store)  # type: ignore[attr-defined]
            self.beside = process_group_beside(own, self.rank, self.count, _HOST, timeout, share_a_gpu=False)
            set_timeout_of(self.beside, MEMBER_TIMEOUT)

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
        was_formed, self._is_formed, self.beside, self._store = self._is_formed, False, None, None
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

    def announce(self, event: str) -> None:
        """Let the other processes know of an event, which they ask for by `is_announced`."""
        if self.count > 1:
            self._store.set(f"adascale/{event}", "")

    def is_announced(self, event: str) -> bool:
        """Whether a process has announced an event."""
        return self.count > 1 and bool(self._store.check([f"adascale/{event}"]))

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


class ReplicaGroup:
    """The replicas of a generation, also a single one, as one of the processes of a replica sees them.

    All processes of all replicas call the collective methods in the same order. Under an agent, one that
    fails raises `PeersLostError`, and so does every later one until the next generation is formed.
    """

    # Sums and means of tensors, `send`, `receive` and `wait` communicate in the lane of this process only,
    # and with several processes a failure of a sum takes effect at the next `settle`.

    def __init__(
        self,
        assignment: RankAssignment,
        device: torch.device,
        own: ReplicaProcesses | None = None,
        *,
        is_elastic: bool = False,  # whether membership changes, which an agent controls
        peer_timeout: float = math.inf,  # seconds until a silent member is lost
    ) -> None:
        self.rank = assignment.rank
        self.replicas = assignment.replicas
        self.has_mesh = own is not None
        """Whether torch's default process group is that of the processes of this replica."""
        self.own = own or ReplicaProcesses(0, 1, device)
        self.process = self.own.rank
        """Index of this process in its replica, from 0."""
        self.processes = self.own.count
        """Number of processes of a replica (G)."""
        self.indices: Sequence[int] = range(self.replicas)
        """The index of the replica of each rank."""
        self.generation = 0
        self.hosts = [""] * self.replicas
        """The node of each rank, or its address; empty if unknown."""
        self.is_elastic = is_elastic
        # Groups of one process share a store, unless each generation has its own.
        self._number = 0 if is_elastic else next(_NUMBERS)
        self.peer_timeout = peer_timeout
        self._on_failure: Callable[[int], None] | None = None
        self.device = device
        # torchrun starts as many on each node; with an agent, the members find out.
        self._share_a_gpu = device.type == "cuda" and assignment.local_replicas > torch.cuda.device_count()
        self._formed = False
        self._lane: dist.ProcessGroup | None = None
        """The lane of this process, if it is not torch's default process group."""
        self._store: Any = None
        """The store of the lane; None while there is none."""
        self._replica_store: str | None = None
        """The file in which the processes of this replica find each other; None without an agent."""
        self._failed = False
        self._is_lost = False
        """Whether the processes of this replica have agreed that members are lost."""
        self._lock = threading.Lock()
        self._aborting = threading.Lock()
        """Held while NCCL's communicator is aborted, which must not be destroyed meanwhile."""
        self._sockets: frozenset[tuple[int, str]] = frozenset()
        self._sockets_before: frozenset[tuple[int, str]] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, or the leader of it."""
        return self.rank == 0 and self.own.is_leader

    @property
    def nodes(self) -> int:
        """Number of nodes that the replicas run on."""
        return len(set(self.hosts))

    # -- formation ----------------------------------------------------------------------------------------

    def form_from_environment(self) -> None:
        """Form the groups of a fixed number of replicas, of several processes from torchrun's variables.

        Without `processesPerReplica`, does nothing if the program has initialized the default process group.
        """
        if self.has_mesh:
            self._require_no_group()
        elif dist.is_initialized():
            self._store = default_store()
            return
        store: Any = None
        if self.has_mesh:
            store = dist.HashStore()  # type: ignore[attr-defined]
            if self.replicas * self.processes > 1:
                store, _, _ = next(dist.rendezvous("env://", timeout=INIT_TIMEOUT))  # type: ignore[attr-defined]
            self._form_replica(PrefixStore(f"adascale/replica-{self.rank}", store), INIT_TIMEOUT)
        self._initialize(store, INIT_TIMEOUT)

    def form_replica_at(self, path: str | None) -> None:
        """Initialize torch's default process group, of the processes that an agent has started here."""
        self._require_no_group()
        self._replica_store = path
        store: Any = dist.HashStore() if path is None else dist.FileStore(path, self.processes)  # type: ignore[attr-defined]
        with loopback_gloo():
            self._form_replica(store, MEMBER_TIMEOUT)

    def _form_replica(self, store: Any, timeout: timedelta) -> None:
        self.own.form(store, backend_of(self.device, share_a_gpu=self._share_a_gpu), timeout)

    def _require_no_group(self) -> None:
        if dist.is_initialized():
            raise WorkerError(
                "the program has initialized torch's default process group, but with processesPerReplica the "
                "trainer initializes it, for the processes of each replica: leave out "
                "torch.distributed.init_process_group"
            )

    def watch_processes(self) -> None:
        """Let the processes of this replica find out which of them is frozen, if an agent starts it again."""
        if self._replica_store is not None and self.processes > 1 and math.isfinite(self.peer_timeout):
            self.own.show_signs(f"{self._replica_store}-alive")

    def observe(self, on_failure: Callable[[int], None] | None) -> None:
        """From now on, call `on_failure` with a generation in which members cannot communicate any more.

        It is called once, in any thread, maybe after the generation has ended.
        """
        self._on_failure = on_failure

    def open_store(self, address: str) -> tuple[TCPStore, int]:
        """On rank 0: open the store of a generation."""
        with listen(address) as listener:
            port = int(listener.getsockname()[1])
            return TCPStore(
                address,
                port,
                is_master=True,
                timeout=FORMATION_TIMEOUT,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            ), port

    def form(self, assignment: Assignment, store: TCPStore | None, formation: Formation, secret: str) -> None:
        """Form the group of a generation in which this process is a member; the old one was left before.

        The leader of a replica begins, and its other processes, which wait for it, follow. Each proves first
        that it knows the secret, since torch's store and gloo accept every connection.
        """
        if self.processes > 1 and self.own.is_leader:
            place = formation.store_port, formation.states
            self.own.share(["form", encode(assignment).decode(), *place, secret])
        try:
            self._form(assignment, store, formation, secret)
        except PeersLostError:
            if self.processes == 1:
                raise
            self.fail()
        self.settle(failed=self._failed)

    def _form(
        self, assignment: Assignment, store: TCPStore | None, formation: Formation, secret: str
    ) -> None:
        if not self.has_mesh:
            self._replace_group_of_program()
        self.rank, self.replicas = assignment.rank, len(assignment.members)
        self.indices = [member.replica for member in assignment.members]
        self.hosts = [member.node or member.address for member in assignment.members]
        with self._lock:
            self.generation = assignment.generation
            self._failed = self._is_lost = False
        if self.replicas == 1:
            self._initialize(None, INIT_TIMEOUT)
            return
        with self._lock:
            before = self._sockets_before = gloo.open_sockets()
        try:
            with self._guarded():
                if store is None:
                    store = TCPStore(
                        assignment.members[0].address,
                        formation.store_port,
                        timeout=FORMATION_TIMEOUT,
                        wait_for_workers=False,
                    )
                if self.device.type == "cuda":
                    key = f"generation-{self.generation}/gpu/{self.process}"
                    used = [
                        exchange_values(store, f"{key}-{number}", self.rank, self.replicas, name)
                        for number, name in enumerate(gpu_names(self.device))
                    ]
                    self._share_a_gpu = any(len(set(each)) < self.replicas for each in used)
                self._initialize(store, FORMATION_TIMEOUT)
                created = gloo.open_sockets() - before
                own_port = [*gloo.listening_ports(created), 0][0]
                greetings = self._authenticate([own_port, *(secrets.randbits(63) for _ in range(4))], secret)
                self._sockets = gloo.connected_to(created, [port for port, *_ in greetings if port])
                if math.isfinite(self.peer_timeout):
                    gloo.keep_alive(self._sockets, self.peer_timeout)
                # Longer than for the formation.
                set_timeout_of(self.process_group, MEMBER_TIMEOUT)
        finally:
            with self._lock:
                self._sockets_before = None

    def _authenticate(self, greeting: Sequence[int], secret: str) -> list[list[int]]:
        """Return the greetings of all ranks, of which each has proven that it knows the secret."""
        greetings = self._exchange(greeting)
        proofs = self._exchange(self._proof(self.rank, greetings, secret))
        for rank, proof in enumerate(proofs):
            expected = self._proof(rank, greetings, secret)
            if not hmac.compare_digest(repr(proof), repr(expected)):
                print(
                    f"adascale: rank {rank} of generation {self.generation} does not know the secret of the "
                    "job, so it gets nothing: a process outside the job has connected to its replicas",
                    file=sys.stderr,
                    flush=True,
                )
                raise PeersLostError
        return greetings

    def _proof(self, rank: int, greetings: Sequence[Sequence[int]], secret: str) -> list[int]:
        text = f"group|{self.generation}|{rank}|{greetings}"
        digest = hmac.digest(secret.encode(), text.encode(), "sha256")
        return torch.frombuffer(bytearray(digest), dtype=torch.int64).tolist()

    def _exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all ranks, which are exchanged in the memory of the host."""
        table = torch.zeros(self.replicas, len(numbers), dtype=torch.int64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.int64)
        self._start_all_reduce(table).wait()
        return [[int(number) for number in row] for row in table.tolist()]

    def _initialize(self, store: Any, timeout: timedelta) -> None:
        """Make the lane of this process: of a single replica, which other processes cannot reach."""
        share_a_gpu, interfaces = self._share_a_gpu, contextlib.nullcontext()
        if self.replicas == 1:
            # A build of torch without NCCL suffices.
            share_a_gpu = self.has_mesh or not dist.is_nccl_available()
            store, interfaces = dist.HashStore(), loopback_gloo()  # type: ignore[attr-defined, assignment]
        place: dict[str, Any] = {}
        if store is not None:
            store = PrefixStore(f"generation-{self.generation}/lane-{self.process}", store)
            place = {"store": store, "rank": self.rank, "world_size": self.replicas}
        with interfaces:
            if self.has_mesh:
                self._lane = process_group_beside(
                    store, self.rank, self.replicas, self.device, timeout, share_a_gpu=share_a_gpu
                )
            else:
                if self.is_elastic:
                    reset_group_names()
                init_default_group(
                    backend_of(self.device, share_a_gpu=share_a_gpu), self.device, timeout, **place
                )
        self._store = store if store is not None else default_store()
        self._formed = True

    def _replace_group_of_program(self) -> None:
        """Destroy a default process group that the program has initialized for this process alone.

        As `torchrun --nproc-per-node 1` and a framework do, when they find themselves started by an agent.
        """
        if self._formed or not dist.is_initialized():
            return
        if (processes := dist.get_world_size()) > 1:
            raise WorkerError(
                f"the program has initialized torch's default process group, of {processes} processes, but "
                "under an agent program_reentry initializes it, for the replicas of each generation: leave "
                "out torch.distributed.init_process_group"
            )
        end_default_group(ended_group)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group of this process's lane."""
        lane = self._lane
        if not self.has_mesh and dist.is_initialized():
            lane = dist.group.WORLD
        if lane is None:
            raise WorkerError(
                "trainer.replica_group is known after program_reentry, which waits for the other replicas: "
                "read it later"
            )
        return lane

    def destroy(self) -> None:
        """Destroy the lane if this object has made it. May be called again."""
        with self._aborting:
            was_formed, self._formed = self._formed, False
            lane, self._lane = self._lane, None
        if lane is not None:
            refuse_groups([lane], ended_group)
        elif was_formed and dist.is_initialized():
            if self.is_elastic:
                end_default_group(ended_group)
            else:
                dist.destroy_process_group()
        self._store = None
        self._sockets = frozenset()

    def close(self) -> None:
        """Destroy all process groups that this object has initialized, because training has ended."""
        self.destroy()
        self.own.close()

    def destroy_before_finalization(self) -> None:
        """Destroy the process groups, in a process whose interpreter is finalized next."""
        self.close()
        gloo.wait_until_idle()

    # -- failures -----------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether the members of this generation can no longer communicate, as all of this replica know."""
        return self._failed if self.processes == 1 else self._is_lost

    @property
    def is_forming(self) -> bool:
        """Whether the members form the group, where each wait has a timeout."""
        return self._sockets_before is not None

    def fail(self, only: int | None = None) -> None:
        """End all communication of this generation, also what waits for a lost peer, from any thread.

        Does nothing if the generation is not `only`, for a thread whose news may be of another one.
        """
        with self._lock:
            if not self.is_elastic or self._failed or only not in (None, self.generation):
                return
            self._failed = True
            before, sockets = self._sockets_before, self._sockets
            if before is not None:
                sockets = gloo.open_sockets() - before
            generation = self.generation
        gloo.shut_down(sockets)
        # Before the next call, which may take long.
        if (on_failure := self._on_failure) is not None:
            on_failure(generation)
        with self._aborting:
            if self.device.type == "cuda" and self._formed and self.replicas > 1 and not self._share_a_gpu:
                try:
                    abort_process_group(self._lane)
                except RuntimeError as error:
                    # Kernels that wait for the lost peer then end with this process.
                    print(f"adascale: NCCL was not aborted: {error}", file=sys.stderr, flush=True)

    def be_alone(self) -> None:
        """Let this replica save its state alone: its generation has ended, and it leaves."""
        self.rank, self.replicas, self._failed, self._is_lost = 0, 1, False, False

    def is_failure(self, error: BaseException) -> bool:
        """Whether `error` is raised because members cannot communicate; then communication ends."""
        if isinstance(error, PeersLostError):
            return True
        if not self.is_elastic or self.replicas == 1:
            return False
        if self._failed or is_lost_peer(error):
            self.fail()
            return True
        return False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self._failed:
            raise PeersLostError
        try:
            yield
        except (RuntimeError, ValueError) as error:
            # What an aborted collective on a GPU has "received" cannot be decoded.
            if self.is_failure(error):
                raise PeersLostError from error
            raise
        if self._failed and self.device.type == "cuda":
            # A collective on a GPU that is aborted ends without an error, and has any result.
            raise PeersLostError

    def wait_for_device(self) -> None:
        """Wait until the collectives that were started on a GPU have ended, under an agent.

        A collective on a GPU ends with an error after its launch. Before the optimizer uses its result, the
        error must be known. On a CPU, every collective was waited for.
        """
        if self.is_elastic and self.replicas > 1 and self.device.type == "cuda":
            with self._guarded():
                torch.cuda.current_stream(self.device).synchronize()

    def _in_lane(self, communicate: Callable[[], object]) -> bool:
        """Communicate in the lane, and return whether that has not failed.

        With several processes, a failure takes effect at the next `settle`.
        """
        try:
            with self._guarded():
                communicate()
        except PeersLostError:
            if self.processes == 1:
                raise
            self.fail()
            return False
        return True

    def _lose(self) -> None:
        self.fail()
        self._is_lost = True

    def settle(self, *, failed: bool = False) -> None:
        """Raise an error if this replica has failed to communicate, on all of its processes or on none.

        All processes of a replica call this.
        """
        if self.processes > 1 and self.own.any(failed or self._failed or self._is_lost):
            failed = True
            self._lose()
        if failed:
            raise PeersLostError

    def commit(self) -> None:
        """Wait until what this step has exchanged has arrived, before the optimizer uses it.

        All processes of a replica call this. On the host, each collective call was waited for, and its
        failure is known to all processes.
        """
        if self.device.type != "cpu":
            self._in_lane(self.wait_for_device)
            self.settle()

    def _in_all_lanes(self, communicate: Callable[[], T]) -> T:
        """Return the result of a communication in which all processes of a replica pass the same.

        So each gets the same result in its lane.
        """
        results: list[T] = []
        self._in_lane(lambda: results.append(communicate()))
        self.settle()
        return results[0]

    # -- communication ------------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on all ranks. It consists of what JSON has, so that it can't run code."""
        return self.gather(value if self.rank == 0 else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on all ranks. They are as in `broadcast`.

        That of a rank is the value of its leader.
        """
        own = self.own.share(value)
        if self.replicas == 1:
            return [own]
        return self._in_all_lanes(lambda: gather_values(self.process_group, own, self.device))

    def gather_in_lane(self, value: Any) -> list[Any]:
        """Return the values of the lane, in the order of ranks; none if it has failed. They are as above."""
        rows: list[Any] = []
        succeeds = self._in_lane(lambda: rows.extend(gather_values(self.process_group, value, self.device)))
        return rows if succeeds else []

    @property
    def transfer_device(self) -> torch.device:
        """The device of tensors for `send` and `receive`. Gloo sends tensors on the host only."""
        backends = dist.get_backend_config().split(",")
        on_host = self.device.type == "cpu" or self._share_a_gpu or f"{self.device.type}:gloo" in backends
        return torch.device("cpu") if on_host else self.device

    def send(self, tensor: Tensor, target: int) -> dist.Work:
        """Start to send `tensor` to rank `target`, which calls `receive`. Not a collective call."""
        with self._guarded():
            return self.process_group.send([tensor], target, 0)

    def receive(self, tensor: Tensor, source: int) -> dist.Work:
        """Start to receive what rank `source` sends next into `tensor`. Not a collective call."""
        with self._guarded():
            return self.process_group.recv([tensor], source, 0)

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started by this rank."""
        with self._guarded():
            work.wait()

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return the elementwise sums of all ranks' `numbers`, those of their leaders, on all ranks.

        They are exchanged in the memory of the host, so that no GPU is waited for.
        """
        tensor = torch.tensor(self.own.share(numbers), dtype=torch.float64, device="cpu")
        self.add_replicas(tensor)
        return tensor.tolist()

    def add_shards(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the processes of this replica."""
        self.own.add(tensor)

    def add_replicas(self, tensor: Tensor) -> None:
        """Replace a tensor, the same on all processes of a replica, by its sum over the replicas.

        The sum is the same on all processes of all replicas, bit for bit.
        """
        if self.replicas > 1:
            numbers = tensor.double().cpu()
            self._in_all_lanes(lambda: self._start_all_reduce(numbers).wait())
            tensor.copy_(numbers)

    def average(self, tensor: Tensor) -> None:
        """Replace a tensor by its mean over the lane. It has the same type and shape on all ranks."""
        if self.replicas > 1:
            self.finish_sums([self.start_sum(tensor)])
            tensor.div_(self.replicas)

    def start_sum(self, tensor: Tensor) -> dist.Work | None:
        """Start to replace a tensor by its sum over the lane, and return what `finish_sums` waits for."""
        works: list[dist.Work] = []
        self._in_lane(lambda: works.append(self._start_all_reduce(tensor)))
        return works[0] if works else None

    def finish_sums(self, works: Sequence[dist.Work | None]) -> bool:
        """Wait for sums over the lane, and return whether all have ended."""
        return self._in_lane(lambda: [work.wait() for work in works if work is not None])

    def copy_from_rank_0(self, tensors: Sequence[Tensor]) -> None:
        """Replace `tensors` by those of the same process of rank 0. Each has the same type and shape."""

        def copy() -> None:
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                same = [tensor for tensor in tensors if tensor.dtype == dtype]
                flat = torch.cat([tensor.reshape(-1) for tensor in same])
                self.process_group.broadcast(flat, 0).wait()
                if self.rank > 0:
                    for tensor, part in zip(same, flat.split([each.numel() for each in same]), strict=True):
                        tensor.copy_(part.view(tensor.shape))

        if self.replicas > 1:
            self._in_lane(copy)
            self.settle()

    def extremes(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the elementwise least and greatest of the lane's `values`, on all ranks, on the host."""
        both = torch.cat([-values, values]).cpu()
        if self.replicas > 1:
            self._in_lane(lambda: self._start_all_reduce(both, dist.ReduceOp.MAX).wait())
            self.settle()
        return -both[: len(values)], both[len(values) :]

    # -- announcements ------------------------------------------------------------------------------------

    # No collective calls: a replica that is lost meanwhile does not end the others. Values are as in
    # `broadcast`.

    def announce(self, event: str, value: Any = "") -> None:
        """Let the other replicas read a value of this one.

        Does nothing if the store is gone, with the process that serves it or with the lane.
        """
        store = self._store
        if self.replicas > 1 and self.own.is_leader and store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._key(event, self.rank), json.dumps(value))

    def announced(self, event: str) -> Values | None:
        """Return the values that have come; None if the store is gone.

        All processes of a replica call this; in another thread than the main one, which may be anywhere, each
        reads the store itself.
        """
        if self.processes == 1 or threading.current_thread() is not threading.main_thread():
            values = self._read(event)
        elif self._is_lost:
            return None
        else:
            found = (self._read(event), self._failed) if self.own.is_leader else None
            values, is_lost = self.own.share(found)
            if is_lost:
                self._lose()
        if values is None:
            return None
        return {rank: json.loads(value) for rank, value in enumerate(values) if value is not None}

    def poll(
        self,
        *events: str,
        timeout: float = INIT_TIMEOUT.total_seconds(),
        is_over: Callable[[], bool] | None = None,  # None: once members are lost
    ) -> Iterator[list[Values]]:
        """Yield the values of some events, again and again, until the timeout, or until the store is gone.

        All processes of a replica get the same ones, equally often.
        """
        deadline, interval = time.monotonic() + timeout, FIRST_POLL
        while True:
            is_over_now = self.has_failed if is_over is None else is_over()
            # Before the last reading, which finds what others have announced before they were lost.
            is_last = not self.own.all(not is_over_now and time.monotonic() < deadline)
            values = [self.announced(event) for event in events]
            found = [each for each in values if each is not None]
            if len(found) < len(values):
                return
            yield found
            if is_last:
                return
            time.sleep(interval)
            interval = min(2.0 * interval, POLL_INTERVAL)

    def _read(self, event: str) -> list[str | None] | None:
        values: list[str | None] = [None] * self.replicas
        store = self._store
        if self.replicas == 1:
            return values
        if store is None:
            return None
        try:
            for rank in range(self.replicas):
                key = self._key(event, rank)
                if store.check([key]):
                    values[rank] = store.get(key).decode()
        except RuntimeError:
            return None
        return values

    def retract(self, event: str, ranks: Iterable[int]) -> None:
        """Delete the values that some ranks have announced with `event`."""
        store = self._store
        if self.replicas > 1 and self.own.is_leader and store is not None:
            with contextlib.suppress(RuntimeError):
                for rank in ranks:
                    store.delete_key(self._key(event, rank))

    def _key(self, event: str, rank: int) -> str:
        return f"adascale/{self._number}/{event}/{rank}"

    def _start_all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dist.Work:
        return self.process_group.allreduce([tensor], op)


def backend_of(device: torch.device, *, share_a_gpu: bool) -> str:
    """Return the backend of the process group of replicas."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:gloo" if share_a_gpu else "cpu:gloo,cuda:nccl"


def raise_failure(failed: Values) -> None:
    """Raise the error that another replica has announced, if one has."""
    for message in failed.values():
        raise ReplicationError(message)


def ended_group() -> WorkerError:
    """Return the error of a collective call with a group of an earlier generation."""
    return WorkerError(
        "a process group of an earlier generation was used, whose members have changed: make groups again "
        "with torch.distributed.new_group when trainer.generation has changed, and read "
        "trainer.replica_group and torch.distributed.group.WORLD when they are needed"
    )


def exchange_values(store: TCPStore, key: str, rank: int, ranks: int, value: str) -> list[str]:
    """Return the `value` of each rank. All ranks call this."""
    keys = [f"{key}/{each}" for each in range(ranks)]
    store.set(keys[rank], value)
    return [each.decode() for each in store.multi_get(keys)]
