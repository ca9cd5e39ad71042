"""The connection of a trainer with its agent, for the whole life of the trainer.

The agent sends assignments to generations; the trainer reports in which generation it is. The messages are
those of `adascale_core.messages.channel`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from adascale_core.messages.channel import (
    AgentMessage,
    Assignment,
    Hold,
    Refuse,
    Release,
    Terminate,
    TrainerMessage,
    agent_message,
    encode,
)

if TYPE_CHECKING:
    from adascale_worker.membership.generations import Membership


class AgentChannel:
    """Receives messages of the agent in a thread, and sends messages to it."""

    def __init__(self, channel: socket.socket) -> None:
        self._socket = channel
        self._changed = threading.Condition()
        self._changes = self._known_changes = 0
        self.newest: Assignment | Release | None = None
        """The message for the newest generation; None before the first."""
        self.refusal: str | None = None
        """Why the agent refuses this trainer; None if it does not."""
        self.is_closed = False
        """Whether the agent has closed the connection."""
        self._sending = threading.Lock()

    def start(self, receiver: Membership) -> None:
        """Start to receive messages, for `receiver`, in a thread."""
        threading.Thread(
            target=self._receive, args=[receiver], name="adascale-agent-channel", daemon=True
        ).start()

    @property
    def newest_generation(self) -> int:
        """The generation of `newest`; 0 before the first."""
        return 0 if self.newest is None else self.newest.generation

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

    def send(self, message: TrainerMessage) -> None:
        """Send a message. Does nothing if the agent is gone: then this process ends."""
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(encode(message))

    def _receive(self, receiver: Membership) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                self._handle(agent_message(line), receiver)
        self.is_closed = True
        # The death of an agent ends its child process, which may be a shell that has started this one.
        receiver.terminate()
        self.notify()

    def _handle(self, message: AgentMessage | None, receiver: Membership) -> None:
        match message:
            case Refuse(reason):
                self.refusal = reason
            case Terminate():
                receiver.terminate()
            case Hold(generation):
                receiver.hold(generation)
            case Assignment() if message.generation > self.newest_generation:
                receiver.assign(message)
                self.newest = message
            case Release() if message.generation > self.newest_generation:
                self.newest = message
        self.notify()
