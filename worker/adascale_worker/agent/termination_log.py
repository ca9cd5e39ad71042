"""Where an agent says why it leaves: the file that Kubernetes makes a pod's termination message from."""

from __future__ import annotations

import sys
from pathlib import Path

from adascale_core.termination_message import TerminationMessage


class TerminationLog:
    """The termination log of a container.

    Args:
        path: the file; none: nobody wants to know.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._said = False

    def say(self, words: TerminationMessage) -> None:
        """Write why the agent leaves. The first words count: what is said later only follows from it."""
        if self._path is None or self._said:
            return
        self._said = True
        try:
            # In place: it is a mount, which nothing can be renamed over.
            self._path.write_bytes(words.to_text().encode())
        except OSError as error:
            print(
                f"adascale-agent: {self._path} cannot be written, so the pod's status won't say why this "
                f"agent leaves: {error.strerror}",
                file=sys.stderr,
                flush=True,
            )
