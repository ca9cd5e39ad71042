"""How the processes of a replica write and read a checkpoint together, each its own file.

All of them make the same calls. What one of them decides for all, or cannot do, all of them learn, so that
they repeat it, or raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from adascale_storage import (
    MissingFileError,
    NameTakenError,
    StorageError,
    StorageFullError,
    UnusableStorageError,
    WriteCancelledError,
)
from adascale_worker.errors import (
    CheckpointError,
    StorageUnavailableError,
    UnusableCheckpointError,
    WorkerError,
)
from adascale_worker.membership.replica_processes import ReplicaMessages, attempt, shared_error

T = TypeVar("T")


class SupersededError(CheckpointError):
    """A successor of this trainer has saved."""


class DamagedError(Exception):
    """A checkpoint differs from what was saved."""


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
    """The processes of a replica, of which each has a part of the state."""

    def __init__(self, messages: ReplicaMessages | None = None) -> None:
        self._messages = messages
        self.process = 0 if messages is None else messages.process
        self.count = 1 if messages is None else messages.count

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
        if self._messages is None:
            return [action()]
        own, error = attempt(action, _KINDS)
        outcomes = self._messages.gather(own)
        failures = [outcome["error"] for outcome in outcomes if "error" in outcome]
        if failures:
            first = min(failures, key=lambda failure: _NAMES.index(failure[0] or CheckpointError.__name__))
            raise shared_error(first, _KINDS, CheckpointError) from error
        return [outcome["result"] for outcome in outcomes]


_NAMES: Final = [kind.__name__ for kind in _KINDS]
