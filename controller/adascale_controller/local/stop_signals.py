"""The signals that request a run to stop."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Records SIGINT, SIGTERM and SIGHUP while entered; restores the previous handlers on exit."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """The first signal received; None before that."""
        self._count = 0
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def stop_requested(self) -> bool:
        """Whether a signal was received: the run is to save and stop."""
        return self._count > 0

    @property
    def kill_requested(self) -> bool:
        """Whether a second signal was received: the run is to stop without saving."""
        return self._count > 1

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
        self.first = self.first or signal.Signals(number)
        self._count += 1
