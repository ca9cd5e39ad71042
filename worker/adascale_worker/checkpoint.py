"""Checkpoints in a folder: a checkpoint is either complete or does not exist.

A checkpoint consists of two files: `checkpoint-<number>.pt` with the state, and `checkpoint-<number>.json`,
the manifest, with the length and SHA-256 of the state. Each file is written under a draft name, flushed to
disk and then renamed. The manifest is written last; a state without a manifest is ignored. The last two
checkpoints are kept, so that the previous one is available if the newest is damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch

from adascale_core.checkpoint_manifest import (
    InvalidManifestError,
    Manifest,
    UnsupportedFormatError,
    checkpoint_number,
    draft_file_name,
    manifest_file_name,
    manifest_number,
    state_file_name,
)
from adascale_worker.errors import CheckpointError, UnusableCheckpointError

KEPT_CHECKPOINTS = 2


@dataclass(frozen=True)
class CheckpointInfo:
    """The part of a manifest that describes the state of training; `Manifest` documents each attribute."""

    step: int
    progress: float
    epoch: int
    replicas: int
    generation: int
    finished: bool
    incarnation: int = 0
    finish_reason: str = ""


class CheckpointFolder:
    """The checkpoints of one job.

    Args:
        directory: the folder; `save` creates it if it does not exist.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(
        self, state: dict[str, Any], info: CheckpointInfo, result: dict[str, float | str] | None = None
    ) -> Manifest:
        """Save a checkpoint with the next number, and delete all but the last two.

        Args:
            state: tensors, numbers, strings, lists and dicts.
            info: description of the state.
            result: result of training, as the program has reported it.

        Returns:
            The manifest of the checkpoint.

        Raises:
            CheckpointError: the checkpoint cannot be written, or a later generation or a later job of the
                same name has saved in this folder. The existing checkpoints are unchanged.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            numbers = self.numbers()
            number = numbers[-1] + 1 if numbers else 1
            if numbers:
                self._require_not_superseded(numbers[-1], info)
            path = self._state_path(number)
            with _atomic_file(path) as file:
                torch.save(state, file)
            digest, length = _digest(path)
            manifest = Manifest(number, digest, length, **asdict(info), result=dict(result or {}))
            self._write_manifest(manifest)
        except (OSError, RuntimeError) as error:
            # torch.save wraps an OSError in a RuntimeError.
            raise CheckpointError(
                f"the checkpoint cannot be saved in {self.directory}: {_reason(error)}; "
                f"{self._describe_newest()}. Check the folder, or use another one"
            ) from error
        self._prune()
        return manifest

    def annotate(self, manifest: Manifest, result: dict[str, float | str]) -> Manifest:
        """Add `result` to a saved manifest, and return the new manifest.

        Raises:
            CheckpointError: the manifest cannot be written.
        """
        annotated = replace(manifest, result={**manifest.result, **result})
        try:
            self._write_manifest(annotated)
        except OSError as error:
            raise CheckpointError(
                f"the result cannot be saved in {self.directory}: {_reason(error)}"
            ) from error
        return annotated

    def load(self, number: int | None = None) -> tuple[dict[str, Any], Manifest] | None:
        """Return the newest intact checkpoint, as state and manifest. None if none was ever saved.

        Reports damaged checkpoints that are newer than the one returned.

        Args:
            number: number of the checkpoint to load. None loads the newest.

        Raises:
            CheckpointError: all checkpoints are damaged, or the folder cannot be read.
        """
        numbers = self.numbers() if number is None else [number]
        damages = []
        for candidate in reversed(numbers):
            try:
                state, manifest = self._read(candidate)
            except _DamagedError as error:
                damages.append(str(error))
                continue
            for damage in damages:
                print(
                    f"adascale: {damage}; resuming from checkpoint {manifest.number}, step {manifest.step}",
                    flush=True,
                )
            return state, manifest
        if damages:
            raise UnusableCheckpointError(
                f"no intact checkpoint is left in {self.directory}: {'; '.join(damages)}. "
                "Restore a copy of it, or start from scratch (adascale run --fresh, or remove the folder)"
            )
        return None

    def numbers(self) -> list[int]:
        """Return the numbers of the saved checkpoints, in ascending order.

        Raises:
            CheckpointError: the folder cannot be read.
        """
        try:
            names = [path.name for path in self.directory.iterdir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.directory} cannot be read: {_reason(error)}") from error
        return sorted(number for number in map(manifest_number, names) if number is not None)

    def _read(self, number: int) -> tuple[dict[str, Any], Manifest]:
        manifest = self._read_manifest(number)
        path = self._state_path(number)
        try:
            digest, length = _digest(path)
        except OSError as error:
            raise _DamagedError(f"{path} cannot be read: {_reason(error)}") from error
        if (digest, length) != (manifest.sha256, manifest.bytes):
            raise _DamagedError(
                f"{path} is damaged: it has {length} bytes with SHA-256 {digest[:12]}..., "
                f"expected {manifest.bytes} bytes with SHA-256 {manifest.sha256[:12]}..."
            )
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state, manifest

    def _read_manifest(self, number: int) -> Manifest:
        path = self._manifest_path(number)
        try:
            return Manifest.from_json(json.loads(path.read_bytes()))
        except UnsupportedFormatError as error:
            raise UnusableCheckpointError(f"{path}: {error}; use the version that wrote it") from error
        except InvalidManifestError as error:
            raise _DamagedError(f"{path} is damaged: {error}") from error
        except (OSError, ValueError) as error:
            raise _DamagedError(f"{path} is damaged: {_reason(error)}") from error

    def _write_manifest(self, manifest: Manifest) -> None:
        with _atomic_file(self._manifest_path(manifest.number)) as file:
            file.write((json.dumps(manifest.to_json(), indent=1) + "\n").encode())

    def _require_not_superseded(self, newest: int, info: CheckpointInfo) -> None:
        """Check that no successor of this trainer, which may have been disconnected, has saved."""
        try:
            last = self._read_manifest(newest)
        except _DamagedError:
            return
        if info.generation == 0:
            # Without an agent, no other trainer can have replaced this one.
            return
        if last.incarnation > info.incarnation:
            raise CheckpointError(
                f"a later job of this name, created {last.incarnation - info.incarnation} s after this one, "
                f"has saved in {self.directory}: this job was deleted while its replica was disconnected"
            )
        if last.incarnation == info.incarnation and last.generation > info.generation:
            raise CheckpointError(
                f"generation {last.generation} has saved in {self.directory}, but this is generation "
                f"{info.generation}: this replica was replaced while it was disconnected"
            )

    def _prune(self) -> None:
        """Delete all but the newest checkpoints; manifests first, so that none exists in part."""
        kept = set(self.numbers()[-KEPT_CHECKPOINTS:])
        for number in self.numbers():
            if number not in kept:
                self._manifest_path(number).unlink(missing_ok=True)
        for path in self.directory.glob("checkpoint-*"):
            if checkpoint_number(path.name) not in {None, *kept}:
                path.unlink(missing_ok=True)

    def _describe_newest(self) -> str:
        """Describe the newest checkpoint, for an error message."""
        numbers = self.numbers()
        if not numbers:
            return "no earlier checkpoint exists"
        try:
            last = self._read_manifest(numbers[-1])
        except _DamagedError as damage:
            return str(damage)
        return f"the last checkpoint, of step {last.step}, is unchanged"

    def _state_path(self, number: int) -> Path:
        return self.directory / state_file_name(number)

    def _manifest_path(self, number: int) -> Path:
        return self.directory / manifest_file_name(number)


class _DamagedError(Exception):
    """A checkpoint differs from what was saved."""


@contextlib.contextmanager
def _atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing that gets the name `path` when it is complete and flushed to disk."""
    draft = path.with_name(draft_file_name(path.name))
    file = draft.open("wb")
    try:
        yield file
        file.flush()
        os.fsync(file.fileno())
        file.close()
        draft.replace(path)
        _flush_folder(path.parent)
    except BaseException:
        # The disk may have no space for the buffered data either; the draft is deleted in any case.
        with contextlib.suppress(OSError):
            file.close()
        draft.unlink(missing_ok=True)
        raise


def _flush_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> tuple[str, int]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return digest, file.tell()


def _reason(error: BaseException) -> str:
    """Return the operating system's message, if an OSError caused `error`, else type and message."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"
