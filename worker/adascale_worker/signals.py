"""SIGTERM and Ctrl-C: asked to leave, a trainer does so after a step, with its state saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class LeaveSignal:
    """Notes the first signal to leave; a second one acts as if nobody had listened.

    Args:
        numbers: the signals to listen for. Only the main thread may do so; elsewhere nothing is changed.
    """

    def __init__(self, *numbers: int) -> None:
        self.received: int | None = None
        """The signal that was received, if one was."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                signal.signal(number, self._note)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
