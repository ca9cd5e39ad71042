"""Small messages between the processes of a replica."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SMALL = 1024
"""Bytes of a message that is exchanged in one collective call."""
_HEADER = 8


class ReplicaMessages:
    """Exchanges values over a process group of the processes of a replica.

    All of them call the methods in the same order. Values consist of what JSON has.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    def process(self) -> int:
        """Index of this process in its replica, from 0."""
        return self._group.rank()

    @property
    def count(self) -> int:
        """Number of processes of the replica."""
        return self._group.size()

    def share(self, value: Any) -> Any:
        """Return the `value` of process 0, the leader, on all processes."""
        message, document = _encoded(value) if self.process == 0 else (_empty(SMALL), _empty(0))
        self._group.broadcast(message, 0).wait()
        length = _length(message)
        if length > SMALL - _HEADER:
            document = document if self.process == 0 else _empty(length)
            self._group.broadcast(document, 0).wait()
        return value if self.process == 0 else _decoded(message, document)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, in their order, on all processes."""
        message, document = _encoded(value)
        messages = self._gather(message)
        longest = max(map(_length, messages))
        documents = [document] * self.count
        if longest > SMALL - _HEADER:
            padded = _empty(longest)
            padded[: len(document)] = document
            documents = self._gather(padded)
        return [_decoded(*each) for each in zip(messages, documents, strict=True)]

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        self._group.allgather([tensors], [tensor]).wait()
        return tensors


def _encoded(value: Any) -> tuple[Tensor, Tensor]:
    """Return the length of a document and its beginning, and the whole document."""
    document = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    message = torch.zeros(SMALL, dtype=torch.uint8)
    message[:_HEADER] = torch.tensor([len(document)]).view(torch.uint8)
    if len(document) <= SMALL - _HEADER:
        message[_HEADER : _HEADER + len(document)] = document
    return message, document


def _decoded(message: Tensor, document: Tensor) -> Any:
    length = _length(message)
    found = message[_HEADER : _HEADER + length] if length <= SMALL - _HEADER else document[:length]
    return json.loads(found.numpy().tobytes())


def _length(message: Tensor) -> int:
    return int(message[:_HEADER].clone().view(torch.int64))


def _empty(length: int) -> Tensor:
    return torch.empty(length, dtype=torch.uint8)
