"""The request to save and exit, by signals to this process."""

import os
import pty
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adascale_worker.process.shutdown_request import ShutdownRequest
from support.training import FIXED, MakeTrainer, network, sgd

NUMBER = signal.SIGUSR1
"""A signal that nothing else uses here."""


class Process:
    """This process: a request, the time, and the signals that the program's own handler has got."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handled: list[int] = []
        self.request = ShutdownRequest(lambda: self.now)

    def handle(self, number: int, _frame: object) -> None:
        """The handler of the program."""
        self.handled.append(number)

    def signal_at(self, time: float) -> None:
        self.now = time
        signal.raise_signal(NUMBER)


@pytest.fixture
def process() -> Iterator[Process]:
    process = Process()
    original = signal.signal(NUMBER, process.handle)
    yield process
    process.request.uninstall()
    signal.signal(NUMBER, original)


def test_a_signal_counts_as_the_second_one_from_one_second_after_the_first(process: Process) -> None:
    """A terminal, a launcher and `timeout` may each send it."""
    process.request.install(NUMBER)
    for time in (5.0, 5.0, 5.9):
        process.signal_at(time)
        assert (process.request.received, process.handled) == (NUMBER, [])
    process.signal_at(6.0)
    assert process.handled == [NUMBER]
    process.signal_at(6.1)
    assert process.handled == [NUMBER] * 2, "the handler is in its place again"


def test_a_second_ctrl_c_interrupts_also_if_a_shell_has_started_the_process_in_the_background(
    process: Process,
) -> None:
    original = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.request.install(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        process.now = 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, original)


def test_a_program_that_trains_in_a_thread_is_told_that_no_signal_saves_it(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer, model = make_trainer(**FIXED, checkpoint_dir=tmp_path), network()
    with (
        pytest.warns(RuntimeWarning, match="trains in a thread, where Python handles no signals"),
        ThreadPoolExecutor(1) as pool,
    ):
        pool.submit(trainer.program_reentry, model, sgd(model)).result()


def install_before(process: Process) -> None:
    process.request.install(NUMBER)


def install_after(process: Process) -> None:
    signal.signal(NUMBER, signal.SIG_DFL)
    process.request.install(NUMBER)
    signal.signal(NUMBER, process.handle)
    process.request.reinstall()


def install_after_in_a_chain(process: Process) -> None:
    signal.signal(NUMBER, signal.SIG_DFL)
    process.request.install(NUMBER)
    ours = signal.getsignal(NUMBER)
    assert callable(ours)

    def handle(number: int, frame: object) -> None:
        process.handle(number, frame)
        ours(number, None)

    signal.signal(NUMBER, handle)
    process.request.reinstall()


@pytest.mark.parametrize("install", [install_before, install_after, install_after_in_a_chain])
def test_the_handler_of_the_program_is_called_when_the_state_is_saved(
    process: Process, install: Callable[[Process], None]
) -> None:
    install(process)
    process.signal_at(5.0)
    assert (process.request.received, process.handled) == (NUMBER, [])
    process.now = 9.0  # Saving takes some time.
    process.request.call_program_handler()
    assert process.handled == [NUMBER]


def test_without_a_signal_no_handler_is_called(process: Process) -> None:
    process.request.install(NUMBER)
    process.request.call_program_handler()
    assert process.handled == []


def test_the_handlers_of_the_program_stay_when_those_of_the_request_are_removed(process: Process) -> None:
    process.request.install(NUMBER)
    process.request.uninstall()
    process.request.reinstall()
    assert signal.getsignal(NUMBER) == process.handle


def test_a_handler_that_a_library_puts_back_after_the_end_leaves_ctrl_c_its_effect() -> None:
    """As Lightning does, which restores at the end of a fit the handlers of its start."""
    request = ShutdownRequest()
    original = signal.getsignal(signal.SIGINT)
    try:
        request.install(signal.SIGINT)
        installed = signal.getsignal(signal.SIGINT)
        request.uninstall()
        signal.signal(signal.SIGINT, installed)
        later = ShutdownRequest()
        later.install(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        later.call_program_handler()
        assert later.received == signal.SIGINT
        later.uninstall()
        signal.signal(signal.SIGINT, installed)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, original)


def test_a_program_can_print_until_its_state_is_saved_when_its_terminal_is_closed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    master, slave = pty.openpty()
    stdout = os.dup(1)
    os.dup2(slave, 1)
    os.close(slave)
    request = ShutdownRequest()
    original = signal.getsignal(signal.SIGHUP)
    try:
        request.install(signal.SIGHUP)
        os.close(master)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(1, b"a step")
        signal.raise_signal(signal.SIGHUP)
        assert os.write(1, b"a step") == 6
        os.write(2, b"not of the terminal")
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        request.uninstall()
        signal.signal(signal.SIGHUP, original)
    assert capfd.readouterr().err == "not of the terminal"


def test_a_request_of_the_agent_calls_the_handler_for_sigterm() -> None:
    handled: list[int] = []
    original = signal.signal(signal.SIGTERM, lambda number, _: handled.append(number))
    try:
        request = ShutdownRequest()
        request.install(signal.SIGTERM)
        request.make()
        request.call_program_handler()
        assert (request.received, handled) == (signal.SIGTERM, [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, original)
