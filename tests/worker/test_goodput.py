"""The smoothed goodput of a job."""

from __future__ import annotations

import pytest

from adascale_worker.reporting.progress import WINDOW, Goodput


def test_steady_progress_has_its_goodput_from_the_first_measurement() -> None:
    goodput = Goodput()
    assert goodput.update(1, 2.0, 0.0) is None
    for step in range(10, 100, 10):
        assert goodput.update(step, 2.0 * step, 0.5) == pytest.approx(2.0 * step / step / 0.5, rel=0.2)
    assert goodput.update(1000, 2000.0, 0.5) == pytest.approx(4.0)


def test_a_change_of_speed_changes_the_goodput_gradually() -> None:
    goodput = Goodput()
    goodput.update(0, 0.0, 0.0)
    goodput.update(1000, 1000.0, 1.0)
    step, values = 1000, []
    for _ in range(600):
        step += 1
        values.append(goodput.update(step, 1000.0 + 10 * (step - 1000), 1.0) or 0.0)
    assert values[0] == pytest.approx(1 + 9 / WINDOW, rel=0.02)
    assert values == sorted(values)
    assert values[-1] == pytest.approx(10.0, rel=0.01)


def test_repeated_and_unmeasured_steps_do_not_count() -> None:
    goodput = Goodput()
    goodput.update(10, 10.0, 0.0)
    assert goodput.update(20, 20.0, 0.5) == pytest.approx(2.0)
    # Steps 12 to 20 were lost with a replica.
    assert goodput.update(12, 12.0, 0.5) == pytest.approx(2.0)
    assert goodput.update(22, 22.0, 0.5) == pytest.approx(2.0)
    assert goodput.update(30, 30.0, 0.0) == pytest.approx(2.0)
