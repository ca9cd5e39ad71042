"""Checkpoints in a storage: a checkpoint is either complete or does not exist.

A checkpoint consists of two files, which never change: the state, and the manifest with the SHA-256 of each
part of the state. The manifest is written last; a state without a manifest is ignored. The last two states
are kept, so that the previous one is available if the newest is damaged.

If the model is sharded over the processes of a replica, the state has a file for each of them, which they
write at the same time. Then the first writes the manifest with the SHA-256 of all files.

Several replicas may save at the same time: members that a loss has separated, or a replica that was replaced
while it was disconnected.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeVar

from torch.distributed import ProcessGroup

from adascale_core.checkpoint_manifest import (
    FORMAT,
    SHARDED_FORMAT,
    Manifest,
    StateFile,
    checkpoint_number,
    manifest_file_name,
    manifest_number,
    name_of_draft,
    state_file_name,
    state_of,
)
from adascale_storage import (
    MissingFileError,
    NameTakenError,
    Part,
    Storage,
    StorageError,
    StorageFullError,
    UnusableStorageError,
    WriteCancelledError,
)
from adascale_worker.errors import (
    FROM_SCRATCH,
    CheckpointError,
    StorageUnavailableError,
    UnusableCheckpointError,
    WorkerError,
)
from adascale_worker.membership.process_group import described_error, gather_values, shared_error
from adascale_worker.process.snapshot_place import CopyNumber
from adascale_worker.state.file import DamagedError, Shards, Snapshot, read_manifest, read_state

T = TypeVar("T")
KEPT_STATES = 2
CHUNK_BYTES = 16 * 2**20
"""Length of the parts of a state, each of which has a SHA-256 in the manifest."""
_NUMBERS_OF_A_STATE = 2
"""How many numbers the manifest of a new state can have: that of the state, and the next one."""
_MAX_ATTEMPTS = 20
"""How many times a state is written if others have saved meanwhile."""
_ATTEMPTS_BESIDE_OTHERS = 4
"""How many times a state is written beside those of other members before the storage is taken for full."""


class SupersededError(CheckpointError):
    """A successor of this trainer has saved."""


_KINDS: Final[tuple[type[Exception], ...]] = (
    # One that gives up need not report what the others have failed at.
    WriteCancelledError,
    NameTakenError,
    StorageFullError,
    MissingFileError,
    StorageError,
    UnusableStorageError,
    SupersededError,
    UnusableCheckpointError,
    StorageUnavailableError,
    CheckpointError,
    DamagedError,
    # Such as a state that cannot be saved.
    WorkerError,
)
"""The errors that all processes raise if one does, subclasses first. Others become a CheckpointError."""


class CheckpointProcesses:
    """The processes of a replica, of which each writes and reads its part of the state.

    All of them make the same calls. What one of them decides for all, or cannot do, all of them learn, so
    that they repeat it, or raise the same error.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self._group = group
        self.process = 0 if group is None else group.rank()
        self.count = 1 if group is None else group.size()

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which lists, commits and deletes the files of all of them."""
        return self.process == 0

    def lead(self, action: Callable[[], T]) -> T:
        """Return on all processes the result of process 0, which JSON can have, or raise its error."""
        result: T = self.each(lambda: action() if self.leads else None)[0]
        return result

    def each(self, action: Callable[[], Any]) -> list[Any]:
        """Return on all processes the results of each, in their order, or raise an error of one."""
        if self._group is None:
            return [action()]
        raised: Exception | None = None
        try:
            own = {"result": action()}
        except Exception as error:  # noqa: BLE001 (the other processes wait for it)
            own, raised = {"error": described_error(error, _KINDS)}, error
        outcomes = gather_values(self._group, own)
        failures = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if failures:
            first = min(failures, key=lambda failure: _NAMES.index(failure[0] or CheckpointError.__name__))
            raise shared_error(first, _KINDS, CheckpointError) from raised
        return [outcome["result"] for outcome in outcomes]


_NAMES: Final = [kind.__name__ for kind in _KINDS]


@dataclass(frozen=True)
class CheckpointInfo:
    """The part of a manifest that describes the state of training; `Manifest` documents each attribute."""

    step: int
    progress: float
    epoch: int
    replicas: int
    generation: int
    finished: bool
    saved_at: float
    incarnation: int = 0
    finish_reason: str = ""


def number_of(described: CheckpointInfo | Manifest) -> CopyNumber:
    """Return the number of a state, which is larger for a later one."""
    return described.incarnation, described.generation, described.step


# Every writer gives its state another name, and a manifest is created only if no manifest has its number, so
# a writer learns of the others. No writer deletes a state that another may still commit: a state has the
# number that was free when its writer began, its manifest has this number or the next one, and other states
# than the last two are deleted only when the newest number is higher by 2. A writer that is overtaken by more
# writes its state again.


class CheckpointStore:
    """The checkpoints of one job."""

    def __init__(
        self,
        storage: Storage,
        chunk_bytes: int = CHUNK_BYTES,
        processes: CheckpointProcesses | None = None,
    ) -> None:
        self.storage = storage
        self._chunk_bytes = chunk_bytes
        self.processes = CheckpointProcesses() if processes is None else processes
        self._uncommitted: set[str] = set()
        """States of this process whose manifests are not written, or the answer was lost."""

    def save(
        self,
        snapshot: Snapshot,
        info: CheckpointInfo,
        result: dict[str, float | str] | None = None,
        is_cancelled: Callable[[], bool] = lambda: False,
        *,
        only_if_latest: bool = False,
    ) -> Manifest:
        """Save a checkpoint with the next number, and delete older ones, except the last two states."""
        try:
            for tried in range(_MAX_ATTEMPTS):
                begun = time.monotonic()
                try:
                    manifest = self._save_once(snapshot, info, result, is_cancelled, only_if_latest)
                    break
                except NameTakenError:
                    continue
                except StorageFullError:
                    if only_if_latest and tried < _ATTEMPTS_BESIDE_OTHERS:
                        # Other members write at the same time. One that is alone for a while has space.
                        time.sleep(secrets.SystemRandom().uniform(0.0, 3.0 * (time.monotonic() - begun)))
                    elif not self.processes.lead(self._delete_remains):
                        raise
            else:
                raise StorageError(f"other processes have saved here during each of {_MAX_ATTEMPTS} attempts")
        except UnusableStorageError as error:
            raise CheckpointError(str(error)) from error
        except StorageError as error:
            remedy = "Check that the storage can be reached and written, or use another one"
            if isinstance(error, StorageFullError):
                mebibytes = -(-sum(self.processes.each(lambda: snapshot.layout.file_bytes)) // 2**20)
                remedy = (
                    f"Free {mebibytes:,} MiB: there must be space for three checkpoints, two of which stay"
                )
            newest = self.processes.lead(self._describe_newest)
            raise StorageUnavailableError(
                f"the checkpoint cannot be saved in {self.storage}: {error}; {newest}. {remedy}"
            ) from error
        if self.processes.leads:
            self._prune()
        return manifest

    def _save_once(
        self,
        snapshot: Snapshot,
        info: CheckpointInfo,
        result: dict[str, float | str] | None,
        is_cancelled: Callable[[], bool],
        only_if_latest: bool,
    ) -> Manifest:
        """Save a checkpoint, or return the manifest that is as good."""
        processes = self.processes
        plan = processes.lead(lambda: self._plan(info, only_if_latest))
        if plan["saved"] is not None:
            return Manifest.from_json(plan["saved"])
        number, names = plan["number"], plan["names"]

        def write() -> dict[str, Any]:
            return asdict(self._write(names[processes.process], snapshot, is_cancelled))

        try:
            first, *others = [StateFile(**file) for file in processes.each(write)]
        except Exception:
            if processes.count > 1 and processes.leads:
                # Those of other processes may be complete.
                with contextlib.suppress(StorageError, CheckpointError):
                    self._delete_uncommitted()
            raise
        manifest = Manifest(
            number=number,
            chunk_bytes=self._chunk_bytes,
            **asdict(first),
            **asdict(info),
            shards=tuple(others),
            format=SHARDED_FORMAT if others else FORMAT,
            result={**plan["result"], **(result or {})},
        )

        def commit() -> dict[str, Any]:
            try:
                committed = self._commit(manifest, only_if_latest=only_if_latest)
            except (NameTakenError, SupersededError):
                self._delete(names)
                raise
            if committed.state != manifest.state:
                self._delete(names)
            self._uncommitted -= set(names)
            return committed.to_json()

        return Manifest.from_json(processes.lead(commit))

    def _plan(self, info: CheckpointInfo, only_if_latest: bool) -> dict[str, Any]:
        """Return the number and the files of the next checkpoint, or the manifest that is as good."""
        newest = max(self.numbers(), default=0)
        last = self._require_not_superseded(newest, info)
        if only_if_latest and last is not None and _is_later(last, info):
            return {"saved": last.to_json()}
        self._delete_uncommitted()
        number, writer, count = newest + 1, secrets.token_hex(4), self.processes.count
        names = [state_file_name(number, writer, process, count) for process in range(count)]
        self._uncommitted |= set(names)
        return {"saved": None, "number": number, "names": names, "result": _result_so_far(last, info)}

    def _write(self, name: str, snapshot: Snapshot, is_cancelled: Callable[[], bool]) -> StateFile:
        """Write the state, or this process's part of it."""
        layout = snapshot.layout
        digests: list[str] = []

        def parts() -> Iterator[Part]:
            for part in itertools.chain([layout.header], snapshot.parts(self._chunk_bytes)):
                if is_cancelled():
                    raise WriteCancelledError
                digests.append(hashlib.sha256(part).hexdigest())
                yield part

        self.storage.write(name, parts(), size=layout.file_bytes)
        return StateFile(name, layout.file_bytes, len(layout.header), digests)

    def _delete(self, names: Sequence[str]) -> None:
        for name in names:
            self.storage.delete(name)

    def annotate(self, manifest: Manifest, result: dict[str, float | str]) -> Manifest:
        """Save a new manifest of a saved state, with `result` added, and return it."""
        annotated = replace(manifest, number=manifest.number + 1, result={**manifest.result, **result})
        try:
            annotated = self._commit(annotated)
        except NameTakenError as error:
            raise CheckpointError(
                f"the result cannot be saved in {self.storage}: another process has saved later checkpoints"
            ) from error
        except UnusableStorageError as error:
            raise CheckpointError(str(error)) from error
        except StorageError as error:
            raise StorageUnavailableError(f"the result cannot be saved in {self.storage}: {error}") from error
        self._prune()
        return annotated

    def load(
        self, number: int | None = None, own: Shards | None = None
    ) -> tuple[dict[str, Any], Manifest] | None:
        """Return the newest intact checkpoint, as state and manifest. None if none was ever saved.

        Every byte is verified before it is used. Reports damaged checkpoints that are newer than the one
        returned.
        """
        for tried in range(_MAX_ATTEMPTS):
            numbers = self.processes.lead(self.numbers) if number is None else [number]
            loaded, damages = self._read_newest(numbers, own)
            is_last = tried == _MAX_ATTEMPTS - 1 or number is not None
            if not damages or is_last or self.processes.lead(self.numbers) == numbers:
                break
            # Another process has saved meanwhile, and may have deleted what was to be read.
            loaded = None
        if loaded is not None:
            _, manifest = loaded
            for damage in damages if self.processes.leads else ():
                print(
                    f"adascale: {damage}; resuming from checkpoint {manifest.number}, step {manifest.step}",
                    flush=True,
                )
        elif damages:
            described = "; ".join(damages).replace(f"{self.storage}/", "")
            raise UnusableCheckpointError(
                f"no intact checkpoint is left in {self.storage}: {described}. "
                f"Restore a copy of it, or {FROM_SCRATCH}"
            )
        return loaded

    def newest(self) -> Manifest | None:
        """Return the manifest of the newest checkpoint, without reading its state. None if there is none."""
        for number in reversed(self.numbers()):
            try:
                return read_manifest(self.storage, number)
            except DamagedError:
                continue
            except StorageError as error:
                raise StorageUnavailableError(f"{self.storage} cannot be read: {error}") from error
        return None

    def numbers(self) -> list[int]:
        """Return the numbers of the saved checkpoints, in ascending order."""
        try:
            names = self.storage.names()
        except StorageError as error:
            raise StorageUnavailableError(f"{self.storage} cannot be read: {error}") from error
        return sorted(number for number in map(manifest_number, names) if number is not None)

    # -- reading ----------------------------------------------------------------------------------------

    def _read_newest(
        self, numbers: Sequence[int], own: Shards | None
    ) -> tuple[tuple[dict[str, Any], Manifest] | None, list[str]]:
        """Return the newest intact checkpoint, and descriptions of the damaged ones that are newer."""
        damages: list[str] = []
        for number in reversed(numbers):
            found: list[tuple[dict[str, Any], Manifest]] = []

            def read(number: int = number, found: list[Any] = found) -> None:
                manifest = read_manifest(self.storage, number)
                found.append((read_state(self.storage, manifest, own), manifest))

            try:
                self.processes.each(read)
                return found[0], damages
            except DamagedError as error:
                damages.append(str(error))
            except StorageError as error:
                raise StorageUnavailableError(f"{self.storage} cannot be read: {error}") from error
        return None, damages

    # -- writing ----------------------------------------------------------------------------------------

    def _commit(self, manifest: Manifest, *, only_if_latest: bool = False) -> Manifest:
        """Create the manifest; with the next number, if another process has used its number."""
        number, highest = manifest.number, manifest.number + _NUMBERS_OF_A_STATE - 1
        while True:
            numbered = replace(manifest, number=number)
            text = (json.dumps(numbered.to_json(), indent=1) + "\n").encode()
            try:
                self.storage.create(manifest_file_name(number), text)
            except NameTakenError:
                newest = max(self.numbers(), default=number)
                last = self._require_not_superseded(newest, manifest)
                if last is not None and last == replace(manifest, number=last.number):
                    # A client has repeated the request, because the answer to the first one was lost.
                    return last
                if only_if_latest and last is not None and _is_later(last, manifest):
                    return last
                number = max(newest, number) + 1
                if number > highest:
                    raise
                continue
            # The number is free again after others have deleted their checkpoint of this number.
            if max(self.numbers(), default=number) > highest:
                self.storage.delete(manifest_file_name(number))
                raise NameTakenError("others have saved later checkpoints")
            return numbered

    def _require_not_superseded(self, newest: int, info: CheckpointInfo | Manifest) -> Manifest | None:
        """Check that no successor of this trainer, which may have been disconnected, has saved."""
        if newest == 0:
            return None
        try:
            last = read_manifest(self.storage, newest)
        except DamagedError:
            return None
        if info.generation == 0:
            # Without an agent, no other trainer can have replaced this one.
            return last
        if last.incarnation > info.incarnation:
            raise SupersededError(
                f"a later job of this name, created {last.incarnation - info.incarnation} s after this one, "
                f"has saved in {self.storage}: this job was deleted while its replica was disconnected"
            )
        if last.incarnation == info.incarnation and last.generation > info.generation:
            raise SupersededError(
                f"generation {last.generation} has saved in {self.storage}, but this is generation "
                f"{info.generation}: this replica was replaced while it was disconnected"
            )
        return last

    def _prune(self) -> None:
        """Delete files that are not needed, manifests first, so that no checkpoint exists in part.

        States without a manifest, and drafts, may belong to a writer at work: see above. A storage that fails
        now is reported by the next save.
        """
        try:
            names = self.storage.names()
            kept_states: list[str] = []
            kept: set[str] = set()
            numbers = sorted(number for number in map(manifest_number, names) if number is not None)
            for number in reversed(numbers):
                try:
                    manifest = read_manifest(self.storage, number)
                except DamagedError:
                    continue
                except UnusableCheckpointError:
                    return
                state = manifest.state
                if state not in kept_states and len(kept_states) == KEPT_STATES:
                    break
                if set(manifest.names) <= set(names) and state not in kept_states:
                    kept_states.append(state)
                    kept |= {*manifest.names, manifest_file_name(number)}
            newest = max(numbers, default=0)
            for name in sorted(names, key=lambda name: manifest_number(name) is None):
                latest = newest if manifest_number(name) is not None else newest - _NUMBERS_OF_A_STATE
                if name not in kept and 0 < (checkpoint_number(name) or 0) <= latest:
                    self.storage.delete(name)
        except (StorageError, CheckpointError):
            return

    def _delete_uncommitted(self) -> None:
        """Delete the states of saves that have failed, unless their manifests were written after all."""
        if not self._uncommitted:
            return
        for number in self.numbers():
            with contextlib.suppress(DamagedError, UnusableCheckpointError):
                self._uncommitted -= set(read_manifest(self.storage, number).names)
        with contextlib.suppress(StorageError):
            for name in sorted(self._uncommitted):
                self.storage.delete(name)
                self._uncommitted.discard(name)

    def _delete_remains(self) -> bool:
        """Delete what killed processes have left of their saves, and return whether that was anything.

        `_prune` does so only after later saves, for which a full storage has no space. A draft of a writer at
        work is deleted too: it notices, and writes its state again.
        """
        try:
            self._delete_uncommitted()
            names = set(self.storage.names())
            drafts = {name: complete for name in names if (complete := name_of_draft(name)) is not None}
            self._delete(list(drafts))
            left = set(self.storage.names())
            # A state whose draft was deleted gets no manifest any more.
            given_up = {state_of(name) for name, complete in drafts.items() if complete not in left} - {None}
            self._delete([name for name in left if state_of(name) in given_up])
            self._prune()
            return not names <= set(self.storage.names())
        except StorageError:
            return False

    def _describe_newest(self) -> str:
        """Describe the newest checkpoint, for an error message."""
        try:
            numbers = self.numbers()
            if not numbers:
                return "no earlier checkpoint exists"
            last = read_manifest(self.storage, numbers[-1])
        except DamagedError as damage:
            return str(damage)
        except (StorageError, CheckpointError):
            return "whether an earlier checkpoint exists is not known"
        return f"the last checkpoint, of step {last.step}, is unchanged"


def _result_so_far(last: Manifest | None, info: CheckpointInfo) -> dict[str, float | str]:
    """Return the result that the checkpoint before has, unless training ended there and goes on now."""
    if last is None or (last.finished and (last.step < info.step or not info.finished)):
        return {}
    return last.result


def _is_later(manifest: Manifest, info: CheckpointInfo | Manifest) -> bool:
    """Whether a checkpoint is of the same generation as `info`, and of a later step."""
    same = (manifest.incarnation, manifest.generation) == (info.incarnation, info.generation)
    return same and info.generation > 0 and manifest.step > info.step
