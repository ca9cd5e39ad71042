"""The benchmark of the frameworks: what it computes from times, and what it refuses."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import framework_overhead


@pytest.mark.parametrize(
    ("count", "low", "high"),
    [(6, 0, 5), (10, 1, 8), (30, 9, 20)],  # Conover, Practical Nonparametric Statistics
)
def test_the_interval_of_a_median_is_between_order_statistics(count: int, low: int, high: int) -> None:
    values = [float(number) for number in range(count)]
    random.Random(0).shuffle(values)
    assert framework_overhead.median_interval(values) == (low, (count - 1) / 2, high)


def test_an_unknown_framework_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["framework_overhead.py", "keras"])
    with pytest.raises(SystemExit):
        framework_overhead.main()
    assert (
        "unknown frameworks keras: choose from huggingface, accelerate, lightning" in capsys.readouterr().err
    )
