"""The signals that request a run to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from adascale_core.names import SIGNAL_REPEAT_INTERVAL

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP while entered; restores the previous handlers on exit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.first: signal.Signals | None = None
        """The first signal received; None before that."""
        self._clock = clock
        self._first_at = 0.0
        self._kill_requested = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def stop_requested(self) -> bool:
        """Whether a signal was received: the run is to save and stop."""
        return self.first is not None

    @property
    def kill_requested(self) -> bool:
        """Whether a second signal was received: the run is to stop without saving.

        Not one within `SIGNAL_REPEAT_INTERVAL` after the first, and not SIGHUP: a terminal may be closed
        while the run saves.
        """
        return self._kill_requested

    @property
    def exit_code(self) -> int:
        """The exit code of a process that stops because of the first signal, as a shell reports it."""
        return 128 + (self.first or signal.SIGTERM)

    def __enter__(self) -> Self:
        for number in _HANDLED:
            # An ignored signal, such as SIGHUP under nohup, stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _record(self, number: int, _frame: FrameType | None) -> None:
        now = self._clock()
        if self.first is None:
            self.first, self._first_at = signal.Signals(number), now
        elif number != signal.SIGHUP and now - self._first_at >= SIGNAL_REPEAT_INTERVAL:
            self._kill_requested = True
