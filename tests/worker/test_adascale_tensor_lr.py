"""With tensors for learning rates, a step reads no number back to the host.

The tensors in these tests have shapes and no values, so that reading a value raises an error. On a GPU it
would be a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from adascale_worker import AdaScale
from worker.adascale_problem import batches, network, squared_error


def optimizer_of(model: torch.nn.Module, *, micro: int, tensor: bool, groups: int = 1) -> AdaScale:
    parameters = list(model.parameters())
    cut = len(parameters) // groups
    # Only the fused kernel uses a tensor lr as it is; the others read it as a number.
    sgd = torch.optim.SGD(
        [{"params": parameters[i * cut : (i + 1) * cut]} for i in range(groups)],
        lr=0.1,
        momentum=0.9,
        fused=True,
    )
    if tensor:
        for group in sgd.param_groups:
            group["lr"] = torch.tensor(0.1)
    return AdaScale(sgd, num_gradients_to_accumulate=micro, scale=4.0)


def train(optimizer: AdaScale, model: torch.nn.Module, *, micro: int, steps: int) -> torch.Tensor:
    progress = torch.zeros((), dtype=torch.float64)
    for _ in range(steps):
        for _ in range(micro):
            loss: torch.Tensor = model(torch.randn(3, 4)).square().mean() / micro
            loss.backward()
        progress = progress + optimizer.gain_tensor()
        optimizer.step()
        optimizer.zero_grad()
    return progress


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_reads_no_number(*, micro: int, groups: int) -> None:
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = optimizer_of(model, micro=micro, tensor=True, groups=groups)
        progress = train(optimizer, model, micro=micro, steps=3)
        assert progress.shape == ()
        with pytest.raises(DataDependentOutputException):
            optimizer.gain()


def test_the_gain_is_on_the_device_of_the_learning_rates_before_the_first_step() -> None:
    device = torch.device("meta")
    sgd = torch.optim.SGD(torch.nn.Linear(4, 2, device=device).parameters(), lr=0.1)
    sgd.param_groups[0]["lr"] = torch.full((), 0.1, device=device)
    assert AdaScale(sgd, scale=4.0).gain_tensor().device == device


def test_a_step_with_a_number_for_lr_reads_numbers() -> None:
    """So the test above detects a read."""
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = optimizer_of(model, micro=2, tensor=False)
        with pytest.raises(DataDependentOutputException):
            train(optimizer, model, micro=2, steps=1)


def set_numbers(optimizer: AdaScale) -> None:
    for group in optimizer.param_groups:
        group["lr"] = float(group["lr"])


def set_tensors(optimizer: AdaScale) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(float(group["lr"]), dtype=torch.float64)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("change", [set_numbers, set_tensors])
def test_tensors_and_numbers_for_lr_give_the_same_steps(
    *, micro: int, change: Callable[[AdaScale], None]
) -> None:
    first, second = network(), network()
    numbers = optimizer_of(first, micro=micro, tensor=False, groups=2)
    tensors = optimizer_of(second, micro=micro, tensor=False, groups=2)
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
            gain = optimizer.gain_tensor().item()
            optimizer.step()
            optimizer.zero_grad()
            assert gain == pytest.approx(optimizer.gain(), rel=1e-12)
        assert tensors.gain() == pytest.approx(numbers.gain(), rel=1e-12)
        for ours, theirs in zip(second.parameters(), first.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert numbers.gain() > 1.0
    rates = [group["lr"] for group in tensors.param_groups]
    assert [float(rate) for rate in rates] == [0.1, 0.1]
    assert all(isinstance(rate, torch.Tensor) for rate in rates) == (change is set_tensors)
