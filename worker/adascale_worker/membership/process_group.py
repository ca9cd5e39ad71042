"""The process group of a generation: its formation, communication between ranks, and lost peers."""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from adascale_core.messages.channel import Assignment
from adascale_worker.errors import GroupFormationError, WorkerError
from adascale_worker.membership import gloo
from adascale_worker.membership.links import Formation, PeersLostError
from adascale_worker.membership.replica_processes import ReplicaMessages
from adascale_worker.process.device import describe_shared_gpu, gpu_names
from adascale_worker.process.environment import RankAssignment
from adascale_worker.process.sockets import listen
from adascale_worker.torch_private.distributed import (
    abort_process_group,
    default_store,
    end_default_group,
    is_lost_peer,
    loopback_gloo,
    nccl_options,
    reset_group_names,
    set_collective_timeout,
    tcp_store,
)

POLL_INTERVAL = 0.05
"""Seconds between two readings of the store."""
INIT_TIMEOUT = timedelta(minutes=5)
"""How long a replica waits for the others, when the group is formed and in every collective, without an
agent."""
FORMATION_TIMEOUT = timedelta(seconds=10)
"""How long members wait for each other while they form the group. All of them have arrived, so this takes
milliseconds. A member that waits for the connection of one that is lost meanwhile is not freed earlier."""
MEMBER_TIMEOUT = timedelta(hours=24)
"""How long members wait in a collective. They notice by themselves when one of them is lost."""

_NUMBERS = itertools.count()
"""Numbers the groups of this process: all replicas make them in the same order."""


class GroupObserver(Protocol):
    """Is notified when the members of a generation can no longer communicate."""

    def peers_lost(self) -> None:
        """Communication has failed. Called once per generation, in any thread."""

    def save_beside(self) -> bool:
        """Save the state without the other replicas, and return whether it is saved.

        Called in a thread before the process ends, while the main thread cannot leave a collective call.
        """


