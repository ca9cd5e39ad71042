"""Which line of the program calls this package, for messages and warnings."""

from __future__ import annotations

import inspect
import sys
import warnings
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


def warn_user(message: str) -> None:
    """Issue a RuntimeWarning at the innermost frame that is neither of this package nor of torch."""
    level = 2  # of the caller of this function
    here = inspect.currentframe()
    frame = None if here is None else here.f_back
    while frame is not None and is_own(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def warn_once(warned: set[str], subject: str, message: str) -> None:
    """Issue `message`, unless the subject is one of those that the user was `warned` of. Adds it to them."""
    if subject not in warned:
        warned.add(subject)
        warn_user(message)
