"""Warnings that point at the line of the user's program, not at a line of this package or of torch."""

import inspect
import warnings

from adascale_worker.process.user_code import is_own


def warn_user(message: str) -> None:
    """Issue a RuntimeWarning at the innermost frame that is neither of this package nor of torch."""
    level = 2  # of the caller of this function
    here = inspect.currentframe()
    frame = None if here is None else here.f_back
    while frame is not None and is_own(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


class OneTimeWarnings:
    """Warnings that are issued once for each subject."""

    def __init__(self) -> None:
        self._issued: set[str] = set()

    def warn(self, subject: str, message: str) -> None:
        """Issue `message` unless there was a warning of the same subject."""
        if subject not in self._issued:
            self._issued.add(subject)
            warn_user(message)
