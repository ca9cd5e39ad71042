"""Tensors for learning rates."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from adascale import AdaScale
from worker.adascale_problem import batches, network, squared_error


def optimizer_of(model: torch.nn.Module, *, micro: int, max_gain: float | None = None) -> AdaScale:
    parameters = list(model.parameters())
    cut = len(parameters) // 2
    # Only the fused kernel uses a tensor lr as it is; the others read it as a number.
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:]}]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    return AdaScale(sgd, num_gradients_to_accumulate=micro, scale=4.0, max_gain=max_gain)


def set_numbers(optimizer: AdaScale) -> None:
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])


def set_tensors(optimizer: AdaScale) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)


@pytest.mark.parametrize(
    ("micro", "change", "max_gain"), [(1, set_numbers, None), (2, set_numbers, 3.0), (2, set_tensors, None)]
)
def test_tensors_and_numbers_for_lr_give_the_same_steps(
    *, micro: int, change: Callable[[AdaScale], None], max_gain: float | None
) -> None:
    first, second = network(), network()
    numbers = optimizer_of(first, micro=micro, max_gain=max_gain)
    tensors = optimizer_of(second, micro=micro, max_gain=max_gain)
    set_tensors(tensors)
    data = iter(batches(12 * micro))
    for number in range(12):
        if number == 6:
            change(tensors)
            change(numbers)
        step = [next(data) for _ in range(micro)]
        for model, optimizer in ((first, numbers), (second, tensors)):
            for batch in step:
                (squared_error(model, batch) / micro).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert tensors.gain() == pytest.approx(numbers.gain(), rel=1e-12)
        for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert numbers.gain() > 1.0
    rates = [group["lr"] for group in tensors.param_groups]
    assert [float(rate) for rate in rates] == [0.1, 0.1]
    assert all(isinstance(rate, torch.Tensor) for rate in rates) == (change is set_tensors)
