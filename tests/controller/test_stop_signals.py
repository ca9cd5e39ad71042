"""The signals that request a run to stop, sent to this process."""

import signal
from collections.abc import Iterator

import pytest

from adascale_controller.local.processes import StopSignals

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def previous() -> Iterator[None]:
    """Handlers that a test does not call."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("previous")
@pytest.mark.parametrize(
    ("received", "kills"),
    [
        ([(5.0, signal.SIGINT)], False),
        # `timeout` signals its child and then the group, which is the same process.
        ([(5.0, signal.SIGINT), (5.0, signal.SIGINT), (5.9, signal.SIGINT)], False),
        ([(5.0, signal.SIGINT), (6.0, signal.SIGINT)], True),
        ([(5.0, signal.SIGTERM), (5.1, signal.SIGTERM), (6.0, signal.SIGINT)], True),
        # The terminal is closed while the run saves.
        ([(5.0, signal.SIGINT), (9.0, signal.SIGHUP)], False),
        ([(5.0, signal.SIGHUP), (5.0, signal.SIGHUP), (9.0, signal.SIGTERM)], True),
    ],
)
def test_a_signal_stops_a_run_without_saving_from_one_second_after_the_first(
    received: list[tuple[float, signal.Signals]], kills: bool
) -> None:
    times = iter([time for time, _ in received])
    with StopSignals(lambda: next(times)) as signals:
        assert not signals.stop_requested
        for _, number in received:
            signal.raise_signal(number)
        assert (signals.first, signals.stop_requested) == (received[0][1], True)
        assert signals.kill_requested == kills
        assert signals.exit_code == 128 + received[0][1]
    assert all(signal.getsignal(number) == signal.SIG_DFL for number in HANDLED)
