"""The state of training that a replica has, with all that a trainer needs to continue bit for bit.

If the model is sharded over the processes of a replica, each process has the state with its own shards in
place of whole tensors. It is exchanged with the same process of the other replicas, and is that process's
part of a checkpoint.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from adascale_core.errors import AdaScaleError
from adascale_core.names import SNAPSHOT_FILE
from adascale_worker.errors import CheckpointError, NonFiniteWeightsError, UnusableCheckpointError
from adascale_worker.membership.links import PeersLostError, StateNumber
from adascale_worker.process.environment import package_version
from adascale_worker.process.resource_limits import unused_memory
from adascale_worker.process.snapshot_place import Condition, CopyNumber, SnapshotPlace, SnapshotPlaces
from adascale_worker.program.weight_checks import FiniteWeights, nonfinite_message
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.scaling.statistics.norms import local_shard
from adascale_worker.state import tree
from adascale_worker.state.file import KEY, Shards, converted, division_of, local_part, with_local
from adascale_worker.state.following import Followers, StateFollower
from adascale_worker.state.program import ProgramState, Stateful, load_model
from adascale_worker.state.schedule import Checkpointing
from adascale_worker.state.store import CheckpointInfo, number_of
from adascale_worker.state.transfer import (
    LEAST,
    find_known,
    named_tensors,
    routes,
    transfer,
)
from adascale_worker.state.tree import Tree, on_host

_LINK: Final = f"/memfd:{SNAPSHOT_FILE}"
"""Beginning of the target of the link at the path of a file of the agent."""


@dataclass(frozen=True)
class KeptSnapshot:
    """A copy of the state."""

    info: CheckpointInfo
    result: dict[str, float | str]  # the result of training that the program had reported then
    spec: bytes
    place: SnapshotPlace

    @property
    def number(self) -> CopyNumber:
        """Which of two states of a job is later."""
        return number_of(self.info)

    def read(self) -> Tree:
        """Return the state. Its tensors are copies."""
        tensors, position = [], 0
        for layout in tree.layouts(self.spec):
            tensors.append(torch.empty(layout.shape, dtype=layout.dtype, device="cpu"))
            self.place.read_into(tree.memory_of(tensors[-1]), position)
            position += layout.bytes
        state: Tree = tree.unflatten(self.spec, tensors)
        return state


class SnapshotMemory(SnapshotPlaces):
    """Memory for copies of the state that outlives this process: two files without a name of the agent.

    A copy is written over the older one, so a process that is killed while it writes leaves the one before.
    While the older one is sent to another replica, the newer one is replaced.
    """

    def __init__(self, paths: Sequence[str], available: Callable[[], float] = unused_memory) -> None:
        self.paths = paths
        try:
            foreign = next((path for path in paths if not str(Path(path).readlink()).startswith(_LINK)), None)
            super().__init__([] if foreign else paths, available)
        except OSError as error:
            raise CheckpointError(
                f"the memory of the agent cannot be opened ({error.strerror}): this program runs in another "
                "container or as another user than its agent"
            ) from error
        if foreign:
            # The number of the agent is that of another process here.
            raise CheckpointError(
                f"{foreign} is not the memory of the agent: this program runs in another container than its "
                "agent"
            )

    def save(self, state: Tree, info: CheckpointInfo, result: dict[str, float | str]) -> bool:
        """Copy a state in place of the older copy, or of the newer one while the older one is sent.

        Tensors on a GPU are copied to the memory of the host one by one. Does not wait for that:
        returns whether a place was free.
        """
        spec, tensors = tree.flatten(state)
        described = {"version": package_version(), "info": asdict(info), "result": result}
        document = json.dumps(described).encode("ascii") + b"\n" + spec
        length = sum(tensor.nbytes for tensor in tensors) + len(document)
        if lack := self.lack_of_memory(length):
            raise CheckpointError(lack)
        content = chain(map(tree.memory_of, tensors), [memoryview(document)])
        return self.write(number_of(info), content, len(document), may_replace_newest=True)

    def newest(self) -> KeptSnapshot | None:
        """Return the newest copy. None if there is none, or if a process has ended while it restored it."""
        place = self.newest_place
        if place.condition is not Condition.VALID:
            return None
        text, spec = place.read_document().split(b"\n", 1)
        described = json.loads(text)
        if described["version"] != package_version():
            return None
        return KeptSnapshot(CheckpointInfo(**described["info"]), described["result"], spec, place)


SNAPSHOT_SHARE = 0.02
"""The largest share of the time that copies for the agent may take."""
SNAPSHOT_DELAY = 60.0
"""Seconds until memory is taken after the first step, and until it is tried again after a lack of memory."""


class Undo(Protocol):
    """Puts back what an unfinished step has changed."""

    @property
    def state(self) -> Tree | None:
        """The parts of the state that the step may have changed, from before it; None if it has not."""

    def restore(self) -> None:
        """Put it back."""


class State:
    """The state of training of this replica.

    While no other replica has the state, the agent keeps copies of it in memory. If this process is killed,
    the next one of the same agent continues from the newest copy.
    """

    def __init__(
        self,
        program: ProgramState,
        parts: Mapping[str, Stateful],  # of the trainer, by name
        info: Callable[[], CheckpointInfo],
        weights: FiniteWeights,
        undo: Undo,
        progress: TrainingProgress,
        checkpointing: Checkpointing,
        memory: SnapshotMemory | None,  # of the agent
    ) -> None:
        self._program = program
        self._parts = parts
        self.info = info
        """Returns the description of a checkpoint of the present state."""
        self._replaced: Mapping[str, Any] = {}
        """Parts that are saved in place of those in memory, such as from before an unfinished step."""
        self._weights = weights
        self._undo = undo
        self._progress = progress
        self._group = checkpointing.group
        self._checkpointing = checkpointing
        self._memory = memory
        self.generation: int | None = None
        """The generation in which the state was last equal on all members. None without a state."""
        self.was_restored = False
        """Whether training has continued from a checkpoint, or from the state of other members."""
        paths = () if memory is None else memory.paths
        processes = self._group.processes
        self.followers = Followers(self._optimizers, self._state_to_send, paths, processes)
        """The replicas that get the state while this one trains."""
        self.has_followed = False
        """Whether this replica may have the state, as it has made the steps of the others."""
        self._has_received = False
        """Whether weights and optimizer may have parts of another replica's state."""
        self._kept: KeptSnapshot | None = None
        """The copy of the agent that is restored, because it is later than the last checkpoint."""
        self._next_copy_at: float | None = None
        self._lack = ""
        """Why no copies are made, as it was reported."""

    @property
    def number(self) -> StateNumber | None:
        """The number of the state, as it is after an unfinished step is put back; None without a state."""
        if self.generation is None:
            return None
        before = self._undo.state  # read once, since another thread may ask
        if before is None:
            return self.generation, self._progress.step, self._progress.consumed
        return self.generation, before["progress"]["step"], before["progress"]["consumed"]

    @property
    def is_mixed(self) -> bool:
        """Whether the program's weights may be neither its initial ones nor those of a state."""
        return self.generation is None and self._has_received

    # -- contents -----------------------------------------------------------------------------------------

    def state_dict(self) -> Tree:
        """Return the state, with the shards of this process in place of whole tensors.

        Its tensors are the program's own, not copies.
        """
        state = {
            "program": self._program.state_dict(),
            # Not with the program, whose state is copied in each step of several optimizers.
            "parameters": self._program.parameter_names(),
            "trained": self._program.trained.state_dict(),
            **{name: part.state_dict() for name, part in self._parts.items()},
            **self._replaced,
        }
        return converted(state, lambda tensor, _: local_part(tensor)) if self._group.has_mesh else state

    @property
    def _shards(self) -> Shards | None:
        """The part of the state that this process has; None if it has the whole state."""
        if not self._group.has_mesh:
            return None
        own = self._group.own
        found = {key: division_of(tensor) for key, tensor in self._distributed_tensors().items()}
        divided = {key: division for key, division in found.items() if division is not None}
        return Shards(
            own.rank,
            own.count,
            {key: each for key, each in divided.items() if isinstance(key, str)},
            {key: each for key, each in divided.items() if isinstance(key, int)},
        )

    def _for_checkpoint(self) -> Tree:
        """Return the state, or the part of it that this process has with its description, as it is saved."""
        shards = self._shards
        if shards is None or shards.count == 1:
            return self.state_dict()
        return {**self.state_dict(), KEY: shards.to_state()}

    def load_state_dict(self, state: Tree) -> None:
        """Restore a saved state. Tensors that `Checkpointing.load` has returned whole are divided.

        The batch plan is the saved one; `BatchPlanner.adapt` makes it valid for the present replicas.
        """
        if self._group.has_mesh:
            state = self._distributed(state)
        parts = (*self._parts, "program", "parameters", "trained")
        if missing := [name for name in parts if name not in state]:
            raise UnusableCheckpointError(
                f"the saved state lacks {', '.join(missing)}: another version of adascale-operator has saved "
                "it. Continue with that version, or with an empty checkpoint folder"
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        load_model(self._program.model, state["program"]["model"])
        self._program.load_state_dict(state["program"])
        self._program.require_parameters(state["parameters"])
        self._program.load_trained(state["trained"])

    def _distributed(self, state: Tree) -> Tree:
        """Return a state with the DTensors of this process in place of their shards."""
        own = self._group.own
        templates = self._distributed_tensors()

        def distributed(tensor: Tensor, key: object) -> Tensor:
            template = templates.get(key)
            if template is None or tensor.dim() == 0:
                return tensor
            division, shape = division_of(template), tuple(template.shape)
            if division is not None:
                start, stop = division.extent(own.rank, own.count)
                if tuple(tensor.shape) == shape:
                    tensor = tensor.narrow(division.dimension, start, stop - start).contiguous()
                shape = division.part_shape((start, stop))
            is_own = tuple(tensor.shape) == shape
            return with_local(template, tensor.to(self._group.device)) if is_own else tensor

        return converted(state, distributed)

    def _distributed_tensors(self) -> dict[object, Any]:
        """Return the DTensors of the state of the model by name, and those of the optimizer by number."""
        parameters = [p for group in self._program.optimizer.param_groups for p in group["params"]]
        found = (*self._program.model.state_dict().items(), *enumerate(parameters))
        return {key: each for key, each in found if hasattr(each, "device_mesh")}

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(self, *, final: bool = False, durable: bool = False, alone: bool = False) -> None:
        """Save a checkpoint; if `final` or `durable`, before this returns. A collective call.

        If `alone`, the other members may save too, and a checkpoint of a later step is as good.
        """
        if final or (durable and self._checkpointing.enabled):
            self.require_finite_weights()
        self._checkpointing.save(
            self.info(),
            self._for_checkpoint,
            final=final,
            durable=durable,
            only_if_latest=alone,
            weights=self._weights.weights(),
            changed_by_step=_tensors_of(self._program.optimizer.state),
        )

    def save_if_possible(self, *, alone: bool = False) -> bool:
        """Save a checkpoint before this returns, or print why not; return whether it is saved."""
        try:
            self.save(durable=True, alone=alone)
        except (NonFiniteWeightsError, CheckpointError) as error:
            if self._group.is_main:
                print(f"adascale: {error}", flush=True)
            return False
        return True

    def save_alone(self) -> bool:
        """Save the state, if there is one, without the other replicas, and return whether it is saved."""
        if self.generation is None:
            return False
        self._group.be_alone()
        return self.save_if_possible(alone=True)

    def save_on_rank_0(self) -> None:
        """Save the state before this returns, without a collective call of the replicas."""
        self._checkpointing.save_on_rank_0(self.info(), self._for_checkpoint)

    def save_beside(self) -> bool:
        """Save the state in a thread, while the main thread cannot leave a collective call.

        That is the state from before an unfinished step.
        """
        if self.generation is None or not self._checkpointing.enabled:
            return False
        before = self._undo.state
        if before is None:
            self._undo.restore()
        else:
            self._progress.load_state_dict(before["progress"])
            self._replaced = before
        return self.save_alone()

    def require_finite_weights(self) -> None:
        """Check the weights."""
        if not self._weights.are_finite():
            self._checkpointing.postpone()
            raise NonFiniteWeightsError(nonfinite_message(self._progress.step))

    def load(self, *, wait: bool) -> Tree | None:
        """Return the last checkpoint, or a later copy of the agent; None without any. Called on rank 0."""
        self._kept = kept = self._memory.newest() if self._memory is not None else None
        since = None if kept is None else kept.number
        state = self._checkpointing.load(self._shards, wait=wait, since=since)
        if state is None and kept is not None:
            try:
                return kept.read()
            except (CheckpointError, EOFError) as error:
                _print_unusable_copy(error)
                state = self._checkpointing.load(self._shards, wait=wait)
        self._kept = None
        return state

    @property
    def has_loaded_final(self) -> bool:
        """Whether `load` has returned the checkpoint of the end of training."""
        manifest = self._checkpointing.manifest
        return manifest is not None and manifest.finished and self._kept is None

    def restore(self, state: Tree) -> None:
        """Restore what `load` has returned."""
        kept = self._kept
        if kept is None or self._memory is None:
            self.load_state_dict(state)
            return
        kept.place.condition = Condition.RESTORING
        try:
            self.load_state_dict(state)
        except AdaScaleError as error:
            self._memory.release()
            self._kept = None
            _print_unusable_copy(error)
            checkpoint = self._checkpointing.load(self._shards, wait=True)
            if checkpoint is None:
                raise
            self.load_state_dict(checkpoint)
            return
        kept.place.condition = Condition.VALID
        self._checkpointing.keep_result(kept.result)
        print(
            f"adascale: training continues after step {kept.info.step}, with the state that the agent has "
            "kept in memory",
            flush=True,
        )

    # -- copies in the memory of the agent ----------------------------------------------------------------

    def keep_copy(self) -> float:
        """Copy the state between two steps, if this is the only replica and the last copy is long enough ago.

        Copies take at most `SNAPSHOT_SHARE` of the time. Returns how many seconds this one took.
        """
        if self._memory is None or self._group.replicas > 1 or self._progress.step == 0:
            return 0.0
        begun = time.monotonic()
        if self._next_copy_at is None:
            # By then the loading of data, and mostly an evaluation, have shown how much memory they need.
            self._next_copy_at = begun if self._memory.is_taken else begun + SNAPSHOT_DELAY
        if begun < self._next_copy_at:
            return 0.0
        if self._group.device.type == "cuda":
            # Otherwise the duration includes the rest of the step.
            torch.cuda.synchronize(self._group.device)
            begun = time.monotonic()
        pause = 0.0
        try:
            if self._weights.are_finite():
                if self._memory.save(self.state_dict(), self.info(), self._checkpointing.result):
                    self.followers.copied()
                self._report_lack("")
        except CheckpointError as error:
            self._memory.release()
            self._report_lack(str(error))
            pause = SNAPSHOT_DELAY
        except Exception as error:  # noqa: BLE001 (training does not need the copy)
            self._memory.release()
            self._memory = None
            self._report_lack(
                str(error) if isinstance(error, AdaScaleError) else f"{type(error).__name__}: {error}"
            )
        seconds = time.monotonic() - begun
        self._next_copy_at = begun + max(seconds / SNAPSHOT_SHARE, pause)
        return seconds

    def _report_lack(self, lack: str) -> None:
        """Report why no copies are made, once; and once that they are made again."""
        if lack and not self._lack:
            print(
                f"adascale: the agent keeps no copy of the state: {lack}. If this replica is lost while it "
                "is the only one, training continues from the last checkpoint",
                flush=True,
            )
        if self._lack and not lack:
            print("adascale: the agent keeps copies of the state now", flush=True)
        self._lack = lack

    # -- members ------------------------------------------------------------------------------------------

    def _state_to_send(self) -> Tree:
        """Return the part of the state that a replica can get while this one trains.

        Other objects of the program may communicate to return theirs, and change the tensors that they get.
        """
        model, optimizer = self._program.model, self._program.optimizer
        optimizer.discard_comparison()
        state = {"program": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
        return converted(state, lambda tensor, _: local_part(tensor)) if self._group.has_mesh else state

    @property
    def copied(self) -> CopyNumber | None:
        """The number of the newest copy in the memory of the agent; None without any."""
        return None if self._memory is None else self._memory.newest_number

    def follow(self, connection: socket.socket, check: Callable[[float | None], None]) -> str:
        """Get the state of a replica that trains, until it sends nothing more.

        `check` gets the time when something was received last, and may raise an error. Returns how much
        memory is missing for copies.
        """
        follower = StateFollower(self._optimizers, self._state_to_send, self._memory)
        with connection:
            try:
                follower.follow(connection, lambda: check(follower.heard_at))
            finally:
                if follower.has_changed:
                    self._has_received, self.has_followed = True, follower.has_all
        return follower.lack

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [part.optimizer for part in self._program.optimizer.parts.values()]

    def begin_generation(self, generation: int) -> None:
        """Release what was prepared: all members have the same state, and keep it for each other."""
        self.generation, self.has_followed = generation, False
        self._checkpointing.begin_generation()
        if self._memory is not None and self._group.replicas > 1:
            self._memory.release()

    def transfer(self, sources: Sequence[int], nodes: Sequence[str]) -> None:
        """Copy the state of the ranks `sources`, which is the same, to all others. A collective call.

        `nodes` has the node of each rank.
        """
        group = self._group
        receivers = [rank for rank in range(group.replicas) if rank not in sources]
        if not receivers:
            return
        known = find_known(group, sources, self._state_to_send, has_followed=self.has_followed)
        route = routes(sources, receivers, nodes).get(group.rank)
        if route is None:
            return
        if route.source is None:
            self._program.optimizer.discard_comparison()
        elif group.transfer_device.type == "cpu":
            # A former rank 0 has a copy for checkpoints, and a pod's memory has room for two states.
            self._checkpointing.release_memory()
        state, failed = None, False
        try:
            state = transfer(group, route, self.state_dict, known)
        except PeersLostError:
            failed = True
        # All processes of a replica use what they have received, or none.
        group.settle(failed=failed)
        if state is None:
            return
        if group.transfer_device.type != "cpu":
            # As from a checkpoint: the program's objects may keep the tensors that they get.
            state["program"]["registered"] = on_host(state["program"]["registered"])
        self._has_received = True
        self.load_state_dict(state)
        own = [self.has_followed, len(named_tensors(state, LEAST)), len(known)]
        followed, counts, received = zip(*group.own.exchange(own), strict=True)
        if any(followed) and group.own.is_leader:
            print(
                f"adascale: joins after step {self._progress.step}; of {sum(counts)} large tensors, "
                f"{sum(received)} were received while the others trained",
                flush=True,
            )


def _print_unusable_copy(error: Exception) -> None:
    print(f"adascale: the state that the agent has kept in memory cannot be used: {error}", flush=True)


def _tensors_of(state: Mapping[Any, Any]) -> list[Tensor]:
    """Return the tensors that an optimizer keeps for its parameters."""
    return [
        local_shard(value)
        for kept in state.values()
        if isinstance(kept, Mapping)
        for value in kept.values()
        if isinstance(value, Tensor)
    ]
