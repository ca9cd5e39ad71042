"""The request to save and exit, by a signal or by the agent."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from adascale_core.names import SIGNAL_REPEAT_INTERVAL

REINSTALL_INTERVAL = 0.25
"""Seconds between two times at which handlers that the program has installed are looked for."""


class ShutdownRequest:
    """Records a request to save and exit.

    Handlers of the program for the same signals are called when the state is saved, because one may exit. A
    second signal, `SIGNAL_REPEAT_INTERVAL` later, and every signal in a forked process have their own effect.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.received: int | None = None
        """Number of the signal that was received first, SIGTERM for a request of the agent. None before."""
        self._reinstall_at = float("-inf")
        self._received_at: dict[int, float] = {}
        self._handlers: dict[int, Any] = {}
        """Signals that this object handles -> their other handlers."""

    @property
    def is_made(self) -> bool:
        """Whether this process was requested to save and exit."""
        return self.received is not None

    def make(self) -> None:
        """Request to save and exit, as the agent does. Safe in any thread."""
        if self.received is None:
            self.received = signal.SIGTERM

    def install(self, *numbers: int) -> None:
        """Handle the signals `numbers`. Does nothing outside the main thread, as Python requires."""
        if threading.current_thread() is threading.main_thread():
            os.register_at_fork(after_in_child=self._uninstall_in_child)
            for number in numbers:
                self._handlers[number] = self._replace(number)

    def reinstall(self) -> None:
        """Handle again the signals for which the program has installed its own handlers since.

        For frequent calls: does nothing within `REINSTALL_INTERVAL` after the last time.
        """
        now = self._clock()
        if now < self._reinstall_at or threading.current_thread() is not threading.main_thread():
            return
        self._reinstall_at = now + REINSTALL_INTERVAL
        for number in self._handlers:
            # Also if Python knows of no other handler: a library may have installed one by sigaction(2).
            other = self._replace(number)
            if other != self._receive:
                self._handlers[number] = other

    def _replace(self, number: int) -> Any:
        """Handle a signal, and return its other handler: the default in place of a request that has ended."""
        other = signal.signal(number, self._receive)
        owner = getattr(other, "__self__", None)
        has_ended = isinstance(owner, ShutdownRequest) and number not in owner._handlers
        return signal.SIG_DFL if has_ended else other

    def uninstall(self) -> None:
        """Restore the other handlers, except for signals whose handlers the program has replaced since."""
        for number in list(self._handlers):
            self._restore(number)

    def call_program_handler(self) -> None:
        """Call the program's own handler for the signal that was received, if there is one."""
        handler = self._handlers.get(self.received or 0)
        if callable(handler) and handler is not signal.default_int_handler:
            # The handler may itself call `_receive`, which it has replaced.
            self.uninstall()
            handler(self.received, None)

    def _uninstall_in_child(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self.uninstall()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number not in self._handlers:
            # The handler of the program calls this one, which it has replaced, or a library has put it back.
            if signal.getsignal(number) == self._receive:
                self._restore(number)
                signal.raise_signal(number)
            return
        now = self._clock()
        if self.received is None:
            self.received = number
        if number == signal.SIGHUP:
            _discard_output_to_closed_terminal()
        if now - self._received_at.setdefault(number, now) < SIGNAL_REPEAT_INTERVAL:
            return
        handler = self._restore(number)
        if callable(handler):
            handler(number, frame)
        else:
            signal.raise_signal(number)

    def _restore(self, number: int) -> Any:
        """Restore the other handler of a signal, and return it."""
        other = self._handlers.get(number)
        if not callable(other):
            # A shell starts background processes with SIGINT ignored; a second SIGINT must end this process.
            other = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        if signal.getsignal(number) == self._receive:
            signal.signal(number, other)
        self._handlers.pop(number, None)
        return other


def _discard_output_to_closed_terminal() -> None:
    """Discard what the program prints from now on, which would fail before the state is saved."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError as error:
            if error.errno == errno.EIO:
                with open(os.devnull, "wb") as nowhere:  # noqa: PTH123
                    os.dup2(nowhere.fileno(), descriptor)
