"""How a training program ends: uncaught errors, its exit code, and a fast exit.

Constructing these objects changes nothing in the process, except that `FastExit` registers an exit
function. `ElasticTrainer.program_reentry` installs the exception hook, which calls what was installed before
it, and can be uninstalled.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import multiprocessing
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from adascale_core.errors import AdaScaleError
from adascale_core.failures import EXIT_OUT_OF_MEMORY, EXIT_PEER_LOST
from adascale_worker.errors import exit_code
from adascale_worker.process.user_code import raising_line
from adascale_worker.torch_private.distributed import is_lost_peer


class ExitStatus:
    """Knows at the end of the process whether the program has failed.

    Exit functions do not get the exit code, so `sys.exit`, `exit` and `quit` are replaced by functions that
    record it. The code of a program that raises SystemExit itself is known to its agent only.
    """

    def __init__(self) -> None:
        self._code: object = None
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._announce_failure: Callable[[], None] | None = None
        self._pid = os.getpid()

    def install(self, announce_failure: Callable[[], None]) -> None:
        """Record the argument of `sys.exit`, `exit` and `quit`."""
        if self._replaced:
            return
        self._announce_failure = announce_failure
        self._replace(sys, "exit", self._exit)
        for quitter in {type(getattr(builtins, name, None)) for name in ("exit", "quit")} - {type(None)}:
            self._replace(quitter, "__call__", lambda _quitter, code=None: self._exit(code))

    def uninstall(self) -> None:
        """Restore `sys.exit`, `exit` and `quit`, unless the program has replaced them since."""
        for owner, name, original, replacement in self._replaced:
            if getattr(owner, name) == replacement:
                setattr(owner, name, original)
        self._replaced.clear()
        self._announce_failure = None

    @property
    def failed(self) -> bool:
        """Whether the process ends by an uncaught error, or an exit code other than 0."""
        return getattr(sys, "last_value", None) is not None or self._code not in (None, 0)

    @property
    def code(self) -> int:
        """The exit code of the process, if it ends without `FastExit`."""
        if not self.failed:
            return 0
        return self._code if type(self._code) is int and self._code else 1

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> None:
            replacement(*args, **kwargs)

        self._replaced.append((owner, name, original, call))
        setattr(owner, name, call)

    def _exit(self, code: object = None, /) -> NoReturn:
        self._code = code
        # Before exit functions run, which can take long.
        if code not in (None, 0) and self._announce_failure is not None and os.getpid() == self._pid:
            self._announce_failure()
        raise SystemExit(code)


class FastExit:
    """Ends the process without finalizing the interpreter, which takes seconds once torch is imported.

    The program's `finally` blocks run. So do the exit functions that it registers after this object is made.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code. None lets the interpreter finalize and exit with its own code."""
        self._pid = os.getpid()
        atexit.register(self._exit_now)

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

    def _exit_now(self) -> None:
        if self.code is not None and os.getpid() == self._pid:
            _end_process(self.code)


def _end_process(code: int) -> NoReturn:
    """End the process at once, and the processes of `multiprocessing` that it has started."""
    for child in multiprocessing.active_children():
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class FailingTraining(Protocol):
    """What an uncaught error of the program means for its training."""

    @property
    def is_restarted(self) -> bool:
        """Whether an agent starts the program again, so that another process can join the peers."""

    @property
    def knows_peers(self) -> bool:
        """Whether a lost connection means that a peer has ended, and not a wrong configuration."""

    def leave_short_of_memory(self, error: BaseException, trace: TracebackType | None) -> bool:
        """Prepare the end of the process after a lack of memory, and return whether another one continues
        with smaller batches."""

    def announce_failure(self) -> None:
        """Let the other replicas know that this one ends because of an error of its program."""


class UncaughtErrorHandler:
    """A `sys.excepthook` that gives uncaught errors an exit code and a message without a traceback.

    It does so for errors of AdaScale, of communication of the program itself after the loss of a peer, and
    for a lack of memory. Any other error goes to the previous hook, after it is announced to the replicas.
    """

    def __init__(self, fast_exit: FastExit, training: FailingTraining | None = None) -> None:
        self._fast_exit = fast_exit
        self._training = training
        self._previous: Callable[..., Any] | None = None

    def install(self) -> None:
        """Set `sys.excepthook`. Does nothing if this handler is installed."""
        if self._previous is None:
            self._previous = sys.excepthook
            sys.excepthook = self._handle

    def uninstall(self) -> None:
        """Restore the previous hook, unless the program has set its own since."""
        if self._previous is not None and sys.excepthook == self._handle:
            sys.excepthook, self._previous = self._previous, None

    def _handle(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._training is not None and self._ends_training(self._training, error, trace):
            return
        if isinstance(error, AdaScaleError):
            line = raising_line(trace)
            # In one call, so that no other thread writes into the line.
            sys.stderr.write(f"adascale: {error}{f' ({line})' if line else ''}\n")
            self._fast_exit.code = exit_code(error)
            return
        if self._training is not None:
            self._training.announce_failure()
        (self._previous or sys.__excepthook__)(kind, error, trace)

    def _ends_training(
        self, training: FailingTraining, error: BaseException, trace: TracebackType | None
    ) -> bool:
        """Print what an error means that another process continues after, and return whether it is one."""
        if training.is_restarted and is_lost_peer(error):
            print(
                "adascale: lost the connection to a peer in communication of the program itself; "
                "exiting to join the next generation",
                file=sys.stderr,
            )
            # Without exit functions, which could wait for the lost peer for ever.
            _end_process(EXIT_PEER_LOST)
        line = raising_line(trace)
        if training.knows_peers and is_lost_peer(error):
            reason = str(error).splitlines()[0]
            print(
                "adascale: lost the connection to another replica, whose output says why it has ended "
                f"({line}): {reason}",
                file=sys.stderr,
            )
            self._fast_exit.code = EXIT_PEER_LOST
            return True
        if training.leave_short_of_memory(error, trace):
            print(
                f"adascale: {type(error).__name__} was raised outside of the model ({line}), so this process "
                "ends, and another one continues with smaller batches",
                file=sys.stderr,
            )
            self._fast_exit.code = EXIT_OUT_OF_MEMORY
            return True
        return False
