"""Tests of how a replica receives the state of another one while that trains."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adascale_worker.state import transfer
from adascale_worker.state.transfer import ReceiveMemory, StateFollower, StateSource
from adascale_worker.state.tree import flatten

Optimizer = torch.optim.Optimizer


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a parameter in each step, and wait for it as long as it takes on a busy machine."""
    monkeypatch.setattr(transfer, "CHUNK", 1 << 10)
    monkeypatch.setattr(transfer, "LEAST_SHARE", 0.0)
    monkeypatch.setattr(transfer, "LEAST_WAIT", 60.0)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


class Program:
    """A training program in miniature: a model with a frozen part and an average of its weights."""

    def __init__(
        self, make: Callable[[Any], Optimizer], seed: int, *, width: int = 1100, several: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.first, self.middle, self.last = nn.Linear(9, width), nn.Linear(width, width), nn.Linear(width, 1)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(width), nn.ReLU(), self.middle, self.last)
        self.frozen = nn.Linear(600, 600).requires_grad_(False)
        self.average = copy.deepcopy(self.middle.weight.detach())
        self.order = torch.randperm(200_000)
        parts = [self.last, self.model[:-1]] if several else [self.model]
        self.optimizers = [make(list(part.parameters())) for part in parts]
        self.steps = 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "frozen": self.frozen.state_dict(),
            "optimizers": [each.state_dict() for each in self.optimizers],
            "average": self.average,
            "order": self.order,
            "steps": self.steps,
        }

    def step(self) -> None:
        generator = torch.Generator().manual_seed(self.steps)
        x = torch.randn(8, 9, generator=generator)
        if self.steps % 3 == 1:
            self.last.bias.requires_grad_(self.steps % 2 == 0)
        for optimizer in self.optimizers:
            self.model.zero_grad()
            self.model(x).square().sum().backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for group in optimizer.param_groups:
                group["lr"] *= 0.97
            optimizer.step()
        self.average.lerp_(self.middle.weight.detach(), 0.1)
        self.order = torch.randperm(len(self.order), generator=generator)
        self.steps += 1


def content(state: Any) -> tuple[bytes, list[Tensor]]:
    spec, tensors = flatten(state)
    return spec, [tensor.clone() for tensor in tensors]


def joined(
    source: Program, joiner: Program, between: Callable[[], None] = lambda: None, steps: int = 40
) -> tuple[StateSource, StateFollower]:
    """Let a replica follow another one for some steps, or until it has all but the rest."""
    ours, theirs = socket.socketpair()
    follower = StateFollower(joiner.optimizers, ReceiveMemory())
    thread = threading.Thread(target=follower.follow, args=(theirs, lambda: None))
    thread.start()
    sending = StateSource(source.optimizers, source.state, [ours])
    for _ in range(steps):
        source.step()
        if sending.is_complete:
            break
        between()
    # Not later: what the thread cannot send after `close` is a problem too.
    assert sending.is_complete == (steps > 1)
    sending.send_rest((3, source.steps, 8 * source.steps), lambda: None)
    sending.close()
    thread.join()
    theirs.close()
    return sending, follower


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
def test_a_replica_that_follows_the_steps_of_another_has_its_state_bit_for_bit(
    name: str, steps_before: int, several: bool
) -> None:
    source, joiner = (Program(OPTIMIZERS[name], seed, several=several) for seed in (1, 2))
    for _ in range(steps_before):
        source.step()
    sending, followed = joined(source, joiner)
    assert not sending.problem
    assert followed.number == (3, source.steps, 8 * source.steps)
    assert source.steps - steps_before >= 2, "several pieces"
    spec, tensors = content(source.state())
    found_spec, found = content(followed.state)
    assert found_spec == spec
    assert all(map(torch.equal, tensors, found))
    # What was received is in the joiner's own parameters already.
    for own, other in zip(joiner.model.parameters(), source.model.parameters(), strict=True):
        assert torch.equal(own, other)


def test_a_replica_that_differs_waits_for_the_whole_state(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program limits weights beside the steps of its optimizer."""
    source, joiner = Program(OPTIMIZERS["Adam"], 1), Program(OPTIMIZERS["Adam"], 2)

    def limit() -> None:
        source.first.weight.data.clamp_(-0.01, 0.01)

    _, followed = joined(source, joiner, limit)
    assert followed.number is None
    assert "beside optimizer.step()" in capsys.readouterr().out


def test_training_continues_if_the_one_that_joins_is_lost() -> None:
    source, calm = Program(OPTIMIZERS["momentum"], 1), Program(OPTIMIZERS["momentum"], 1)
    ours, theirs = socket.socketpair()
    sending = StateSource(source.optimizers, source.state, [ours])
    source.step()
    theirs.close()
    for _ in range(5):
        source.step()
    assert sending.problem
    assert sending.is_complete, "the change waits for nothing"
    sending.close()
    for _ in range(6):
        calm.step()
    assert all(map(torch.equal, content(source.state())[1], content(calm.state())[1]))


def test_steps_do_not_wait_for_a_slow_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads, as if the one that joins were frozen."""
    monkeypatch.setattr(transfer, "LEAST_WAIT", 0.1)
    monkeypatch.setattr(transfer, "MAX_WAIT", 0.0)
    source = Program(OPTIMIZERS["momentum"], 1)
    ours, theirs = socket.socketpair()
    sending = StateSource(source.optimizers, source.state, [ours])
    for _ in range(3):
        source.step()
    assert "too slow" in sending.problem
    sending.close()
    theirs.close()


def test_a_checksum_differs_for_other_bytes_and_another_order() -> None:
    tensor = torch.arange(5000)
    sums = [transfer.checksum(each) for each in (tensor, tensor.flip(0), tensor.roll(1024), tensor + 1)]
    assert len(set(sums)) == len(sums)
    moved = torch.cat([torch.zeros(4, dtype=torch.uint8), tensor.view(torch.uint8)])[4:]
    assert transfer.checksum(moved) == transfer.checksum(tensor.view(torch.uint8))


def test_a_replica_that_has_received_a_part_keeps_no_moments_of_it() -> None:
    source, joiner = Program(OPTIMIZERS["Adam"], 1), Program(OPTIMIZERS["Adam"], 2)
    source.step()
    _, followed = joined(source, joiner, steps=1)
    assert followed.number is None
    assert not joiner.optimizers[0].state
