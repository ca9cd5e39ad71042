"""How the process ends: its exit code, what it prints of an uncaught error, and the end itself.

Constructing `ProcessExit` changes nothing in the process, except that it registers an exit function. What
`install` replaces calls what was there before it, and `uninstall` restores it.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from adascale_core.errors import AdaScaleError
from adascale_worker.errors import exit_code
from adascale_worker.process.user_code import raising_line


def end_process(code: int, message: str = "") -> NoReturn:
    """End the process at once, in any thread, and the processes of `multiprocessing` that it has started."""
    if message:
        sys.stderr.write(f"adascale: {message}\n")
    if "multiprocessing" in sys.modules:  # An agent starts without it, fast.
        from multiprocessing import active_children

        for child in active_children():
            child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


EndAfter = Callable[[BaseException, TracebackType | None], int | None]
"""Prints what an error means that another process continues after, and returns the exit code for it; None for
any other error."""


class ProcessExit:
    """Ends the process without finalizing the interpreter, which takes seconds once torch is imported.

    The program's `finally` blocks run, and the exit functions that it registers after this object is made.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code. None lets the interpreter finalize and exit with its own code."""
        self._of_program: object = None
        self._end_after: EndAfter | None = None
        self._announce_failure: Callable[[], None] | None = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._calls: list[Callable[[], None]] = []
        self._pid = os.getpid()
        atexit.register(self._end)

    def exit(self, code: int) -> NoReturn:
        """End the program with exit code `code`."""
        self.code = code
        sys.exit(code)

    def before(self, function: Callable[[], object]) -> None:
        """Call `function` before the process ends; not in processes that it forks."""

        def call() -> None:
            if os.getpid() == self._pid:
                function()

        atexit.register(call)
        self._calls.append(call)

    def forget(self) -> None:
        """Call none of the functions before the process ends."""
        for call in self._calls:
            atexit.unregister(call)
        self._calls.clear()

    def _end(self) -> None:
        if self.code is not None and os.getpid() == self._pid:
            end_process(self.code)

    # -- the end of the program ---------------------------------------------------------------------------

    def install(
        self,
        end_after: EndAfter | None = None,
        announce_failure: Callable[[], None] | None = None,  # before the program ends by an error of its own
    ) -> None:
        """Handle uncaught errors; of a training, record the argument of `sys.exit`, `exit` and `quit` too."""
        if not self._replaced:
            self._replace(sys, "excepthook", functools.partial(self._handle, sys.excepthook))
        if end_after is not None and self._end_after is None:
            self._end_after, self._announce_failure = end_after, announce_failure
            # Exit functions do not get the exit code. That of a program that raises SystemExit itself is
            # known to its agent only.
            self._replace(sys, "exit", self._exit)
            for quitter in {type(getattr(builtins, name, None)) for name in ("exit", "quit")} - {type(None)}:
                self._replace(quitter, "__call__", lambda _quitter, code=None: self._exit(code))

    def uninstall(self) -> None:
        """Restore what was replaced, unless the program has replaced it since."""
        for owner, name, original, replacement in self._replaced:
            if getattr(owner, name) == replacement:
                setattr(owner, name, original)
        self._replaced.clear()
        self._end_after = self._announce_failure = None

    @property
    def failed(self) -> bool:
        """Whether the program has ended by an uncaught error, or an exit code other than 0."""
        return getattr(sys, "last_value", None) is not None or self._of_program not in (None, 0)

    @property
    def status(self) -> int:
        """The exit code with which the process ends."""
        if self.code is not None or not self.failed:
            return self.code or 0
        return self._of_program if type(self._of_program) is int and self._of_program else 1

    def _replace(self, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> None:
            replacement(*args, **kwargs)

        self._replaced.append((owner, name, original, call))
        setattr(owner, name, call)

    def _exit(self, code: object = None, /) -> NoReturn:
        self._of_program = code
        # Before exit functions run, which can take long.
        if code not in (None, 0) and self._announce_failure is not None and os.getpid() == self._pid:
            self._announce_failure()
        raise SystemExit(code)

    def _handle(
        self,
        previous: Callable[..., Any],
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        """Give an error of AdaScale, and one that the loss of a peer or a lack of memory has caused, its exit
        code, and a message without a traceback."""
        if self._end_after is not None and (code := self._end_after(error, trace)) is not None:
            self.code = code
            return
        if isinstance(error, AdaScaleError):
            line = raising_line(trace)
            # In one call, so that no other thread writes into the line.
            sys.stderr.write(f"adascale: {error}{f' ({line})' if line else ''}\n")
            self.code = exit_code(error)
            return
        if self._announce_failure is not None:
            self._announce_failure()
        previous(kind, error, trace)
