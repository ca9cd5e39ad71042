"""With tensors for learning rates, a step reads no number back to the host.

The tensors in these tests have shapes and no values, so that reading a value raises an error. On a GPU it
would be a synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.overrides import TorchFunctionMode

from adascale import AdaScale
from worker.adascale_problem import batches, network, squared_error


def optimizer_of(
    model: torch.nn.Module, *, micro: int, tensor: bool, groups: int = 1, max_gain: float | None = None
) -> AdaScale:
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
    return AdaScale(sgd, num_gradients_to_accumulate=micro, scale=4.0, max_gain=max_gain)


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


@pytest.mark.parametrize(
    ("micro", "groups", "max_gain"), [(1, 1, None), (2, 1, 3.0), (1, 2, 3.0), (2, 2, None)]
)
def test_a_step_reads_no_number(*, micro: int, groups: int, max_gain: float | None) -> None:
    with FakeTensorMode():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        optimizer = optimizer_of(model, micro=micro, tensor=True, groups=groups, max_gain=max_gain)
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


@pytest.mark.parametrize(
    ("micro", "change", "max_gain"), [(1, set_numbers, None), (2, set_numbers, 3.0), (2, set_tensors, None)]
)
def test_tensors_and_numbers_for_lr_give_the_same_steps(
    *, micro: int, change: Callable[[AdaScale], None], max_gain: float | None
) -> None:
    first, second = network(), network()
    numbers = optimizer_of(first, micro=micro, tensor=False, groups=2, max_gain=max_gain)
    tensors = optimizer_of(second, micro=micro, tensor=False, groups=2, max_gain=max_gain)
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


# -- the gain as a number ---------------------------------------------------------------------------------


class Reads(TorchFunctionMode):
    """Counts the reads of tensors to the host."""

    count: int = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.__name__ in ("tolist", "item", "__float__", "__bool__", "cpu")
        return func(*args, **(kwargs or {}))


def reads_of(function: Callable[[], object]) -> int:
    reads = Reads()
    with reads:
        function()
    return reads.count


def trained(kind: type[torch.optim.SGD | torch.optim.Adam], groups: int) -> AdaScale:
    """Return an optimizer with tensors for lr after a few steps, whose averages were read."""
    model = network()
    parameters = list(model.parameters())
    cut = len(parameters) // groups
    inner = kind([{"params": parameters[i * cut : (i + 1) * cut]} for i in range(groups)], lr=1e-3)
    optimizer = AdaScale(inner, num_gradients_to_accumulate=2, scale=1000.0)
    set_tensors(optimizer)
    for number, batch in enumerate(batches(24)):
        (squared_error(model, batch) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert reads_of(lambda: (optimizer.gain(), optimizer.statistics.parameters.has_trained)) > 0
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_gain_reads_learning_rates_only_after_a_change(
    kind: type[torch.optim.SGD | torch.optim.Adam],
) -> None:
    optimizer = trained(kind, groups=2)
    assert reads_of(lambda: (optimizer.gain(), optimizer.statistics.parameters.has_trained)) == 0
    first, second = optimizer.param_groups
    first["lr"].fill_(0.0)
    assert reads_of(optimizer.gain) > 0
    assert optimizer.gain() == optimizer.gain(1)
    first["lr"] = torch.tensor(0.1)
    second["lr"] = torch.tensor(0.0)
    assert optimizer.gain() == optimizer.gain(0)
    for lr in (0.1, 0.0):  # Another tensor may get the place of the one before in memory.
        del second["lr"]
        second["lr"] = torch.tensor(lr)
        assert (optimizer.gain() == optimizer.gain(0)) == (lr == 0.0)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_gain_of_one_group_reads_no_learning_rate(kind: type[torch.optim.SGD | torch.optim.Adam]) -> None:
    """A schedule may change it in each step."""
    optimizer = trained(kind, groups=1)
    gain = optimizer.gain()
    for lr in (0.05, 0.0):
        optimizer.param_groups[0]["lr"].fill_(lr)
        assert reads_of(optimizer.gain) == 0
        assert optimizer.gain() == gain
    assert not optimizer.statistics.parameters.has_trained
