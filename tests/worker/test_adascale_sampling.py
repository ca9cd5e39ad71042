"""Which steps are measured."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from adascale_worker.adascale import AdaScale
from adascale_worker.scaling.statistics.steps import (
    FIRST_STEPS,
    MAX_INTERVAL,
    SAMPLES_PER_WINDOW,
    sampling_interval,
)
from worker.adascale_problem import backward, batches, network, squared_error


def test_all_of_the_first_steps_are_measured() -> None:
    assert all(sampling_interval(step, 0.999) == 1 for step in range(FIRST_STEPS))


@pytest.mark.parametrize(("scale", "interval"), [(1, 16), (4, 15), (16, 3), (32, 1), (2000, 1)])
def test_the_interval_follows_the_window(scale: int, interval: int) -> None:
    smoothing = max(1 - scale / 1000, 0.0)
    assert sampling_interval(FIRST_STEPS, smoothing) == interval


@given(st.floats(0, 0.9999))
def test_the_window_has_enough_measured_steps(smoothing: float) -> None:
    interval = sampling_interval(FIRST_STEPS, smoothing)
    assert 1 <= interval <= MAX_INTERVAL
    assert interval == 1 or interval * SAMPLES_PER_WINDOW <= 1 / (1 - smoothing) + 1e-5


def test_hooks_of_others_stay_and_ours_are_removed() -> None:
    model = network()
    shapes = []

    def hook(gradient: Tensor) -> None:
        shapes.append(gradient.shape)

    model.first.weight.register_hook(hook)
    optimizer = AdaScale(
        torch.optim.SGD(model.parameters(), lr=0.05), num_gradients_to_accumulate=2, sample_every=2
    )
    for number in range(4):
        for batch in batches(2, seed=number):
            backward(squared_error(model, batch) / 2)
        optimizer.step()
        if number % 2 == 0:
            assert model.second.weight._backward_hooks is None
            assert len(model.first.weight._backward_hooks or ()) == 1
    assert len(shapes) == 8
