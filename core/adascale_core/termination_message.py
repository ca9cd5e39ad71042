"""Why a worker's program has failed, as the termination message of its pod.

The agent writes it where Kubernetes picks it up; the operator reads it from the pod's status. It is text
that people understand in `kubectl describe`: a first line that says in which generation the program failed
and how, then the last lines of its output.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from adascale_core.exit_codes import signal_name

LIMIT = 4096
"""Bytes that Kubernetes keeps of a termination message."""

_FIRST_LINE = re.compile(
    r"(?:generation (?P<generation>[1-9][0-9]{0,9})|before any generation)"
    r": exit code (?P<code>[0-9]{1,3})(?: \(SIG[A-Z0-9]+\))?"
)


@dataclass(frozen=True)
class TerminationMessage:
    """What an agent says when it leaves because its program has failed.

    Args:
        generation: the last generation that its program has run in; 0: none.
        exit_code: of the agent: the program's own, 128+n where signal n has ended it.
        log: the last lines that the program wrote, or what was wrong.
    """

    generation: int
    exit_code: int
    log: str = ""

    def to_text(self, limit: int = LIMIT) -> str:
        """The message: in UTF-8 at most `limit` bytes, for which the first lines of the log are left out."""
        first = self._first_line
        log = _end_of(self.log, limit - len(first) - 1)
        return f"{first}\n{log}" if log else first

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What `to_text` made the text from; none where it is anything else."""
        first, _, log = text.partition("\n")
        told = _FIRST_LINE.fullmatch(first)
        if told is None:
            return None
        return cls(int(told["generation"] or 0), int(told["code"]), log)

    @property
    def _first_line(self) -> str:
        when = f"generation {self.generation}" if self.generation > 0 else "before any generation"
        name = signal_name(self.exit_code)
        return f"{when}: exit code {self.exit_code}" + (f" ({name})" if name else "")


def _end_of(text: str, limit: int) -> str:
    """The last whole lines of `text` that fit in `limit` bytes; of a single line that does not, its end."""
    # What has no place in UTF-8, halves of surrogate pairs, would make the whole message invalid.
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return data.decode()
    if limit <= 0:
        return ""
    kept = data[-limit:]
    is_whole = data[-limit - 1 : -limit] == b"\n"
    lines = kept if is_whole else kept.partition(b"\n")[2]
    # A character may have been cut in two; its end is left over, at the beginning.
    return (lines or kept).decode(errors="ignore")
