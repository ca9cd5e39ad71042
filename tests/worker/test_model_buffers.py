"""Buffers after a discarded step."""

import torch
from torch import nn

from adascale_worker.loop.steps import StepUndo
from adascale_worker.reporting.progress import TrainingProgress
from adascale_worker.torch_private.modules import buffers_of


class Network(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.data += 1  # whose version does not count it
        output: torch.Tensor = self.norm(x)
        return output


def test_buffers_are_those_before_the_discarded_step_not_those_of_an_earlier_one() -> None:
    network = Network()
    buffers = StepUndo(network, TrainingProgress(), None)
    for _ in range(3):
        buffers.begin_step(buffers_of(network))
        before = {name: buffer.clone() for name, buffer in network.named_buffers()}
        for _ in range(2):
            network(torch.randn(8, 3))
    buffers.restore()
    after = dict(network.named_buffers())
    assert all(torch.equal(after[name], before[name]) for name in before), "BatchNorm's too"


def test_a_buffer_that_a_forward_pass_has_replaced_is_put_back() -> None:
    network = Network()
    buffers = StepUndo(network, TrainingProgress(), None)
    buffers.begin_step(buffers_of(network))
    before = network.calls
    network.calls = network.calls + 1
    network(torch.randn(8, 3))
    buffers.restore()
    assert network.calls is before
    assert float(before) == 0.0
    assert dict(network.named_buffers())["calls"] is before
