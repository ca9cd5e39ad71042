"""Tests of how a replica receives the state of another one while that trains."""

from __future__ import annotations

import copy
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from adascale_worker.membership.links import Follower
from adascale_worker.state import following
from adascale_worker.state.file import Snapshot
from adascale_worker.state.following import Followers, StateFollower, StateSource
from adascale_worker.state.transfer import LEAST, checksum, named_tensors
from adascale_worker.state.tree import flatten
from support.examples import examples
from support.launch import wait_until

Optimizer = torch.optim.Optimizer


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send little in each step, and wait for it as long as it takes on a busy machine."""
    monkeypatch.setattr(following, "CHUNK", 1 << 10)
    monkeypatch.setattr(following, "STEP_PART", 1 << 12)
    monkeypatch.setattr(following, "LEAST_SHARE", 0.1)
    monkeypatch.setattr(following, "LEAST_WAIT", 60.0)
    monkeypatch.setattr(following, "FOLLOW_SLACK", 60.0)


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


def content(state: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in flatten(state)[1]]


def differing(source: Program, joiner: Program) -> set[str]:
    """Return the names of the large tensors that are sent between two steps."""
    ours, theirs = (named_tensors(each.state(), LEAST) for each in (source, joiner))
    same = {name for name in ours if name in theirs and checksum(ours[name]) == checksum(theirs[name])}
    assert all(torch.equal(ours[name], theirs[name]) for name in same)
    return ours.keys() - same


CHANGING = {"average", "order", "model.1.running_mean", "model.1.running_var"}
"""What the program changes in each step beside the optimizer."""


def joined(
    source: Program, joiner: Program, between: Callable[[], None] = lambda: None, steps: int = 40
) -> tuple[StateSource, StateFollower]:
    """Let a replica follow another one for some steps, or until it has all but the rest."""
    ours, theirs = socket.socketpair()
    follower = StateFollower(joiner.optimizers, joiner.state, None)
    thread = threading.Thread(target=follower.follow, args=(theirs, lambda: None))
    thread.start()
    sending = StateSource(source.optimizers, source.state, {"joiner": ours})
    for _ in range(steps):
        source.step()
        if sending.is_complete:
            break
        between()
    # Not later: what the thread cannot send after `close` is a problem too.
    assert sending.is_complete == (steps > 1)
    sending.flush(lambda: None)
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
    assert followed.has_all
    assert source.steps - steps_before >= 2, "several pieces"
    assert differing(source, joiner) <= CHANGING


def test_what_the_program_changes_beside_the_optimizer_is_sent_between_two_steps() -> None:
    source, joiner = Program(OPTIMIZERS["Adam"], 1), Program(OPTIMIZERS["Adam"], 2)

    def limit() -> None:
        source.first.weight.data.clamp_(-0.01, 0.01)

    joined(source, joiner, limit)
    assert differing(source, joiner) - CHANGING == {"model.0.weight"}


def test_training_continues_if_the_one_that_joins_is_lost() -> None:
    source, calm = Program(OPTIMIZERS["momentum"], 1), Program(OPTIMIZERS["momentum"], 1)
    ours, theirs = socket.socketpair()
    sending = StateSource(source.optimizers, source.state, {"joiner": ours})
    source.step()
    theirs.close()
    for _ in range(5):
        source.step()
    assert sending.problem
    assert sending.is_complete, "the change waits for nothing"
    sending.close()
    for _ in range(6):
        calm.step()
    assert all(map(torch.equal, content(source.state()), content(calm.state())))


class Lossy:
    """The end of a replica that is lost after it has received some bytes."""

    def __init__(self, connection: socket.socket, bytes_left: int) -> None:
        self._connection = connection
        self._left = bytes_left
        self.settimeout = connection.settimeout

    def recv_into(self, memory: memoryview) -> int:
        if self._left <= 0:
            self._connection.close()
            raise ConnectionResetError
        count = self._connection.recv_into(memory[: self._left])
        self._left -= count
        return count


WHOLE = 1 << 40
"""Bytes, more than there are."""
losses = st.fixed_dictionaries(
    {
        "bytes_left": st.one_of(st.integers(0, 4_000_000), st.just(WHOLE)),
        "steps": st.integers(0, 12),
        "source_ends": st.booleans(),  # without waiting until all is sent
    }
)


@settings(
    max_examples=examples(25), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from([*OPTIMIZERS]), several=st.booleans(), faults=st.lists(losses, max_size=3))
def test_whatever_is_lost_changes_no_bit_of_the_source_and_the_next_try_has_all(
    name: str, several: bool, faults: list[dict[str, Any]]
) -> None:
    calm, source, joiner = (Program(OPTIMIZERS[name], seed, width=200, several=several) for seed in (1, 1, 2))
    for fault in faults:
        ours, theirs = socket.socketpair()
        follower = StateFollower(joiner.optimizers, joiner.state, None)
        end: Any = Lossy(theirs, fault["bytes_left"])
        thread = threading.Thread(target=follower.follow, args=(end, lambda: None))
        thread.start()
        sending = StateSource(source.optimizers, source.state, {"joiner": ours})
        for _ in range(fault["steps"]):
            source.step()
        is_whole = sending.is_complete and fault["bytes_left"] == WHOLE and not fault["source_ends"]
        if not fault["source_ends"]:
            sending.flush(lambda: None)
        sending.close()
        thread.join()
        theirs.close()
        assert follower.has_all or not is_whole
        assert differing(source, joiner) <= CHANGING or not is_whole
    joined(source, joiner)
    assert differing(source, joiner) <= CHANGING
    for _ in range(source.steps):
        calm.step()
    assert all(map(torch.equal, content(calm.state()), content(source.state())))


def test_steps_do_not_wait_for_a_slow_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads, as if the one that joins were frozen."""
    monkeypatch.setattr(following, "LEAST_WAIT", 0.1)
    monkeypatch.setattr(following, "MAX_WAIT", 0.0)
    source = Program(OPTIMIZERS["momentum"], 1)
    ours, theirs = socket.socketpair()
    sending = StateSource(source.optimizers, source.state, {"joiner": ours})
    for _ in range(3):
        source.step()
    assert "too slow" in sending.problem
    sending.close()
    theirs.close()


