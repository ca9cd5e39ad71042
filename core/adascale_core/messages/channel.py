"""The messages between agent and trainer: lines of JSON over a socket, for the trainer's whole life."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from adascale_core.messages import Message
from adascale_core.messages.allocation import Member


@dataclass(frozen=True)
class Ready(Message):
    """It waits in `program_reentry()`, listens for other members on this port, computes on this type of
    accelerator, and has this process id.

    Args:
        port: where it listens.
        accelerator: the type of accelerator; empty if unknown.
        pid: its process id, which is not that of the agent's child process if a shell has started it.
        state_port: where it sends its state to replicas that wait; 0 if nowhere.
    """

    port: int
    accelerator: str = ""
    pid: int | None = None
    state_port: int = 0


@dataclass(frozen=True)
class Running(Message):
    """It has the state of training, and trains in this generation."""

    generation: int


@dataclass(frozen=True)
class Stepped(Message):
    """It has finished the first step of this generation."""

    generation: int


@dataclass(frozen=True)
class Holding(Message):
    """It has noticed the loss of these replicas, and waits with the state after this step (null: it has
    none)."""

    generation: int
    step: int | None
    lost: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limited(Message):
    """A batch did not fit into memory: this is the largest local batch size to try next."""

    local_bsz_limit: int


@dataclass(frozen=True)
class Stalled(Message):
    """No step ends: this is where it is, or that it waits for the others (empty: a step has ended)."""

    stall: str


@dataclass(frozen=True)
class SavedElsewhere(Message):
    """A later generation than its own has saved the checkpoint: the job was continued elsewhere."""

    generation: int


@dataclass(frozen=True)
class Spent(Message):
    """How it has spent its time.

    Args:
        seconds: by `Cause`, since it was started.
        present: the cause of the time since then; empty in a step, whose end tells.
        measures: whether it has been in a generation. Before, the agent measures its time.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    present: str = ""
    measures: bool = False


@dataclass(frozen=True)
class TrainingSaved(Message):
    """The end of training is saved; the program may still evaluate."""


@dataclass(frozen=True)
class Finished(Message):
    """Training is finished, and the program ends normally."""


@dataclass(frozen=True)
class Terminated(Message):
    """It was requested to save and exit."""


@dataclass(frozen=True)
class Exiting(Message):
    """It ends with this exit code, which a shell that has started it may hide."""

    code: int


@dataclass(frozen=True)
class Assignment(Message):
    """Take part in this generation.

    Args:
        generation: number of the generation.
        rank: index of the trainer in `members`.
        members: in the order of ranks.
        secret: known to the members only.
        env: settings of the job, rank and number of replicas; None for a variable that is not set.
    """

    generation: int
    rank: int
    members: tuple[Member, ...]
    secret: str = ""
    env: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def replica(self) -> int:
        """Index of the trainer's replica."""
        return self.members[self.rank].replica


@dataclass(frozen=True)
class Follow(Message):
    """Get the state of this member while waiting for a generation.

    Args:
        source: the member.
        instance: this trainer.
        secret: known to the members only.
    """

    source: Member
    instance: str
    secret: str


@dataclass(frozen=True)
class Refuse(Message):
    """This process is not the trainer of the replica, which has another one."""

    reason: str


@dataclass(frozen=True)
class Terminate(Message):
    """Save and exit: the agent has got SIGTERM."""


@dataclass(frozen=True)
class Hold(Message):
    """The service has ended this generation: answer with `holding`."""

    generation: int


@dataclass(frozen=True)
class Release(Message):
    """A generation is active without this trainer: exit with `EXIT_REENTRY` (`last`: nobody keeps the
    state)."""

    generation: int
    last: bool = False


TrainerMessage = (
    Ready
    | Running
    | Stepped
    | Holding
    | Limited
    | Stalled
    | SavedElsewhere
    | Spent
    | TrainingSaved
    | Finished
    | Terminated
    | Exiting
)
"""What a trainer sends to its agent."""
AgentMessage = Assignment | Follow | Refuse | Terminate | Hold | Release
"""What an agent sends to its trainer."""

_NAMES: Mapping[type, str] = {Assignment: "assign", SavedElsewhere: "saved", TrainingSaved: "final"}


def name_of(kind: type) -> str:
    """Return the `type` of a message in its JSON object."""
    return _NAMES.get(kind, kind.__name__.lower())


def encode(message: TrainerMessage | AgentMessage) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps({"type": name_of(type(message)), **message.to_json()}).encode() + b"\n"


def trainer_message(line: str) -> TrainerMessage | None:
    """Return the message of a trainer; None if its type is unknown.

    Raises:
        ValueError: the line is not a message.
    """
    message: TrainerMessage | None = _decode(line, TrainerMessage)
    return message


def agent_message(line: str) -> AgentMessage | None:
    """Return the message of an agent; None if its type is unknown.

    Raises:
        ValueError: the line is not a message.
    """
    message: AgentMessage | None = _decode(line, AgentMessage)
    return message


def _decode(line: str, kinds: UnionType) -> Any:
    members = json.loads(line)
    if not isinstance(members, dict):
        raise ValueError(f"a message must be a JSON object, got {line[:100]!r}")
    kind = next((kind for kind in get_args(kinds) if name_of(kind) == members.get("type")), None)
    return None if kind is None else _read(kind, members)


def _read(hint: Any, value: Any) -> Any:
    """Return a JSON value as a value of the type `hint`."""
    if isinstance(hint, UnionType):
        return None if value is None else _read(get_args(hint)[0], value)
    origin = get_origin(hint)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(get_args(hint)[0], each) for each in value)
    if origin is Mapping and isinstance(value, dict):
        return {name: _read(get_args(hint)[1], each) for name, each in value.items()}
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        hints = get_type_hints(hint)
        known = {each.name: hints[each.name] for each in fields(hint) if each.name in value}
        try:
            return hint(**{name: _read(known[name], value[name]) for name in known})
        except TypeError as error:
            raise ValueError(f"a message {name_of(hint)!r} lacks fields: {error}") from error
    if type(value) is not hint:
        raise ValueError(f"a message has {value!r} where {hint} is required")
    return value
