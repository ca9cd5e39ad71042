"""Prints the log of a replica, and each line that is added to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TextIO

INTERVAL = 0.2
"""Seconds between two reads of the log."""
_BLOCK = 1 << 16


def print_log(log: Path, output: TextIO, lines: int | None, follow: bool, runs: Callable[[], bool]) -> None:
    """Print a log."""
    with log.open("rb") as file:
        if lines is not None:
            file.seek(_start_of_last_lines(file, lines))
        while True:
            # Asked before reading: what a run wrote before its end is printed.
            running = follow and runs()
            while block := file.read(_BLOCK):
                output.write(block.decode(errors="replace"))
            output.flush()
            if not running:
                return
            time.sleep(INTERVAL)


def _start_of_last_lines(file: BinaryIO, lines: int) -> int:
    """Return the position at which the last `lines` lines of a file start."""
    end = position = file.seek(0, os.SEEK_END)
    if lines == 0:
        return end
    text = b""
    # The line break at the end of the last line does not start another line.
    while position > 0 and text[:-1].count(b"\n") < lines:
        start = max(position - _BLOCK, 0)
        file.seek(start)
        text = file.read(position - start) + text
        position = start
    breaks = [index for index, byte in enumerate(text[:-1]) if byte == 10]
    return position if len(breaks) < lines else position + breaks[-lines] + 1