def test_gradients_do_not_change_before_they_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that a program changes all the same are not sent."""
    may_copy = threading.Event()
    wait = Snapshot.wait

    def wait_until_allowed(snapshot: Snapshot) -> None:
        if threading.current_thread().name == "adascale-state":
            assert may_copy.wait(60)
        wait(snapshot)

    monkeypatch.setattr(Snapshot, "wait", wait_until_allowed)
    source, spare = Program(OPTIMIZERS["Adam"], 1), Spare("spare")
    followers = Followers(source.optimizers, source.state, ())
    followers.add(spare.seen, gets_copies=False)
    followers.send_to_all()
    may_copy.set()
    source.step()  # after which there are gradients to send
    wait_until(lambda: spare.follower.count, "the first piece")
    may_copy.clear()
    source.step()
    waiting = threading.Thread(target=followers.wait_for_copies)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    may_copy.set()
    waiting.join()
    while not followers.have_all(["spare"]):
        source.step()
    (sending,) = followers._sources
    sending.flush(lambda: None)
    may_copy.clear()
    source.step()
    for parameter in source.middle.parameters():
        assert parameter.grad is not None
        parameter.grad.zero_()
    may_copy.set()
    followers.wait_for_copies()
    source.step()
    assert "has changed gradients" in sending.problem
    followers.send_to_all()
    assert not followers.instances
    spare.join()


def test_a_checksum_differs_for_other_bytes_and_another_order() -> None:
    identity = torch.eye(2048)
    swapped = identity[[2, 1, 0, *range(3, 2048)]]
    assert checksum(identity) != checksum(swapped), "with the same sums of rows and columns"
    tensor = torch.arange(5000)
    sums = [checksum(each) for each in (tensor, tensor.flip(0), tensor.roll(1024), tensor + 1)]
    assert len(set(sums)) == len(sums)
    moved = torch.cat([torch.zeros(4, dtype=torch.uint8), tensor.view(torch.uint8)])[4:]
    assert checksum(moved) == checksum(tensor.view(torch.uint8))


def test_a_replica_that_has_received_a_part_keeps_no_moments_of_it() -> None:
    source, joiner = Program(OPTIMIZERS["Adam"], 1), Program(OPTIMIZERS["Adam"], 2)
    source.step()
    _, followed = joined(source, joiner, steps=1)
    assert not followed.has_all
    assert not joiner.optimizers[0].state


class Spare:
    """A replica that waits, and follows."""

    def __init__(self, name: str, *, reads: bool = True) -> None:
        self.program = Program(OPTIMIZERS["AdamW"], 2)
        self.follower = StateFollower(self.program.optimizers, self.program.state, None)
        ours, self.theirs = socket.socketpair()
        self.seen = Follower(name, ours, None)
        self._thread = threading.Thread(target=self.follower.follow, args=(self.theirs, lambda: None))
        if reads:
            self._thread.start()

    def join(self) -> StateFollower:
        """Return what has followed until nothing more was sent."""
        self._thread.join()
        self.theirs.close()
        return self.follower


def test_a_spare_makes_the_steps_of_the_others_until_they_leave() -> None:
    source, spare = Program(OPTIMIZERS["AdamW"], 1), Spare("spare")
    followers = Followers(source.optimizers, source.state, ())
    followers.add(spare.seen, gets_copies=True)
    followers.send_to_all()
    assert followers.instances == {"spare"}
    while not followers.have_all(["spare"]):
        source.step()
    for _ in range(5):
        source.step()
    followers.finish(["spare"], lambda: None)
    assert not followers.instances
    assert spare.join().has_all
    assert differing(source, spare.program) <= CHANGING


def test_one_that_takes_nothing_is_left_and_the_others_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LEAST_WAIT", 3.0)
    monkeypatch.setattr(following, "MAX_WAIT", 1000.0)
    source, frozen, spare = Program(OPTIMIZERS["AdamW"], 1), Spare("a", reads=False), Spare("b")
    followers = Followers(source.optimizers, source.state, ())
    for each in (frozen, spare):
        followers.add(each.seen, gets_copies=False)
    followers.send_to_all()
    while not followers.have_all(["b"]):
        source.step()
    followers.finish(["b"], lambda: None)
    assert spare.join().has_all
    assert differing(source, spare.program) <= CHANGING
    frozen.theirs.close()


def test_a_spare_that_costs_too_much_time_follows_only_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "FOLLOW_SHARE", 0.0)
    monkeypatch.setattr(following, "FOLLOW_SLACK", 0.0)
    source = Program(OPTIMIZERS["AdamW"], 1)
    followers = Followers(source.optimizers, source.state, ())
    spare = Spare("spare")
    followers.add(spare.seen, gets_copies=False)
    followers.send_to_all()
    while not followers.have_all(["spare"]):
        source.step()
    for _ in range(2):
        source.step()
    spare.join()
    again = Spare("spare")
    followers.add(again.seen, gets_copies=False)
    followers.send_to_all()
    source.step()
    assert again.follower.heard_at is None
    followers.send_pieces(["spare"])
    while not followers.have_all(["spare"]):
        source.step()
    followers.finish(["spare"], lambda: None)
    assert again.join().has_all
    assert differing(source, again.program) <= CHANGING
