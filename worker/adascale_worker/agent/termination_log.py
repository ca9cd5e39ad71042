"""The file from which Kubernetes reads the termination message of a container."""

from __future__ import annotations

import sys
from pathlib import Path

from adascale_core.failures import TerminationMessage


class TerminationLog:
    """The termination log of a container."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._written = False

    def write(self, message: TerminationMessage) -> None:
        """Write why the agent exits. Only the first message is kept: later errors are its consequences."""
        if self._path is None or self._written:
            return
        self._written = True
        try:
            # In place: the file is a mount point, onto which no file can be renamed.
            self._path.write_bytes(message.to_text().encode())
        except OSError as error:
            print(
                f"adascale-agent: cannot write the termination message to {self._path}: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
