"""Replicas under torchrun that restart in the middle of training.

Rank 0 prints digests of the final weights: without a restart, and with a restart after 1 and after 5 steps.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adascale_worker.gradients.exchange import GradientExchange
from adascale_worker.membership import gloo
from adascale_worker.membership.process_group import ReplicaGroup
from adascale_worker.process.environment import RankAssignment
from support.records import digest

STEPS = 12


class Net(nn.Module):
    """Uses its layers in another order than it lists them."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)
        self.middle = nn.Linear(300, 64)
        self.first = nn.Linear(20, 300)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.middle(torch.relu(self.first(x)))))
        return out


def begin(state: dict[str, Any] | None = None) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if state is not None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    assignment = RankAssignment(dist.get_rank(), dist.get_world_size())
    parameters = list(model.parameters())
    exchange = GradientExchange(parameters, ReplicaGroup(assignment, torch.device("cpu")))
    exchange.use(tuple(True for _ in parameters))

    def take(positions: Any) -> list[Tensor | None]:
        taken = [parameters[position].grad for position in positions]
        for position in positions:
            parameters[position].grad = None
        return taken

    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(8, 20, generator=generator)
        y = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        exchange.begin(take, is_early=True, keeps_means=False)
        nn.functional.cross_entropy(model(x), y).backward()
        exchange.flush()
        for position, mean in exchange.means():
            parameters[position].grad = mean
        optimizer.step()


dist.init_process_group("gloo")
model, optimizer = begin()
train(model, optimizer, range(STEPS))
digests = [digest(model.parameters())]
for middle in (1, 5):
    model, optimizer = begin()
    train(model, optimizer, range(middle))
    state = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    model, optimizer = begin(state)
    train(model, optimizer, range(middle, STEPS))
    digests.append(digest(model.parameters()))
if dist.get_rank() == 0:
    print(*digests)
dist.destroy_process_group()
gloo.wait_until_idle()
