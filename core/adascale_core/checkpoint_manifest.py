"""Checkpoint files: their names, and the manifest that describes a checkpoint.

A checkpoint consists of two files: `checkpoint-<number>-<writer>.safetensors` with the state, and
`checkpoint-<number>.json` with the manifest, which exists only if the state is complete. If the model is
sharded over the processes of a replica, each process has a file with its part of the state,
`checkpoint-<number>-<writer>-<process>-of-<count>.safetensors`. No file changes after it got its name. In a
folder, a file is written as a draft, `<name>.<writer>.draft`, and renamed when it is complete. The worker
writes these files. The controller reads the manifests, and deletes the files of a job that starts from
scratch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Self, get_origin, get_type_hints

FORMAT: Final = 6
"""The format of the manifest and of the state. Another order of samples is another format, because the state
has the position in it."""

SHARDED_FORMAT: Final = 7
"""The format if the state has a file for each process of a replica. Versions of `FORMAT` cannot read it."""

S3_CHECKSUMS: Final = {
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}
"""Configuration of S3 clients: some S3-compatible stores refuse the checksums of clients. The manifest has
its own."""

_FILE_NAME: Final = re.compile(
    r"checkpoint-(?P<number>[0-9]{8,})(\.json|-(?P<writer>[0-9a-f]{8})(-[0-9]+-of-[0-9]+)?\.safetensors)"
    r"(?P<draft>\.[0-9a-f]{8}\.draft)?"
)


_BEST_WEIGHTS: Final = re.compile(r"best-[0-9]{8,}-[0-9a-f]{8}\.safetensors(\.[0-9a-f]{8}\.draft)?")


class InvalidManifestError(ValueError):
    """A manifest that lacks a member, has a member of the wrong type, or has another checksum."""


class UnsupportedFormatError(ValueError):
    """A manifest of another version.

    Args:
        found: its format.
    """

    def __init__(self, found: object) -> None:
        super().__init__(
            f"format {found} is not supported: this version reads the formats {FORMAT} and {SHARDED_FORMAT}"
        )
        self.found = found


@dataclass(frozen=True)
class StateFile:
    """Description of a file with a state, or with the part of it that one process has.

    Args:
        state: name of the file.
        bytes: its length.
        header_bytes: length of its header, which contains the tensors' names and the rest of the state.
        sha256: SHA-256 of the header and then of each part, in hexadecimal digits.
    """

    state: str
    bytes: int
    header_bytes: int
    sha256: Sequence[str]


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint.

    Args:
        number: number of the checkpoint, from 1; the next checkpoint of a job has the next number.
        state, bytes, header_bytes, sha256: of the file with the state, or of that of the first process; see
            `StateFile`.
        chunk_bytes: length of each part of a file behind its header, except the last, which may be shorter.
        step: optimizer steps since the job was created.
        progress: sum of gains, in steps at `batch_size`.
        epoch: epoch in which the checkpoint was saved, from 0.
        replicas: number of replicas that trained.
        generation: generation that saved the checkpoint; 0 without an agent.
        saved_at: when the state was copied, in seconds since 1970.
        finished: whether training is over.
        result: result of the training, as the program has reported it.
        format: version of this format.
        incarnation: when the job was created, in seconds since 1970; 0 if unknown. It distinguishes a job
            from an earlier job of the same name, whose generations it may repeat.
        finish_reason: why the program has ended training before its required steps or epochs; else empty.
        shards: the files of the other processes of a replica, in their order, if the model is sharded.
    """

    number: int
    state: str
    bytes: int
    header_bytes: int
    chunk_bytes: int
    sha256: Sequence[str]
    step: int
    progress: float
    epoch: int
    replicas: int
    generation: int
    saved_at: float
    finished: bool = False
    result: dict[str, float | str] = field(default_factory=dict)
    format: int = FORMAT
    incarnation: int = 0
    finish_reason: str = ""
    shards: Sequence[StateFile] = ()

    @property
    def files(self) -> Sequence[StateFile]:
        """The files with the state, in the order of the processes."""
        return (StateFile(self.state, self.bytes, self.header_bytes, self.sha256), *self.shards)

    @property
    def names(self) -> Sequence[str]:
        """The names of these files."""
        return [file.state for file in self.files]

    def to_json(self) -> dict[str, Any]:
        """Return the members of the manifest's JSON object, with their checksum."""
        members = asdict(self) | {"sha256": list(self.sha256)}
        shards = members.pop("shards")
        if shards:
            members["shards"] = [{**shard, "sha256": list(shard["sha256"])} for shard in shards]
        return {**members, "checksum": _checksum(members)}

    @classmethod
    def from_json(cls, members: object) -> Self:
        """Return the manifest of a parsed JSON document.

        Raises:
            UnsupportedFormatError: it has another format.
            InvalidManifestError: a member is missing or of the wrong type, or the members are not those that
                the checksum was computed from.
        """
        if not isinstance(members, Mapping):
            raise InvalidManifestError(f"must be a JSON object, got {members!r}")
        if "format" not in members:
            raise InvalidManifestError("format is missing")
        if members["format"] not in (FORMAT, SHARDED_FORMAT):
            raise UnsupportedFormatError(members["format"])
        values = {name: _checked(name, members, types) for name, types in _TYPES.items()}
        if members["format"] == SHARDED_FORMAT:
            values["shards"] = _shards(members)
        if members.get("checksum") != _checksum(
            {name: value for name, value in members.items() if name != "checksum"}
        ):
            raise InvalidManifestError("its checksum does not match its members")
        return cls(**values)