class ReplicaGroup:
    """The replicas of a generation: torch's default process group, also of a single replica.

    All replicas must call the collective methods in the same order. Under an agent, a collective that fails
    raises `PeersLostError`, and so does every later one until the next generation is formed.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        device: torch.device,
        *,
        is_elastic: bool = False,  # whether membership changes, which an agent controls
        peer_timeout: float | None = None,  # seconds until a silent member is lost. None for no limit
    ) -> None:
        self.rank = assignment.rank
        self.replicas = assignment.replicas
        self.process = 0
        """Index of this process in its replica, from 0."""
        self.processes = 1
        """Number of processes of a replica (G)."""
        self.indices: Sequence[int] = range(self.replicas)
        """The index of the replica of each rank."""
        self.generation = 0
        self.nodes = 1
        """Number of nodes that the replicas run on."""
        self.is_elastic = is_elastic
        # Groups of one process share a store, unless each generation has its own.
        self._number = 0 if is_elastic else next(_NUMBERS)
        self._peer_timeout = peer_timeout
        self._observer: GroupObserver | None = None
        self._device = self.device = device
        # torchrun starts as many on each node; with an agent, the members find out.
        self._share_a_gpu = device.type == "cuda" and assignment.local_replicas > torch.cuda.device_count()
        self._has_warned_of_gpu = False
        self._formed = False
        self._failed = False
        self._lock = threading.Lock()
        self._aborting = threading.Lock()
        """Held while NCCL's communicator is aborted, which must not be destroyed meanwhile."""
        self._sockets: frozenset[tuple[int, str]] = frozenset()
        self._sockets_before: frozenset[tuple[int, str]] | None = None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    # -- formation ----------------------------------------------------------------------------------------

    def form_from_environment(self) -> None:
        """Initialize torch's default process group, of several replicas from torchrun's variables.

        Does nothing if the program has done so.
        """
        if dist.is_initialized():
            return
        if self.replicas == 1:
            self._initialize_alone()
            return
        try:
            self._initialize(None, INIT_TIMEOUT)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            reason = str(error).partition("\n")[0]
            raise GroupFormationError(
                f"rank {self.rank} cannot connect to the other replicas of {self.replicas}: one has ended, "
                f"and its output says why, or MASTER_ADDR and MASTER_PORT are not those of rank 0 ({reason})"
            ) from error

    def begin_generation(self, observer: GroupObserver | None) -> None:
        """Notify `observer` if communication fails from now on. None: nobody."""
        self._observer = observer

    def open_store(self, address: str) -> tuple[TCPStore, int]:
        """On rank 0: open the store of a generation."""
        with listen(address) as listener:
            port = int(listener.getsockname()[1])
            store = tcp_store(
                address,
                port,
                1,
                is_master=True,
                timeout=FORMATION_TIMEOUT,
                listen_fd=listener.detach(),
            )
        return store, port

    def form(self, assignment: Assignment, store: TCPStore | None, formation: Formation, secret: str) -> None:
        """Form the group of a generation in which this process is a member. The old group was left before.

        torch's store and gloo accept every connection. So each process proves in the group, before anything
        else is exchanged, that it knows the secret.
        """
        self._replace_group_of_program()
        self.rank, self.replicas = assignment.rank, len(assignment.members)
        self.indices = [member.replica for member in assignment.members]
        self.generation = assignment.generation
        self.nodes = len({member.node or member.address for member in assignment.members})
        self._failed = False
        if self.replicas == 1:
            self._initialize_alone()
            return
        with self._lock:
            before = self._sockets_before = gloo.open_sockets()
        try:
            with self._guarded():
                if store is None:
                    store = tcp_store(
                        assignment.members[0].address,
                        formation.store_port,
                        self.replicas,
                        is_master=False,
                        timeout=FORMATION_TIMEOUT,
                        listen_fd=None,
                    )
                if self._device.type == "cuda":
                    key = f"generation-{self.generation}/gpu/{self.process}"
                    used = [
                        exchange_values(store, f"{key}-{number}", self.rank, self.replicas, name)
                        for number, name in enumerate(gpu_names(self._device))
                    ]
                    self._share_a_gpu = any(len(set(each)) < self.replicas for each in used)
                    self._warn_of_shared_gpu(used[0])
                self._initialize(store, FORMATION_TIMEOUT)
                created = gloo.open_sockets() - before
                own_port = [*gloo.listening_ports(created), 0][0]
                greetings = self._authenticate([own_port, *_random_numbers()], secret)
                self._sockets = gloo.connected_to(created, [port for port, *_ in greetings if port])
                if self._peer_timeout is not None:
                    gloo.keep_alive(self._sockets, self._peer_timeout)
                self._wait_longer()
        finally:
            with self._lock:
                self._sockets_before = None
        if self._failed:
            raise PeersLostError

    def _wait_longer(self) -> None:
        """Wait longer in a collective than for the formation."""
        set_collective_timeout(MEMBER_TIMEOUT)

    def _warn_of_shared_gpu(self, used: Sequence[str]) -> None:
        """Print that this replica shares its GPU although others are free, once."""
        visible = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
        message = describe_shared_gpu(
            str(self._device), used[self.rank], used, {str(each): gpu_names(each)[0] for each in visible}
        )
        if message is not None and not self._has_warned_of_gpu:
            self._has_warned_of_gpu = True
            print(f"adascale: rank {self.rank}: {message}", file=sys.stderr, flush=True)

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
        self._all_reduce(table)
        return [[int(number) for number in row] for row in table.tolist()]

    def _initialize(self, store: TCPStore | None, timeout: timedelta) -> None:
        backend = backend_of(self._device, share_a_gpu=self._share_a_gpu)
        options = nccl_options(self._device, timeout) if "nccl" in backend else {}
        hook = sys.excepthook
        if store is None:
            dist.init_process_group(backend, timeout=timeout, **options)
        else:
            reset_group_names()
            dist.init_process_group(
                backend,
                store=PrefixStore(f"generation-{self.generation}", store),
                rank=self.rank,
                world_size=self.replicas,
                timeout=timeout,
                **options,
            )
        # torch replaces it by a hook that adds the rank, once more for each group.
        if self.is_elastic:
            sys.excepthook = hook
        self._formed = True

    def _initialize_alone(self) -> None:
        """Initialize the default process group of a single replica, which other processes cannot reach."""
        # A build of torch without NCCL suffices for a single replica.
        backend = backend_of(self._device, share_a_gpu=not dist.is_nccl_available())
        options = nccl_options(self._device, INIT_TIMEOUT) if "nccl" in backend else {}
        hook = sys.excepthook
        if self.is_elastic:
            reset_group_names()
        with loopback_gloo():
            dist.init_process_group(
                backend,
                store=dist.HashStore(),  # type: ignore[attr-defined]
                rank=0,
                world_size=1,
                timeout=INIT_TIMEOUT,
                **options,
            )
        sys.excepthook = hook
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
        """torch's process group of the replicas."""
        if not dist.is_initialized():
            raise WorkerError(
                "trainer.replica_group is known after program_reentry, which waits for the other replicas: "
                "read it later"
            )
        world = dist.group.WORLD
        assert world is not None, "the default process group is initialized"
        return world

    def destroy(self) -> None:
        """Destroy the process group if this object initialized it. May be called again."""
        with self._aborting:
            was_formed, self._formed = self._formed, False
        if was_formed and dist.is_initialized():
            if self.is_elastic:
                end_default_group(ended_group)
            else:
                dist.destroy_process_group()
        self._sockets = frozenset()

    def close(self) -> None:
        """Destroy all process groups that this object has initialized, because training has ended."""
        self.destroy()

    def destroy_before_finalization(self) -> None:
        """Destroy the process groups, in a process whose interpreter is finalized next."""
        self.close()
        gloo.wait_until_idle()

    # -- failures -----------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether the members of this generation can no longer communicate."""
        return self._failed

    def fail(self) -> None:
        """End all communication of this generation, also what waits for a lost peer, from any thread."""
        with self._lock:
            if not self.is_elastic or self._failed:
                return
            self._failed = True
            before, sockets = self._sockets_before, self._sockets
            if before is not None:
                sockets = gloo.open_sockets() - before
            generation = self.generation
        gloo.shut_down(sockets)
        if before is None:
            # While a group is formed, each wait has a timeout.
            self._watch(lambda: not self._failed or self.generation != generation)
        # Before the next call, which may take long.
        if self._observer is not None:
            self._observer.peers_lost()
        with self._aborting:
            if self._device.type == "cuda" and self._formed and self.replicas > 1 and not self._share_a_gpu:
                try:
                    self._abort()
                except RuntimeError as error:
                    # Kernels that wait for the lost peer then end with this process.
                    print(f"adascale: NCCL was not aborted: {error}", file=sys.stderr, flush=True)

    def _watch(self, has_ended: Callable[[], bool]) -> None:
        gloo.end_stuck_collectives(has_ended, self._save_beside)

    def _abort(self) -> None:
        abort_process_group()

    def _save_beside(self) -> bool:
        """Save the state, on a GPU beside a kernel that waits for a lost peer, in a stream of its own."""
        if self._observer is None:
            return False
        if self._device.type != "cuda":
            return self._observer.save_beside()
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            return self._observer.save_beside()

    def be_alone(self) -> None:
        """Let this replica save its state alone: its generation has ended, and it leaves."""
        self.rank, self.replicas, self._failed = 0, 1, False

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
        except RuntimeError as error:
            if self.is_failure(error):
                raise PeersLostError from error
            raise
        if self._failed and self._device.type == "cuda":
            # A collective on a GPU that is aborted ends without an error, and has any result.
            raise PeersLostError

    def wait_for_device(self) -> None:
        """Wait until the collectives that were started on a GPU have ended, under an agent.

        A collective on a GPU ends with an error after its launch. Before the optimizer uses its result, the
        error must be known. On a CPU, every collective was waited for.
        """
        if self.is_elastic and self.replicas > 1 and self._device.type == "cuda":
            with self._guarded():
                torch.cuda.current_stream(self._device).synchronize()

    def settle(self, *, failed: bool = False) -> None:
        """Raise an error if this replica has failed to communicate, on all of its processes or on none.

        All processes of a replica call this.
        """
        if failed:
            raise PeersLostError

    def all_processes(self, value: bool) -> bool:
        """Return whether `value` is true on all processes of this replica, which all call this."""
        return value

    def exchange_within(self, value: Any) -> list[Any]:
        """Return the values of all processes of this replica, which all call this."""
        return [value]

    @property
    def messages_within(self) -> ReplicaMessages | None:
        """Messages between the processes of this replica, for background threads; None with one process."""
        return None

    def commit(self) -> None:
        """Wait until what this step has exchanged has arrived, before the optimizer uses it.

        All processes of a replica call this.
        """
        self.wait_for_device()

    # -- communication ------------------------------------------------------------------------------------

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's `value` on all ranks. It consists of what JSON has, so that it can't run code."""
        if self.replicas == 1:
            return value
        document = _to_bytes(value) if self.is_main else torch.empty(0, dtype=torch.uint8)
        (length,) = self.broadcast_integers([len(document)])
        document = (document if self.is_main else torch.empty(length, dtype=torch.uint8)).to(self._device)
        with self._guarded():
            self._broadcast(document, 0)
            return _from_bytes(document)

    def broadcast_integers(self, numbers: list[int], source: int = 0) -> list[int]:
        """Return the `numbers` of rank `source` on all ranks: cheaper than `broadcast`, for equal lengths."""
        if self.replicas == 1:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        with self._guarded():
            self._broadcast(tensor, source)
            return [int(number) for number in tensor.tolist()]

    @property
    def transfer_device(self) -> torch.device:
        """The device of tensors for `send` and `receive`. Gloo sends tensors on the host only."""
        backends = dist.get_backend_config().split(",")
        uses_gloo = self._device.type == "cpu" or f"{self._device.type}:gloo" in backends
        return torch.device("cpu") if uses_gloo else self._device

    def send(self, tensor: torch.Tensor, target: int) -> dist.Work:
        """Start to send `tensor` to rank `target`, which calls `receive`. Not a collective call."""
        with self._guarded():
            return self._isend(tensor, target)

    def receive(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Start to receive what rank `source` sends next into `tensor`. Not a collective call."""
        with self._guarded():
            return self._irecv(tensor, source)

    def wait(self, work: dist.Work) -> None:
        """Wait for what was started by this rank."""
        with self._guarded():
            work.wait()

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in the order of ranks, on all ranks. They are as in `broadcast`."""
        if self.replicas == 1:
            return [value]
        document = _to_bytes(value)
        lengths = [length for (length,) in self.gather_integers([len(document)])]
        table = torch.zeros(self.replicas, max(lengths), dtype=torch.uint8, device=self._device)
        table[self.rank, : len(document)] = document
        with self._guarded():
            self._all_reduce(table)
            return [_from_bytes(row[:length]) for row, length in zip(table, lengths, strict=True)]

    def gather_integers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the `numbers` of all ranks, in the order of ranks, on all ranks."""
        if self.replicas == 1:
            return [list(numbers)]
        table = torch.zeros(self.replicas, len(numbers), dtype=torch.int64, device=self._device)
        table[self.rank] = torch.tensor(list(numbers), dtype=torch.int64)
        with self._guarded():
            self._all_reduce(table)
            return [[int(number) for number in row] for row in table.tolist()]

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Return the elementwise sums of all ranks' `numbers`, on all ranks.

        They are exchanged in the memory of the host, so that no GPU is waited for.
        """
        if self.replicas == 1:
            return tuple(numbers)
        tensor = torch.tensor(numbers)
        with self._guarded():
            self._all_reduce(tensor)
            return tuple(tensor.tolist())

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace `tensors` by their means over all ranks. Each has the same type and shape on all ranks."""
        if self.replicas == 1:
            return
        with self._guarded():
            works = [self._start_all_reduce(tensor) for tensor in tensors]
            for work, tensor in zip(works, tensors, strict=True):
                work.wait()
                tensor.div_(self.replicas)

    def copy_from_rank_0(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace `tensors` by the tensors of rank 0. Each has the same type and shape on all ranks."""
        if self.replicas == 1:
            return
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            with self._guarded():
                self._broadcast(flat, 0)
            if self.rank > 0:
                for tensor, part in zip(same, flat.split([each.numel() for each in same]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def announce(self, event: str, value: str = "") -> None:
        """Let the other replicas know that this one has reached `event`. Not a collective call.

        Does nothing if the store is gone, with the process that serves it or with the process group.
        """
        if self.replicas > 1 and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                self._store().set(self._key(event, self.rank), value)

    def announced(self, event: str) -> list[str | None] | None:
        """Return the values that the ranks have announced with `event`; None for a rank that has not.

        None if the store is gone.
        """
        values: list[str | None] = [None] * self.replicas
        if self.replicas > 1:
            if not dist.is_initialized():
                return None
            try:
                store = self._store()
                for rank in range(self.replicas):
                    key = self._key(event, rank)
                    if store.check([key]):
                        values[rank] = store.get(key).decode()
            except RuntimeError:
                return None
        return values

    def retract(self, event: str, ranks: Iterable[int]) -> None:
        """Delete the values that some ranks have announced with `event`."""
        if self.replicas > 1 and dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                for rank in ranks:
                    self._store().delete_key(self._key(event, rank))

    def _store(self) -> Any:
        return default_store()

    def _key(self, event: str, rank: int) -> str:
        return f"adascale/{self._number}/{event}/{rank}"

    def missing(self, event: str, timeout: float) -> list[int]:
        """Return the ranks that have not announced `event` within `timeout` seconds.

        Empty if the store is gone: the process that serves it ends after it has seen all the others.
        """
        if self.replicas == 1:
            return []
        try:
            store, deadline = self._store(), time.monotonic() + timeout
            while missing := [
                rank for rank in range(self.replicas) if not store.check([self._key(event, rank)])
            ]:
                if time.monotonic() >= deadline:
                    return missing
                time.sleep(POLL_INTERVAL)
        except RuntimeError:
            pass
        return []

    def extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elementwise least and greatest of all ranks' `values`, on all ranks, on the host."""
        if self.replicas == 1:
            return values.cpu(), values.cpu()
        both = torch.cat([-values, values]).to(self._device)
        with self._guarded():
            self._start_all_reduce(both, dist.ReduceOp.MAX).wait()
            both = both.cpu()
        return -both[: len(values)], both[len(values) :]

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        self._start_all_reduce(tensor).wait()

    def _start_all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work:
        work = dist.all_reduce(tensor, op=op, async_op=True)
        assert work is not None, "this process is a member of the group"
        return work

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, src=source)

    def _isend(self, tensor: torch.Tensor, target: int) -> dist.Work:
        work = dist.isend(tensor, dst=target)
        assert work is not None, "this process is a member of the group"
        return work

    def _irecv(self, tensor: torch.Tensor, source: int) -> dist.Work:
        work = dist.irecv(tensor, src=source)
        assert work is not None, "this process is a member of the group"
        return work


def backend_of(device: torch.device, *, share_a_gpu: bool) -> str:
    """Return the backend of the process group of replicas."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:gloo" if share_a_gpu else "cpu:gloo,cuda:nccl"


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


def _random_numbers() -> list[int]:
    return [secrets.randbits(63) for _ in range(4)]


def _to_bytes(value: Any) -> torch.Tensor:
    """Return a value as a JSON document: shape (bytes,)."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(document: torch.Tensor) -> Any:
    return json.loads(document.cpu().numpy().tobytes())
