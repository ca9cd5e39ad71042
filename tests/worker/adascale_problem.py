"""The small problem that the tests of the optimizer train on."""

from typing import Any

import torch
from torch import Tensor, nn

from worker.reference import Batch

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