def _json_types(record: type) -> Mapping[str, tuple[type, ...]]:
    """Return the types that the JSON values of a record's fields may have."""
    types: Mapping[Any, tuple[type, ...]] = {float: (int, float), Sequence: (list,)}
    hints = {name: get_origin(hint) or hint for name, hint in get_type_hints(record).items()}
    return {name: types.get(hint, (hint,)) for name, hint in hints.items()}


_TYPES: Final = {name: types for name, types in _json_types(Manifest).items() if name != "shards"}
_FILE_TYPES: Final = _json_types(StateFile)


def _shards(members: Mapping[str, Any]) -> Sequence[StateFile]:
    """Return the descriptions of the files of the other processes."""
    shards = _checked("shards", members, (list,))
    for shard in shards:
        if not isinstance(shard, Mapping):
            raise InvalidManifestError(f"shards must be JSON objects, got {shard!r}")
    return tuple(
        StateFile(**{name: _checked(name, shard, types) for name, types in _FILE_TYPES.items()})
        for shard in shards
    )


def _checked(name: str, members: Mapping[str, Any], types: tuple[type, ...]) -> Any:
    if name not in members:
        raise InvalidManifestError(f"{name} is missing")
    value = members[name]
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(type_.__name__ for type_ in types)
        raise InvalidManifestError(f"{name} must be of type {expected}, got {value!r}")
    return value


def _checksum(members: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(members, sort_keys=True).encode()).hexdigest()


def normalized_url(url: str) -> str:
    """Return the URL of checkpoints without empty parts: s3://bucket/prefix for s3://bucket//prefix/.

    Stores differ in whether an empty part of a key is one of its own.
    """
    return re.sub("(?<![:/])/+", "/", url).rstrip("/")


def state_file_name(number: int, writer: str, process: int = 0, count: int = 1) -> str:
    """Return the name of the file with the state of checkpoint `number`, or with the part of one process.

    Args:
        number: of the checkpoint.
        writer: 8 hexadecimal digits, chosen at random by the replica that writes the checkpoint.
        process: index of the process in its replica, from 0.
        count: number of processes of the replica.
    """
    part = f"-{process + 1}-of-{count}" if count > 1 else ""
    return f"checkpoint-{number:08d}-{writer}{part}.safetensors"


def best_weights_file_name(step: int, writer: str) -> str:
    """Return the name of a file with the weights that had the best value of a metric.

    Args:
        step: optimizer steps so far.
        writer: 8 hexadecimal digits that no other file has.
    """
    return f"best-{step:08d}-{writer}.safetensors"


def is_best_weights(name: str) -> bool:
    """Whether a file has such weights, or is the draft of one."""
    return _BEST_WEIGHTS.fullmatch(name) is not None


def manifest_file_name(number: int) -> str:
    """Return the name of the manifest of checkpoint `number`."""
    return f"checkpoint-{number:08d}.json"


def draft_file_name(name: str, writer: str) -> str:
    """Return the name under which `writer` writes the file `name` until it is complete."""
    return f"{name}.{writer}.draft"


def manifest_number(name: str) -> int | None:
    """Return the checkpoint's number if `name` is a complete manifest, else None."""
    match = _FILE_NAME.fullmatch(name)
    if match is None or match["writer"] or match["draft"]:
        return None
    return int(match["number"])


def name_of_draft(name: str) -> str | None:
    """Return the name that a file gets when it is complete; None if it is no draft.

    A draft is a file that a process writes, or has left when it was killed.
    """
    match = _FILE_NAME.fullmatch(name)
    return name.removesuffix(match["draft"]) if match is not None and match["draft"] else None


def state_of(name: str) -> tuple[int, str] | None:
    """Return the number and the writer of the state that a file or a draft belongs to; None for others.

    All files of a state have the same.
    """
    match = _FILE_NAME.fullmatch(name)
    return (int(match["number"]), match["writer"]) if match is not None and match["writer"] else None


def checkpoint_number(name: str) -> int | None:
    """Return the checkpoint's number if `name` is a state, a manifest or a draft, else None."""
    match = _FILE_NAME.fullmatch(name)
    return int(match["number"]) if match else None
