"""The connection over which one agent sends the copies of the state in its memory to another agent.

Both ends authenticate each other by the secret of the job's members, and need the same version of this
package. Then the receiver requests a copy of a later state than it has, again and again:

    server     {"challenge": ...}
    receiver   {"challenge": ..., "mac": ...}
    server     {"mac": ...}
    receiver   {"after": the number of its latest state, or null}
    server     {"bytes": ..., "document": ...}, and so many bytes: the tensors, then the document. 0 if the
               receiver has the latest state already

A receiver that does not get all bytes has no copy. As the other connections of the members, this one is not
encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from collections.abc import Iterator
from typing import Any, Final

from adascale_worker.process.package_version import package_version
from adascale_worker.process.snapshot_place import StateNumber

CHUNK_BYTES: Final = 1 << 20
"""Length of the parts in which a copy is read, sent and received."""
_MAX_LINE: Final = 4096


class SnapshotChannelError(OSError):
    """The other end is no agent of this job and version, or it has closed the connection."""


class SnapshotChannel:
    """One end of a connection."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        if not key:
            raise SnapshotChannelError("the secret of the job is not known yet")
        self._connection = connection
        self._key = key.encode()
        self._received = b""

    def accept(self) -> None:
        """Authenticate both ends, as the server."""
        challenge = secrets.token_hex(16)
        self._send(challenge=challenge)
        answer = self._receive()
        self._require(answer, "receiver", challenge)
        self._send(mac=self._mac("server", str(answer.get("challenge"))))

    def connect(self) -> None:
        """Authenticate both ends, as the receiver."""
        challenge, question = secrets.token_hex(16), self._receive()
        self._send(challenge=challenge, mac=self._mac("receiver", str(question.get("challenge"))))
        self._require(self._receive(), "server", challenge)

    def request(self, after: StateNumber | None) -> tuple[int, int]:
        """Request the copy of a later state, and return its bytes and those of its document; 0 if none."""
        self._send(after=after)
        answer = self._receive()
        length, document_bytes = _count(answer.get("bytes")), _count(answer.get("document", 0))
        if document_bytes > length:
            raise SnapshotChannelError("the answer to a request is invalid")
        return length, document_bytes

    def receive_request(self) -> StateNumber | None:
        """Wait for a request, and return the number of the latest state of the receiver; None if none."""
        after = self._receive().get("after")
        if after is None:
            return None
        if not isinstance(after, list) or len(after) != 3:
            raise SnapshotChannelError("a request is invalid")
        incarnation, generation, step = map(_count, after)
        return incarnation, generation, step

    def announce(self, length: int, document_bytes: int) -> None:
        """Answer a request."""
        self._send(bytes=length, document=document_bytes)

    def send_content(self, content: memoryview) -> None:
        """Send a part of a copy."""
        self._connection.sendall(content)

    def receive_content(self, length: int) -> Iterator[memoryview]:
        """Return so many bytes of a copy, in parts."""
        while length:
            part = self._received[:length] or self._connection.recv(min(length, CHUNK_BYTES))
            self._received = self._received[len(part) :]
            if not part:
                raise SnapshotChannelError("the connection was closed")
            length -= len(part)
            yield memoryview(part)

    def _send(self, **message: object) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            part = self._connection.recv(_MAX_LINE)
            if not part or len(self._received) > _MAX_LINE:
                raise SnapshotChannelError("the connection was closed" if not part else "a line is too long")
            self._received += part
        line, self._received = self._received.split(b"\n", 1)
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise SnapshotChannelError("a line is not a JSON object")
        return message

    def _require(self, message: dict[str, Any], role: str, challenge: str) -> None:
        if not hmac.compare_digest(str(message.get("mac")).encode(), self._mac(role, challenge).encode()):
            raise SnapshotChannelError(
                "the other end does not know the secret of the job, or has another version of this package"
            )

    def _mac(self, role: str, challenge: str) -> str:
        # The name keeps these values apart from those by which trainers authenticate each other.
        text = f"snapshot-{role}|{challenge}|{package_version()}"
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise SnapshotChannelError(f"a message has {value!r} where a count is required")
    return value
