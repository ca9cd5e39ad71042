"""The signals by which a run is asked to leave."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any, Self

_ASKS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Notes signals instead of dying of them, while it is entered; the old handlers come back after."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    @property
    def asked(self) -> bool:
        """Whether the run is to save and leave."""
        return self._count > 0

    @property
    def hurry(self) -> bool:
        """Whether it was asked again, and so is to leave at once."""
        return self._count > 1

    def __enter__(self) -> Self:
        for number in _ASKS:
            # Where it is ignored, as with nohup, it stays so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        self._count += 1
