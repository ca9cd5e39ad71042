"""Which line of the program calls this package, for messages."""

from __future__ import annotations

import sys
from types import FrameType, TracebackType

OWN_MODULES = (
    "adascale",
    "adascale_worker",
    "adascale_frameworks",
    "adascale_core",
    "adascale_client",
    "torch",
)


def calling_line() -> str:
    """Return the innermost line of the program that is executed, as in `train.py, line 41`.

    Empty if the program calls nothing, as at its end.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and is_own(frame):
        frame = frame.f_back
    return "" if frame is None else location(frame)


def raising_line(trace: TracebackType | None) -> str:
    """Return the innermost line of the program that a traceback contains; empty if there is none."""
    line = ""
    while trace is not None:
        if not is_own(trace.tb_frame):
            line = f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return line


def location(frame: FrameType) -> str:
    """Return the line that a frame executes, as in `train.py, line 41`."""
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


def is_own(frame: FrameType) -> bool:
    """Whether a frame executes code of this package, or of torch."""
    name: str = frame.f_globals.get("__name__", "")
    return name.split(".")[0] in OWN_MODULES
