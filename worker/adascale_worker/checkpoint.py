"""Checkpoints in a folder: whole ones only, whatever happens while one is written.

A checkpoint is two files, `checkpoint-<number>.pt` with the state and `checkpoint-<number>.json`, its
manifest, with the length and SHA-256 of the state. Each is written under another name, flushed to the
disk and then renamed; the manifest comes last, and a state without one does not exist. The last two are
kept, so that a damaged one leaves the one before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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
from adascale_worker.errors import CheckpointError

KEPT = 2


@dataclass(frozen=True)
class CheckpointInfo:
    """Where training stands when a checkpoint is saved (see `Manifest`)."""

    step: int
    progress: float
    epoch: int
    replicas: int
    generation: int
    finished: bool
    incarnation: int = 0


class CheckpointFolder:
    """The checkpoints of one job.

    Args:
        directory: made if it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(
        self, state: dict[str, Any], info: CheckpointInfo, result: dict[str, float | str] | None = None
    ) -> Manifest:
        """Save `state` beside the last checkpoint and drop the ones before that.

        Args:
            state: tensors, numbers, texts, lists and dicts.
            info: where training stands.
            result: what the program told of its result.

        Raises:
            CheckpointError: it cannot be written, or a later generation has, or a later job of the same
                name; the last checkpoint is untouched.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            numbers = self.numbers()
            number = numbers[-1] + 1 if numbers else 1
            if numbers:
                self._refuse_to_go_back(numbers[-1], info)
            path = self._state_path(number)
            with _Written(path) as file:
                torch.save(state, file)
            digest, length = _digest(path)
            manifest = Manifest(number, digest, length, **asdict(info), result=dict(result or {}))
            self._write_manifest(manifest)
        except (OSError, RuntimeError) as error:
            # torch.save wraps the operating system's error in a RuntimeError.
            raise CheckpointError(
                f"the checkpoint cannot be saved in {self.directory}: {_reason(error)}; "
                f"{self._last_words()}. Make room there, or give another folder"
            ) from error
        self._prune()
        return manifest

    def annotate(self, manifest: Manifest, result: dict[str, float | str]) -> Manifest:
        """Write what the program told of its result into the manifest.

        Raises:
            CheckpointError: it cannot be written.
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
        """The newest whole checkpoint, or the one of `number`; none if none was ever saved.

        A damaged one is reported and the one before it taken.

        Raises:
            CheckpointError: there are checkpoints, but no whole one.
        """
        numbers = self.numbers() if number is None else [number]
        damages = []
        for candidate in reversed(numbers):
            try:
                state, manifest = self._read(candidate)
            except _DamagedError as damage:
                damages.append(str(damage))
                continue
            for told in damages:
                print(
                    f"adascale: {told}; going on from checkpoint {manifest.number}, step {manifest.step}",
                    flush=True,
                )
            return state, manifest
        if damages:
            raise CheckpointError(
                f"no whole checkpoint is left in {self.directory}: {'; '.join(damages)}. "
                "Put a good copy there, or remove the folder to begin anew"
            )
        return None

    def numbers(self) -> list[int]:
        """The numbers of the checkpoints that were saved, ascending.

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
                f"its manifest says {manifest.bytes} with {manifest.sha256[:12]}..."
            )
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state, manifest

    def _read_manifest(self, number: int) -> Manifest:
        path = self._manifest_path(number)
        try:
            return Manifest.from_json(json.loads(path.read_bytes()))
        except UnsupportedFormatError as error:
            raise CheckpointError(f"{path}: {error}; use the version that wrote it") from error
        except InvalidManifestError as error:
            raise _DamagedError(f"{path} is damaged: {error}") from error
        except (OSError, ValueError) as error:
            raise _DamagedError(f"{path} is damaged: {_reason(error)}") from error

    def _write_manifest(self, manifest: Manifest) -> None:
        with _Written(self._manifest_path(manifest.number)) as file:
            file.write((json.dumps(manifest.to_json(), indent=1) + "\n").encode())

    def _refuse_to_go_back(self, newest: int, info: CheckpointInfo) -> None:
        """A trainer that was cut off and replaced must not write over its successors' work."""
        try:
            last = self._read_manifest(newest)
        except _DamagedError:
            return
        if info.generation == 0:
            # Without an agent there is nobody who could take its place.
            return
        if last.incarnation > info.incarnation:
            raise CheckpointError(
                f"a later job of this name, made {last.incarnation - info.incarnation} s after this one, "
                f"has saved in {self.directory} already: this job was deleted while its replica was cut off"
            )
        if last.incarnation == info.incarnation and last.generation > info.generation:
            raise CheckpointError(
                f"generation {last.generation} has saved in {self.directory} already, this is generation "
                f"{info.generation}: its place was taken while it was cut off"
            )

    def _prune(self) -> None:
        """Drop all but the newest; the manifest first, so that what is half dropped does not exist."""
        kept = set(self.numbers()[-KEPT:])
        for number in self.numbers():
            if number not in kept:
                self._manifest_path(number).unlink(missing_ok=True)
        for path in self.directory.glob("checkpoint-*"):
            if checkpoint_number(path.name) not in {None, *kept}:
                path.unlink(missing_ok=True)

    def _last_words(self) -> str:
        numbers = self.numbers()
        if not numbers:
            return "there is none before it"
        try:
            last = self._read_manifest(numbers[-1])
        except _DamagedError as damage:
            return str(damage)
        return f"the last one, of step {last.step}, is untouched"

    def _state_path(self, number: int) -> Path:
        return self.directory / state_file_name(number)

    def _manifest_path(self, number: int) -> Path:
        return self.directory / manifest_file_name(number)


class _DamagedError(Exception):
    """A checkpoint that is not what was saved."""


class _Written:
    """A file that appears under its name only once it is whole and on the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._draft = path.with_name(draft_file_name(path.name))
        self._file: IO[bytes] | None = None

    def __enter__(self) -> IO[bytes]:
        self._file = self._draft.open("wb")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._file is not None
        if kind is not None:
            self._abandon()
            return
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._draft.replace(self._path)
            _flush_folder(self._path.parent)
        except OSError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        assert self._file is not None
        # What is still buffered may not fit either; the draft goes in any case.
        with contextlib.suppress(OSError):
            self._file.close()
        self._draft.unlink(missing_ok=True)


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
    """The operating system's words where there are any."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {error}"
