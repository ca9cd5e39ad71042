"""The small problem that the tests of the optimizer train on, and its comparison with the reference."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale_worker.adascale import AdaScale
from worker.reference import Batch, Reference

PUBLIC_VALUES = [
    ([1.0, 0.0], [0.0, 1.0], 4 / 3),
    ([-1.0, 1.0], [1.0, -1.0], 2.0),
    ([1.0, 4.0], [5.0, 0.5], 1.4688796680),
    ([-0.2, 3.0], [5.0, 0.5], 1.8472893902),
]
"""Inputs of two micro-gradients of Linear(2, 2) with loss = out.sum(), and the gain after one step."""


def backward(loss: Tensor) -> None:
    """Call `loss.backward()`, which has no types in torch."""
    loss.backward()


class Net(nn.Module):
    """Two layers, in float64 so that rounding is far below the tolerances."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(x)))
        return out


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    error: Tensor = model(x) - y
    return (error**2).mean()


def network(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batches(count: int, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(4, 3, dtype=torch.float64, generator=generator),
            torch.randn(4, 2, dtype=torch.float64, generator=generator),
        )
        for _ in range(count)
    ]


def one_group(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(model.parameters())}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, Net)
    return [
        {"params": list(model.first.parameters())},
        {"params": list(model.second.parameters()), "lr": 0.02},
    ]


def with_empty_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups without parameters, as for a network that has no parameters of a kind."""
    return [{"params": []}, *one_group(model), {"params": []}]


Loop = Callable[[AdaScale, nn.Module, list[Batch]], None]


def scaled_loss(optimizer: AdaScale, model: nn.Module, step: list[Batch]) -> None:
    for batch in step:
        backward(squared_error(model, batch) / len(step))
    optimizer.step()
    optimizer.zero_grad()


def assert_matches_reference(
    loop: Loop,
    *,
    micro: int,
    steps: int = 12,
    groups: Callable[[nn.Module], list[dict[str, Any]]] = one_group,
    scale: float | None = None,
    clip: float | None = None,
    options: dict[str, Any] | None = None,
    model: nn.Module | None = None,
    **arguments: Any,
) -> AdaScale:
    """Train with `loop` and with the reference; assert equal weights and gains after every step."""
    sgd = {"lr": 0.05, **(options or {})}
    model = network() if model is None else model
    reference_model = copy.deepcopy(model)
    optimizer = AdaScale(
        torch.optim.SGD(groups(model), **sgd), num_gradients_to_accumulate=micro, scale=scale, **arguments
    )
    reference = Reference(
        reference_model,
        torch.optim.SGD(groups(reference_model), **copy.deepcopy(sgd)),
        squared_error,
        optimizer.scale,
        clip=clip,
    )
    data = iter(batches(micro * steps))
    for _ in range(steps):
        step = [next(data) for _ in range(micro)]
        loop(optimizer, model, step)
        reference.step(step)
        assert optimizer.gain() == pytest.approx(reference.gain(), rel=1e-9)
        for number in range(len(optimizer.param_groups)):
            assert optimizer.gain(number) == pytest.approx(reference.gain(number), rel=1e-9)
        for ours, theirs in zip(model.parameters(), reference_model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    assert optimizer.grad_sqr == pytest.approx(reference.estimate()[0], rel=1e-9)
    assert optimizer.grad_var == pytest.approx(reference.estimate()[1], rel=1e-9)
    assert optimizer.gain() != 1.0 or optimizer.scale == 1.0
    return optimizer
