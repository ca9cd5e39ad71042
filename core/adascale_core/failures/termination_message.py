"""Why a worker's program has failed, as the termination message of its container.

The agent writes it to the file that Kubernetes reads it from; the operator reads it from the pod's status.
It is plain text for `kubectl describe`: the first line names the generation and the exit code, the last
lines of the program's output follow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from adascale_core.failures.exit_codes import signal_name

LIMIT = 4096
"""Bytes of a termination message that Kubernetes keeps."""

_FIRST_LINE = re.compile(
    r"(?:generation (?P<generation>[1-9][0-9]{0,9})|before any generation)"
    r": exit code (?P<code>[0-9]{1,3})(?: \(SIG[A-Z0-9]+\))?"
)


@dataclass(frozen=True)
class TerminationMessage:
    """The message of an agent that exits because its program has failed."""

    generation: int  # the last generation that its program has run in; 0 if none
    exit_code: int  # exit code of the agent: that of the program, or 128+n for signal n
    log: str = ""  # the last lines of the program's output, or an error message

    def to_text(self, limit: int = LIMIT) -> str:
        """Return the message as text of at most `limit` bytes in UTF-8. A long log loses its first lines."""
        first = self._first_line
        log = _end_of(self.log, limit - len(first) - 1)
        return f"{first}\n{log}" if log else first

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the message that `to_text` has written; None for any other text."""
        first, _, log = text.partition("\n")
        match = _FIRST_LINE.fullmatch(first)
        if match is None:
            return None
        return cls(int(match["generation"] or 0), int(match["code"]), log)

    @property
    def _first_line(self) -> str:
        when = f"generation {self.generation}" if self.generation > 0 else "before any generation"
        name = signal_name(self.exit_code)
        return f"{when}: exit code {self.exit_code}" + (f" ({name})" if name else "")


def _end_of(text: str, limit: int) -> str:
    """Return the last whole lines of `text` that fit in `limit` bytes; the end of a single longer line."""
    # Unpaired surrogates cannot be encoded in UTF-8, and would make the whole message invalid.
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    if limit <= 0:
        return ""
    kept = data[-limit:]
    is_whole = data[-limit - 1 : -limit] == b"\n"
    lines = kept if is_whole else kept.partition(b"\n")[2]
    # The cut may have left the end of a multi-byte character at the beginning.
    return (lines or kept).decode(errors="ignore")
