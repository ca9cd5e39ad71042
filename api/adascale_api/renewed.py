"""What is read from files that may be renewed while the service runs."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from adascale_core.errors import AdaScaleError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Renewed(Generic[T]):
    """What `load` returns for files: of now, or of when they could last be used."""

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        self._files = files
        self._load = load
        self._tried = self._version()
        """The version of the files that was loaded last, or could not be used, which is logged once."""
        self._value = load()

    @property
    def current(self) -> T:
        """The value of the files."""
        version = self._version()
        if version != self._tried:
            self._tried = version
            try:
                self._value = self._load()
            except AdaScaleError as error:
                logger.warning("%s; what was read before stays in use", error)
        return self._value

    def _version(self) -> object:
        # `stat` on a local file does not block, so the event loop may call it.
        try:
            found = [file.stat() for file in self._files]
        except OSError as error:
            return str(error)
        return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]
