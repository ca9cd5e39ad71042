"""The ways in which a training program comes to an end, each with the exit code that tells its agent why."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn

from adascale_core.errors import AdaScaleError
from adascale_core.exit_codes import EXIT_PEER_LOST
from adascale_worker.replicate import is_lost_peer


class LeaveSignal:
    """Notes the first signal to leave; a second one acts as if nobody had listened.

    Args:
        numbers: the signals to listen for. Only the main thread may do so; elsewhere nothing is changed.
    """

    def __init__(self, *numbers: int) -> None:
        self.received: int | None = None
        """The signal that was received, if one was."""
        self._numbers = numbers if threading.current_thread() is threading.main_thread() else ()
        for number in self._numbers:
            signal.signal(number, self._note)

    def close(self) -> None:
        """Listen no longer: signals act as if nobody ever had."""
        for number in self._numbers:
            _act_as_ever(number)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = number
        _act_as_ever(number)


def _act_as_ever(number: int) -> None:
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    signal.signal(number, default)


class QuickExit:
    """Ends the program without taking the interpreter apart, which with torch in it takes seconds.

    The program's own `finally` blocks and exit functions run as ever; make this before they are registered.
    """

    def __init__(self) -> None:
        self._code: int | None = None
        atexit.register(self._end)

    def leave(self, code: int) -> NoReturn:
        """End the program with `code`."""
        self._code = code
        sys.exit(code)

    def explain_uncaught_errors(self) -> None:
        """Print an `AdaScaleError` that nobody catches as its message, and leave with its exit code."""
        before = sys.excepthook

        def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not isinstance(error, AdaScaleError):
                before(kind, error, trace)
                return
            print(f"adascale: {error}", file=sys.stderr)
            # An uncaught error ends the interpreter with 1, but this one has a code of its own.
            self._code = error.exit_code

        sys.excepthook = explain

    def _end(self) -> None:
        if self._code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code)


def leave_with_lost_peers(generation: int) -> None:
    """Leave with the code for a lost peer when that is what an uncaught error says."""
    before = sys.excepthook

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not is_lost_peer(error):
            before(kind, error, trace)
            return
        print(f"adascale: a peer of generation {generation} is gone; leaving for the next", file=sys.stderr)
        # No exit functions: with a peer gone, what they would wait for may never come.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_PEER_LOST)

    sys.excepthook = leave
