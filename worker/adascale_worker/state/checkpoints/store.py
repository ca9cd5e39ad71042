"""Checkpoints in a storage: a checkpoint is either complete or does not exist.

A checkpoint consists of two files, which never change: the state, and the manifest with the SHA-256 of each
part of the state. The manifest is written last; a state without a manifest is ignored. The last two states
are kept, so that the previous one is available if the newest is damaged.

Several replicas may save at the same time: members that a loss has separated, or a replica that was replaced
while it was disconnected. Every writer gives its state another name, and a manifest is created only if no
manifest has its number, so a writer learns of the others. No writer deletes a state that another may still
commit: a state has the number that was free when its writer began, its manifest has this number or the next
one, and other states than the last two are deleted only when the newest number is higher by 2. A writer that
is overtaken by more writes its state again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from adascale_core.checkpoint_manifest import (
    InvalidManifestError,
    Manifest,
    UnsupportedFormatError,
    checkpoint_number,
    is_draft,
    manifest_file_name,
    manifest_number,
    state_file_name,
)
from adascale_storage.interface import (
    MissingFileError,
    NameTakenError,
    Part,
    Storage,
    StorageError,
    StorageFullError,
    UnusableStorageError,
    WriteCancelledError,
)
from adascale_worker.errors import CheckpointError, StorageUnavailableError, UnusableCheckpointError
from adascale_worker.state import tree
from adascale_worker.state.checkpoints.snapshot import Snapshot
from adascale_worker.state.file import StateFileLayout, read_layout
from adascale_worker.state.tree import InvalidSpecError

KEPT_STATES = 2
CHUNK_BYTES = 16 * 2**20
"""Length of the parts of a state, each of which has a SHA-256 in the manifest."""
_PARALLEL_READS = 4
_NUMBERS_OF_A_STATE = 2
"""How many numbers the manifest of a new state can have: that of the state, and the next one."""
_MAX_ATTEMPTS = 20
"""How many times a state is written if others have saved meanwhile."""
_ATTEMPTS_BESIDE_OTHERS = 4
"""How many times a state is written beside those of other members before the storage is taken for full."""


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


class CheckpointStore:
    """The checkpoints of one job.

    Args:
        storage: where they are stored.
        chunk_bytes: length of the parts of a state.
    """

    def __init__(self, storage: Storage, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.storage = storage
        self._chunk_bytes = chunk_bytes
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
        """Save a checkpoint with the next number, and delete older ones, except the last two states.

        Args:
            snapshot: contains the state.
            info: description of the state.
            result: result of training, as the program has reported it on this replica. That of the checkpoint
                before, which a former rank 0 may have saved, is added, unless training ended there.
            is_cancelled: whether to give up; called before each part is written.
            only_if_latest: whether a checkpoint of a later step which another member of this generation has
                saved is as good.

        Returns:
            The manifest of the checkpoint, or of that other one.

        Raises:
            CheckpointError: the checkpoint cannot be written, or a later generation or a later job of the
                same name has saved here. The existing checkpoints are unchanged.
            WriteCancelledError: `is_cancelled` returned True.
        """
        try:
            for attempt in range(_MAX_ATTEMPTS):
                begun = time.monotonic()
                try:
                    manifest = self._save_once(snapshot, info, result, is_cancelled, only_if_latest)
                    break
                except NameTakenError:
                    continue
                except StorageFullError:
                    if only_if_latest and attempt < _ATTEMPTS_BESIDE_OTHERS:
                        # Other members write at the same time. One that is alone for a while has space.
                        time.sleep(secrets.SystemRandom().uniform(0.0, 3.0 * (time.monotonic() - begun)))
                    elif not self._delete_remains():
                        raise
            else:
                raise StorageError(f"other processes have saved here during each of {_MAX_ATTEMPTS} attempts")
        except UnusableStorageError as error:
            raise CheckpointError(str(error)) from error
        except StorageError as error:
            remedy = "Check that the storage can be reached and written, or use another one"
            if isinstance(error, StorageFullError):
                mebibytes = -(-(len(snapshot.layout.header) + snapshot.layout.data_bytes) // 2**20)
                remedy = (
                    f"Free {mebibytes:,} MiB: there must be space for three checkpoints, two of which stay"
                )
            raise StorageUnavailableError(
                f"the checkpoint cannot be saved in {self.storage}: {error}; {self._describe_newest()}. "
                f"{remedy}"
            ) from error
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
        """Save a checkpoint.

        Raises:
            NameTakenError: others have saved so many meanwhile that this state may be deleted.
        """
        newest = max(self.numbers(), default=0)
        last = self._require_not_superseded(newest, info)
        if only_if_latest and last is not None and _is_later(last, info):
            return last
        self._delete_uncommitted()
        number = newest + 1
        state_name = state_file_name(number, secrets.token_hex(4))
        layout = snapshot.layout
        digests: list[str] = []

        def parts() -> Iterator[Part]:
            yield from _digested(layout.header, digests)
            for part in snapshot.parts(self._chunk_bytes):
                if is_cancelled():
                    raise WriteCancelledError
                yield from _digested(part, digests)

        size = len(layout.header) + layout.data_bytes
        self._uncommitted.add(state_name)
        self.storage.write(state_name, parts(), size=size)
        manifest = Manifest(
            number=number,
            state=state_name,
            bytes=size,
            header_bytes=len(layout.header),
            chunk_bytes=self._chunk_bytes,
            sha256=digests,
            **asdict(info),
            result={**_result_so_far(last, info), **(result or {})},
        )
        try:
            committed = self._commit(manifest, info, only_if_latest=only_if_latest)
        except (NameTakenError, _SupersededError):
            self.storage.delete(state_name)
            raise
        if committed.state != state_name:
            self.storage.delete(state_name)
        self._uncommitted.discard(state_name)
        return committed

    def annotate(self, manifest: Manifest, result: dict[str, float | str]) -> Manifest:
        """Save a new manifest of a saved state, with `result` added, and return it.

        Raises:
            CheckpointError: the manifest cannot be written, or the state was replaced.
        """
        annotated = replace(manifest, number=manifest.number + 1, result={**manifest.result, **result})
        info = CheckpointInfo(**{name: getattr(manifest, name) for name in CheckpointInfo.__annotations__})
        try:
            annotated = self._commit(annotated, info)
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

    def load(self, number: int | None = None) -> tuple[dict[str, Any], Manifest] | None:
        """Return the newest intact checkpoint, as state and manifest. None if none was ever saved.

        Every byte is verified before it is used. Reports damaged checkpoints that are newer than the one
        returned.

        Args:
            number: number of the checkpoint to load. None loads the newest.

        Raises:
            CheckpointError: all checkpoints are damaged, or the storage cannot be read.
        """
        for attempt in range(_MAX_ATTEMPTS):
            numbers = self.numbers() if number is None else [number]
            loaded, damages = self._read_newest(numbers)
            is_last = attempt == _MAX_ATTEMPTS - 1 or number is not None
            if not damages or is_last or self.numbers() == numbers:
                break
            # Another process has saved meanwhile, and may have deleted what was to be read.
            loaded = None
        if loaded is not None:
            _, manifest = loaded
            for damage in damages:
                print(
                    f"adascale: {damage}; resuming from checkpoint {manifest.number}, step {manifest.step}",
                    flush=True,
                )
        elif damages:
            described = "; ".join(damages).replace(f"{self.storage}/", "")
            raise UnusableCheckpointError(
                f"no intact checkpoint is left in {self.storage}: {described}. "
                "Restore a copy of it, or start from scratch (adascale run --fresh, or another location)"
            )
        return loaded

    def numbers(self) -> list[int]:
        """Return the numbers of the saved checkpoints, in ascending order.

        Raises:
            CheckpointError: the storage cannot be read.
        """
        try:
            names = self.storage.names()
        except StorageError as error:
            raise StorageUnavailableError(f"{self.storage} cannot be read: {error}") from error
        return sorted(number for number in map(manifest_number, names) if number is not None)

    # -- reading ----------------------------------------------------------------------------------------

    def _read_newest(
        self, numbers: Sequence[int]
    ) -> tuple[tuple[dict[str, Any], Manifest] | None, list[str]]:
        """Return the newest intact checkpoint, and descriptions of the damaged ones that are newer."""
        damages: list[str] = []
        for number in reversed(numbers):
            try:
                return self._read(number), damages
            except _DamagedError as error:
                damages.append(str(error))
            except StorageError as error:
                raise StorageUnavailableError(f"{self.storage} cannot be read: {error}") from error
        return None, damages

    def _read(self, number: int) -> tuple[dict[str, Any], Manifest]:
        manifest = self._read_manifest(number)
        path = self.storage.path(manifest.state)
        header = self._read_verified(manifest, 0, lambda: f"{path} is damaged in its header")
        try:
            layout = read_layout(header)
            tensors = self._read_tensors(manifest, layout)
            state: dict[str, Any] = tree.unflatten(layout.spec, tensors)
        except InvalidSpecError as error:
            raise _DamagedError(f"{path} is damaged: {error}") from error
        return state, manifest

    def _read_tensors(self, manifest: Manifest, layout: StateFileLayout) -> list[torch.Tensor]:
        """Read the tensors, each into memory of its own, in parts that are verified one by one."""
        path = self.storage.path(manifest.state)
        expected = len(layout.header) + layout.data_bytes
        if manifest.bytes != expected or manifest.header_bytes != len(layout.header):
            raise _DamagedError(f"{path} is damaged: its tensors need {expected} bytes, not {manifest.bytes}")
        tensors = [torch.empty(each.shape, dtype=each.dtype) for each in layout.layouts]
        targets = [
            (offset, tensor.view(-1).view(torch.uint8).numpy().data)
            for tensor, offset in zip(tensors, layout.offsets, strict=True)
            if tensor.numel()
        ]
        targets.sort(key=lambda target: target[0])
        first = 0
        for start, content in self._verified_chunks(manifest, layout):
            end = start + len(content)
            while first < len(targets) and targets[first][0] + len(targets[first][1]) <= start:
                first += 1
            for offset, memory in targets[first:]:
                if offset >= end:
                    break
                begin, stop = max(offset, start), min(offset + len(memory), end)
                memory[begin - offset : stop - offset] = content[begin - start : stop - start]
        return tensors

    def _verified_chunks(self, manifest: Manifest, layout: StateFileLayout) -> Iterator[tuple[int, bytes]]:
        """Read and verify several parts at the same time; return their positions and contents in order."""
        path = self.storage.path(manifest.state)

        def read(index: int) -> tuple[int, bytes]:
            start = index * manifest.chunk_bytes
            end = min(start + manifest.chunk_bytes, layout.data_bytes)

            def place() -> str:
                names = layout.names_between(start, end)
                tensors = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                return f"{path} is damaged in bytes {start:,} to {end:,} of {tensors}"

            return start, self._read_verified(manifest, index + 1, place)

        count = -(-layout.data_bytes // manifest.chunk_bytes)
        if len(manifest.sha256) != count + 1:
            raise _DamagedError(f"{path} is damaged: its manifest has {len(manifest.sha256)} checksums")
        pending: deque[Future[tuple[int, bytes]]] = deque()
        with ThreadPoolExecutor(_PARALLEL_READS, thread_name_prefix="adascale-read") as pool:
            try:
                for index in range(count):
                    pending.append(pool.submit(read, index))
                    if len(pending) > _PARALLEL_READS:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _read_verified(self, manifest: Manifest, index: int, place: Callable[[], str]) -> bytes:
        """Return the header (index 0) or a part of a state; `place` describes it, for a message.

        Raises:
            _DamagedError: its SHA-256 is not that of the manifest.
        """
        if index == 0:
            start, end = 0, manifest.header_bytes
        else:
            start = manifest.header_bytes + (index - 1) * manifest.chunk_bytes
            end = min(start + manifest.chunk_bytes, manifest.bytes)
        try:
            content = self.storage.read(manifest.state, start, end)
        except MissingFileError as error:
            raise _DamagedError(f"{self.storage.path(manifest.state)} is missing: {error}") from error
        if len(content) != end - start:
            raise _DamagedError(
                f"{place()}: it ends after {start + len(content):,} of {manifest.bytes:,} bytes"
            )
        found = hashlib.sha256(content).hexdigest()
        if found != manifest.sha256[index]:
            raise _DamagedError(
                f"{place()}: their SHA-256 is {found[:12]}..., expected {manifest.sha256[index][:12]}..."
            )
        return content

    def _read_manifest(self, number: int) -> Manifest:
        name = manifest_file_name(number)
        path = self.storage.path(name)
        try:
            return Manifest.from_json(json.loads(self.storage.read(name)))
        except UnsupportedFormatError as error:
            raise UnusableCheckpointError(f"{path}: {error}; use the version that wrote it") from error
        except MissingFileError as error:
            raise _DamagedError(f"{path} is missing: {error}") from error
        except InvalidManifestError as error:
            raise _DamagedError(f"{path} is damaged: {error}") from error
        except ValueError as error:
            raise _DamagedError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    # -- writing ----------------------------------------------------------------------------------------

    def _commit(self, manifest: Manifest, info: CheckpointInfo, *, only_if_latest: bool = False) -> Manifest:
        """Create the manifest; with the next number, if another process has used its number.

        Returns:
            The manifest, or that of a later step (see `save`).

        Raises:
            CheckpointError: that process has replaced this one.
            NameTakenError: others have used more numbers, so the state may be deleted.
            StorageError: the manifest cannot be written.
        """
        number, highest = manifest.number, manifest.number + _NUMBERS_OF_A_STATE - 1
        while True:
            numbered = replace(manifest, number=number)
            text = (json.dumps(numbered.to_json(), indent=1) + "\n").encode()
            try:
                self.storage.create(manifest_file_name(number), text)
            except NameTakenError:
                newest = max(self.numbers(), default=number)
                last = self._require_not_superseded(newest, info)
                if last is not None and last == replace(manifest, number=last.number):
                    # A client has repeated the request, because the answer to the first one was lost.
                    return last
                if only_if_latest and last is not None and _is_later(last, info):
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

    def _require_not_superseded(self, newest: int, info: CheckpointInfo) -> Manifest | None:
        """Check that no successor of this trainer, which may have been disconnected, has saved.

        Returns:
            The newest manifest. None if it is damaged, or if there is none.
        """
        if newest == 0:
            return None
        try:
            last = self._read_manifest(newest)
        except _DamagedError:
            return None
        if info.generation == 0:
            # Without an agent, no other trainer can have replaced this one.
            return last
        if last.incarnation > info.incarnation:
            raise _SupersededError(
                f"a later job of this name, created {last.incarnation - info.incarnation} s after this one, "
                f"has saved in {self.storage}: this job was deleted while its replica was disconnected"
            )
        if last.incarnation == info.incarnation and last.generation > info.generation:
            raise _SupersededError(
                f"generation {last.generation} has saved in {self.storage}, but this is generation "
                f"{info.generation}: this replica was replaced while it was disconnected"
            )
        return last

    def _prune(self) -> None:
        """Delete files that are not needed, manifests first, so that no checkpoint exists in part.

        States without a manifest, and drafts, may belong to a writer at work: see the top of this file. A
        storage that fails now is reported by the next save.
        """
        try:
            names = self.storage.names()
            kept_states: list[str] = []
            kept: set[str] = set()
            numbers = sorted(number for number in map(manifest_number, names) if number is not None)
            for number in reversed(numbers):
                try:
                    state = self._read_manifest(number).state
                except _DamagedError:
                    continue
                except UnusableCheckpointError:
                    return
                if state not in kept_states and len(kept_states) == KEPT_STATES:
                    break
                if state in names and state not in kept_states:
                    kept_states.append(state)
                    kept |= {state, manifest_file_name(number)}
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
            with contextlib.suppress(_DamagedError, UnusableCheckpointError):
                self._uncommitted.discard(self._read_manifest(number).state)
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
            for name in filter(is_draft, names):
                self.storage.delete(name)
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
            last = self._read_manifest(numbers[-1])
        except _DamagedError as damage:
            return str(damage)
        except (StorageError, CheckpointError):
            return "whether an earlier checkpoint exists is not known"
        return f"the last checkpoint, of step {last.step}, is unchanged"


def _result_so_far(last: Manifest | None, info: CheckpointInfo) -> dict[str, float | str]:
    """Return the result that the checkpoint before has, unless training ended there and goes on now."""
    if last is None or (last.finished and (last.step < info.step or not info.finished)):
        return {}
    return last.result


def _is_later(manifest: Manifest, info: CheckpointInfo) -> bool:
    """Whether a checkpoint is of the same generation as `info`, and of a later step."""
    same = (manifest.incarnation, manifest.generation) == (info.incarnation, info.generation)
    return same and info.generation > 0 and manifest.step > info.step


def _digested(part: Part, digests: list[str]) -> Iterator[Part]:
    digests.append(hashlib.sha256(part).hexdigest())
    yield part


class _SupersededError(CheckpointError):
    """A successor of this trainer has saved."""


class _DamagedError(Exception):
    """A checkpoint differs from what was saved."""
