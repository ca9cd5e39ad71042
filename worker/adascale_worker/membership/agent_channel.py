"""The connection of a trainer with its agent: JSON lines over a socket, for the whole life of the trainer.

The agent sends assignments to generations; the trainer reports in which generation it is. `docs/design.md`
lists the messages.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """A member of a generation.

    Args:
        replica: index of its replica.
        instance: identifies its trainer process.
        address, port: where it accepts connections of the other members.
        node: the node that it runs on; None if unknown.
    """

    replica: int
    instance: str
    address: str
    port: int
    node: str | None = None


@dataclass(frozen=True)
class Assignment:
    """The place of this trainer in a generation.

    Args:
        generation: number of the generation.
        rank: index of this trainer in `members`.
        members: in the order of ranks.
        secret: known to the members only.
        environ: settings of the job, rank and number of replicas; None for a variable that is not set.
    """

    generation: int
    rank: int
    members: tuple[Member, ...]
    secret: str
    environ: Mapping[str, str | None]

    @property
    def replica(self) -> int:
        """Index of this trainer's replica."""
        return self.members[self.rank].replica


@dataclass(frozen=True)
class Release:
    """A generation is active without this trainer.

    Args:
        generation: number of the generation.
        is_last: whether it has no members, so that nobody keeps the state.
    """

    generation: int
    is_last: bool = False


class AgentChannel:
    """Receives messages of the agent in a thread, and sends messages to it.

    Args:
        channel: a connected socket.
    """

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._changed = threading.Condition()
        self._changes = self._known_changes = 0
        self._newest: Assignment | Release | None = None
        self._refusal: str | None = None
        self._is_closed = False
        self._sending = threading.Lock()
        self._on_assignment: Callable[[Assignment], None] = lambda _: None
        self._on_hold: Callable[[int], None] = lambda _: None
        self._on_terminate: Callable[[], None] = lambda: None

    def start(
        self,
        on_assignment: Callable[[Assignment], None],
        on_hold: Callable[[int], None],
        on_terminate: Callable[[], None],
    ) -> None:
        """Start to receive messages.

        Args:
            on_assignment: called in a thread with each assignment, before `newest` returns it.
            on_hold: called in a thread with the number of a generation that the service has ended.
            on_terminate: called in a thread when the agent requests to save and exit, or is gone. Its death
                ends its child process, which may be a shell that has started this one.
        """
        self._on_assignment, self._on_hold, self._on_terminate = on_assignment, on_hold, on_terminate
        threading.Thread(target=self._receive, name="adascale-agent-channel", daemon=True).start()

    @property
    def newest(self) -> Assignment | Release | None:
        """The message for the newest generation. None before the first."""
        return self._newest

    @property
    def newest_generation(self) -> int:
        """The generation of `newest`; 0 before the first."""
        newest = self._newest
        return 0 if newest is None else newest.generation

    @property
    def refusal(self) -> str | None:
        """Why the agent refuses this trainer. None if it does not."""
        return self._refusal

    @property
    def is_closed(self) -> bool:
        """Whether the agent has closed the connection."""
        return self._is_closed

    def wait(self, timeout: float) -> None:
        """Wait for a message or a call of `notify` since the last `wait`, at most `timeout` seconds.

        Only one thread may wait.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._changes != self._known_changes, timeout)
            self._known_changes = self._changes

    def notify(self) -> None:
        """End `wait`, also a later one if none waits now."""
        with self._changed:
            self._changes += 1
            self._changed.notify_all()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Does nothing if the agent is gone: then this process ends."""
        line = json.dumps({"type": kind, **fields}).encode() + b"\n"
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def _receive(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                self._handle(json.loads(line))
        self._is_closed = True
        self._on_terminate()
        self.notify()

    def _handle(self, message: dict[str, Any]) -> None:
        generation = int(message.get("generation", 0))
        match message["type"]:
            case "refuse":
                self._refusal = str(message["reason"])
            case "terminate":
                self._on_terminate()
            case "hold":
                self._on_hold(generation)
            case "assign" if generation > self.newest_generation:
                assignment = _assignment(message)
                self._on_assignment(assignment)
                self._newest = assignment
            case "release" if generation > self.newest_generation:
                self._newest = Release(generation, bool(message.get("last")))
        self.notify()


def _assignment(message: dict[str, Any]) -> Assignment:
    return Assignment(
        generation=message["generation"],
        rank=message["rank"],
        members=tuple(
            Member(m["replica"], m.get("instance") or "", m["address"], m["port"], m.get("node"))
            for m in message["members"]
        ),
        secret=message.get("secret") or "",
        environ=message.get("env") or {},
    )
