"""The replicas of a generation, if a replica has several processes.

Lane j consists of process j of each replica. Gradients and the state are exchanged over all lanes at the same
time. Everything else is decided in lane 0, by the leaders, and each leader shares the result with the other
processes of its replica. So all processes of a replica continue alike after each call, and find out in the
same call that members are lost: a failure in one process takes effect at the next `settle` or decision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from adascale_core.messages.channel import Assignment, encode
from adascale_worker.errors import GroupFormationError, WorkerError
from adascale_worker.membership.links import Formation, PeersLostError
from adascale_worker.membership.process_group import (
    INIT_TIMEOUT,
    MEMBER_TIMEOUT,
    ReplicaGroup,
    backend_of,
    ended_group,
)
from adascale_worker.membership.replica_processes import ReplicaMessages, ReplicaProcesses
from adascale_worker.process.environment import RankAssignment
from adascale_worker.torch_private.distributed import (
    abort_process_group,
    is_lost_peer,
    local_process_group,
    loopback_gloo,
    process_group_beside,
    refuse_groups,
    set_timeout_of,
)

T = TypeVar("T")


class LaneGroup(ReplicaGroup):
    """The replicas, as one of the processes of a replica sees them.

    A collective method is called by all processes of all replicas. `average`, `send`, `receive` and `wait`
    communicate in the lane of this process only, and their failures take effect at the next `settle`.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        device: torch.device,
        own: ReplicaProcesses,
        *,
        is_elastic: bool = False,
        peer_timeout: float | None = None,
    ) -> None:
        super().__init__(assignment, device, is_elastic=is_elastic, peer_timeout=peer_timeout)
        self.own = own
        self.process, self.processes = own.rank, own.count
        self._lane: dist.ProcessGroup | None = None
        self._lane_store: Any = None
        self._is_lost = False
        """Whether the processes of this replica have agreed that members are lost."""
        self._is_deciding = False
        self._path: str | None = None
        """Of the file in which the processes of this replica find each other; None without an agent."""

    @property
    def is_main(self) -> bool:
        """Whether this is the leader of rank 0."""
        return self.rank == 0 and self.own.is_leader

    # -- formation ----------------------------------------------------------------------------------------

    def form_replica(self, store: Any) -> None:
        """Initialize torch's default process group, of the processes of this replica."""
        timeout = MEMBER_TIMEOUT if self.is_elastic else INIT_TIMEOUT
        self.own.form(store, backend_of(self._device, share_a_gpu=self._share_a_gpu), timeout)

    def form_replica_at(self, path: str | None) -> None:
        """Initialize torch's default process group, of the processes that an agent has started here."""
        self._require_no_group()
        self._path = path
        store: Any = dist.HashStore() if path is None else dist.FileStore(path, self.processes)  # type: ignore[attr-defined]
        with loopback_gloo():
            self.form_replica(store)

    def form_from_environment(self) -> None:
        """Form the groups of a fixed number of replicas, from torchrun's variables."""
        self._require_no_group()
        try:
            store: Any = dist.HashStore()  # type: ignore[attr-defined]
            if self.replicas * self.processes > 1:
                store, _, _ = next(dist.rendezvous("env://", timeout=INIT_TIMEOUT))  # type: ignore[attr-defined]
            self.form_replica(PrefixStore(f"adascale/replica-{self.rank}", store))
            if self.replicas == 1:
                self._initialize_alone()
            else:
                self._initialize(store, INIT_TIMEOUT)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            reason = str(error).partition("\n")[0]
            raise GroupFormationError(
                f"process {self.process} of rank {self.rank} cannot connect to the others of {self.replicas} "
                f"replicas of {self.processes} processes: one has ended, and its output says why, or "
                f"MASTER_ADDR and MASTER_PORT are not those of rank 0 ({reason})"
            ) from error

    def form(self, assignment: Assignment, store: TCPStore | None, formation: Formation, secret: str) -> None:
        """Form the lanes of a generation: the leader begins, the others follow. See `ReplicaGroup.form`."""
        if self.own.is_leader:
            states = [None if state is None else list(state) for state in formation.states]
            self.own.share(
                ["form", encode(assignment).decode(), formation.store_port, states, secret],
            )
        self._is_lost = False
        try:
            super().form(assignment, store, formation, secret)
        except PeersLostError:
            self.fail()
        self.settle(failed=self._failed)

    def _initialize(self, store: Any, timeout: timedelta) -> None:
        self._lane_store = PrefixStore(f"generation-{self.generation}/lane-{self.process}", store)
        self._lane = process_group_beside(
            self._lane_store, self.rank, self.replicas, self._device, timeout, share_a_gpu=self._share_a_gpu
        )
        self._formed = True

    def _initialize_alone(self) -> None:
        self._lane_store = dist.HashStore()  # type: ignore[attr-defined]
        with loopback_gloo():
            self._lane = local_process_group()
        self._formed = True

    def _wait_longer(self) -> None:
        assert self._lane is not None
        set_timeout_of(self._lane, MEMBER_TIMEOUT)

    def _replace_group_of_program(self) -> None:
        """Keep torch's default process group, which is that of the processes of this replica."""

    def _require_no_group(self) -> None:
        if dist.is_initialized():
            raise WorkerError(
                "the program has initialized torch's default process group, but with processesPerReplica the "
                "trainer initializes it, for the processes of each replica: leave out "
                "torch.distributed.init_process_group"
            )

    @property
    def process_group(self) -> dist.ProcessGroup:
        """torch's process group of this process's lane: the same process of all replicas."""
        if self._lane is None:
            raise WorkerError(
                "trainer.replica_group is known after program_reentry, which waits for the other replicas: "
                "read it later"
            )
        return self._lane

    def destroy(self) -> None:
        """Destroy the lane. May be called again."""
        with self._aborting:
            lane, self._lane, self._formed = self._lane, None, False
        if lane is not None:
            refuse_groups([lane], ended_group)
        self._lane_store = None
        self._sockets = frozenset()

    def close(self) -> None:
        """Destroy the lane, and the group of the processes of this replica."""
        self.destroy()
        self.own.close()

    # -- failures -----------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether the processes of this replica have agreed that members are lost."""
        return self._is_lost

    def settle(self, *, failed: bool = False) -> None:
        """Raise an error on all processes of this replica if one of them has failed to communicate."""
        if self.own.any(failed or self._failed or self._is_lost):
            self._lose()
            raise PeersLostError

    def watch_processes(self) -> None:
        """End this process when another one of this replica is frozen, if an agent starts them again."""
        if self._path is not None and self.processes > 1 and self._peer_timeout is not None:
            self.own.watch(f"{self._path}-alive", self._peer_timeout)

    def all_processes(self, value: bool) -> bool:
        """Return whether `value` is true on all processes of this replica, which all call this."""
        return not self.own.any(not value)

    def exchange_within(self, value: Any) -> list[Any]:
        """Return the values of all processes of this replica, which all call this."""
        return self.own.exchange(value)

    @property
    def messages_within(self) -> ReplicaMessages | None:
        """Messages between the processes of this replica, for background threads; None with one process."""
        return self.own.messages

    def commit(self) -> None:
        """See `ReplicaGroup.commit`.

        On the host, each collective call was waited for, and its failure is known to all processes.
        """
        if self._device.type == "cpu":
            return
        try:
            self.wait_for_device()
        except PeersLostError:
            self.fail()
        self.settle()

    def _lose(self) -> None:
        self.fail()
        self._is_lost = True

    def _watch(self, has_ended: Callable[[], bool]) -> None:
        """Watch nothing: the main thread also waits for the other processes of its replica."""

    def _save_beside(self) -> bool:
        return False

    def _abort(self) -> None:
        if self._lane is not None:
            abort_process_group(self._lane)

    def be_alone(self) -> None:
        """Let this replica save its state alone: its generation has ended, and it leaves."""
        super().be_alone()
        self._is_lost = False

    # -- decisions of the leaders ---------------------------------------------------------------------------

    def _decide(self, compute: Callable[[], T]) -> T:
        """Return on all processes of this replica what the leader has computed with the other leaders."""
        if self._is_deciding:
            return compute()
        if self._is_lost:
            raise PeersLostError
        outcome: dict[str, Any] = {}
        error: Exception | None = None
        if self.own.is_leader:
            self._is_deciding = True
            try:
                outcome = {"result": compute()}
            except PeersLostError:
                pass
            except Exception as raised:  # noqa: BLE001 (raised below)
                error, outcome = raised, {"error": f"{type(raised).__name__}: {raised}"}
            finally:
                self._is_deciding = False
        outcome = self.own.share(outcome)
        if error is not None:
            raise error
        if "error" in outcome:
            raise RuntimeError(f"process 0 of this replica has failed: {outcome['error']}")
        if "result" not in outcome:
            self._lose()
            raise PeersLostError
        result: T = outcome["result"]
        return result

    def broadcast(self, value: Any) -> Any:
        """Return the value of the leader of rank 0 on all processes of all replicas."""
        return self._decide(lambda: super(LaneGroup, self).broadcast(value))

    def broadcast_integers(self, numbers: list[int], source: int = 0) -> list[int]:
        """Return the `numbers` of the leader of rank `source` on all processes of all replicas."""
        return self._decide(lambda: super(LaneGroup, self).broadcast_integers(numbers, source))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all leaders, in the order of ranks, on all processes of all replicas."""
        return self._decide(lambda: super(LaneGroup, self).gather(value))

    def gather_integers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the `numbers` of all leaders, in the order of ranks, on all processes of all replicas."""
        return self._decide(lambda: super(LaneGroup, self).gather_integers(numbers))

    def sum(self, numbers: Sequence[float]) -> tuple[float, ...]:
        """Return the elementwise sums of the leaders' `numbers`, on all processes of all replicas."""
        return tuple(self._decide(lambda: super(LaneGroup, self).sum(numbers)))

    def add_shards(self, tensor: torch.Tensor) -> None:
        """Replace a tensor by its sum over the processes of this replica."""
        self.own.add(tensor)

    def add_replicas(self, tensor: torch.Tensor) -> None:
        """Replace a tensor, the same on all processes of a replica, by its sum over the replicas.

        The sum is the same on all processes of all replicas, bit for bit.
        """
        numbers = tensor.double().cpu()

        def add() -> list[float]:
            if self.replicas > 1:
                with self._guarded():
                    self._all_reduce(numbers)
            return numbers.tolist()

        tensor.copy_(torch.tensor(self._decide(add), dtype=torch.float64))

    def announce(self, event: str, value: str = "") -> None:
        """Let the other replicas know that this one has reached `event`."""
        if self.own.is_leader:
            super().announce(event, value)

    def announced(self, event: str) -> list[str | None] | None:
        """Return what the leaders have announced with `event`. See `ReplicaGroup.announced`.

        In another thread than the main one, which may be anywhere, only the leader knows it.
        """
        if threading.current_thread() is not threading.main_thread():
            return super().announced(event)
        if self._is_lost:
            return None
        values, is_lost = self._decide(lambda: (super(LaneGroup, self).announced(event), self._failed))
        if is_lost:
            self._lose()
        return values

    def retract(self, event: str, ranks: Iterable[int]) -> None:
        """Delete the values that some ranks have announced with `event`."""
        if self.own.is_leader:
            super().retract(event, ranks)

    def missing(self, event: str, timeout: float) -> list[int]:
        """Return the ranks whose leaders have not announced `event` within `timeout` seconds."""
        return self._decide(lambda: super(LaneGroup, self).missing(event, timeout))

    # -- the lane -------------------------------------------------------------------------------------------

    def average(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace `tensors` by their means over the lane. A failure counts at the next `settle`."""
        try:
            super().average(tensors)
        except PeersLostError:
            self.fail()

    def extremes(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the elementwise least and greatest of the lane's `values`, on the host."""
        try:
            found = super().extremes(values)
        except PeersLostError:
            found = values, values
            self.fail()
        self.settle()
        return found

    def copy_from_rank_0(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace `tensors` by those of the same process of rank 0."""
        try:
            super().copy_from_rank_0(tensors)
        except PeersLostError:
            self.fail()
        self.settle()

    @property
    def transfer_device(self) -> torch.device:
        """The device of tensors for `send` and `receive`. Gloo sends tensors on the host only."""
        uses_gloo = self._device.type == "cpu" or self._share_a_gpu
        return torch.device("cpu") if uses_gloo else self._device

    def _start_all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work:
        return self.process_group.allreduce([tensor], op)

    def _broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.process_group.broadcast(tensor, source).wait()

    def _isend(self, tensor: torch.Tensor, target: int) -> dist.Work:
        return self.process_group.send([tensor], target, 0)

    def _irecv(self, tensor: torch.Tensor, source: int) -> dist.Work:
        return self.process_group.recv([tensor], source, 0)

    def _store(self) -> Any:
        if self._lane_store is None:
            raise RuntimeError("the lane of this process is destroyed")
        return self._lane_store
