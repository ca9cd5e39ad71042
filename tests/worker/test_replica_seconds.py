"""Each second of a replica has one cause: in the trainer, and in the agent with its trainers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adascale_core.messages.channel import Spent
from adascale_core.messages.replica_seconds import Cause
from adascale_worker.agent.replica_time import ReplicaTime, began
from adascale_worker.reporting.time_spent import INTERVAL, TimeSpent


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def shown(seconds: Any) -> dict[str, float]:
    return {cause: round(each, 9) for cause, each in seconds.items() if each}


def test_a_step_is_divided_by_the_wait_for_others_and_by_the_efficiency(clock: Clock) -> None:
    sent: list[Spent] = []
    spent = TimeSpent(sent.append, clock)
    with spent.checking():
        assert sent[-1] == Spent(present="check")
    spent.begin()
    assert sent[-1] == Spent(present="starting", measures=True)
    clock.advance(0.5)
    spent.leave_step()
    clock.advance(4.0)
    spent.finish_step(1, waited=1.0, efficiency=0.75)
    assert shown(sent[-1].seconds) == {
        "starting": 0.5,
        "exchange": 1.0,
        "useful": 2.25,
        "efficiency_lost": 0.75,
    }
    assert sent[-1].present == ""


def test_an_evaluation_within_a_change_belongs_to_itself(clock: Clock) -> None:
    sent: list[Spent] = []
    spent = TimeSpent(sent.append, clock)
    spent.begin()
    clock.advance(1.0)
    spent.finish_step(1, 0.0, 1.0)
    clock.advance(0.25)
    with spent.measured(Cause.CHANGE):
        assert sent[-1].present == "change"
        clock.advance(2.0)
        with spent.measured(Cause.CHECKPOINT):
            clock.advance(3.0)
        clock.advance(4.0)
    assert shown(sent[-1].seconds) == {"useful": 1.0, "program": 0.25, "change": 6.0, "checkpoint": 3.0}


def test_steps_up_to_the_last_reported_one_are_repeated(clock: Clock) -> None:
    sent: list[Spent] = []
    spent = TimeSpent(sent.append, clock)
    spent.repeated_until = 7
    spent.begin()
    for step in (6, 7, 8):
        clock.advance(INTERVAL)
        spent.finish_step(step, waited=0.5, efficiency=1.0)
    assert shown(sent[-1].seconds) == {"repeated": 2.0, "exchange": 0.5, "useful": 0.5}


def test_a_failed_step_took_its_usual_time_and_then_waited_for_the_loss(clock: Clock) -> None:
    sent: list[Spent] = []
    spent = TimeSpent(sent.append, clock)
    spent.begin()
    clock.advance(5.0)
    spent.discard_step(usual=2.0)
    clock.advance(1.0)
    spent.discard_step(usual=0.0)  # of which no time is known
    spent.close()
    assert shown(sent[-1].seconds) == {"repeated": 3.0, "detection": 3.0}


OPERATIONS = st.one_of(
    st.tuples(st.just("step"), st.floats(0, 5), st.floats(0, 2)),
    st.tuples(st.just("discard"), st.floats(0, 5), st.floats(0, 5)),
    st.tuples(st.just("add"), st.floats(0, 5), st.floats(0, 5)),
    st.tuples(st.just("leave"), st.floats(0, 5), st.just(0.0)),
    st.tuples(
        st.sampled_from([Cause.CHANGE, Cause.EVALUATION, Cause.CHECKPOINT]), st.floats(0, 5), st.just(0.0)
    ),
)


@given(st.lists(OPERATIONS))
def test_the_causes_add_up_to_all_the_time(operations: list[tuple[Any, float, float]]) -> None:
    clock, sent = Clock(), list[Spent]()
    spent = TimeSpent(sent.append, clock)
    spent.begin()
    for number, (kind, seconds, other) in enumerate(operations):
        clock.advance(seconds)
        match kind:
            case "step":
                spent.finish_step(number, waited=other, efficiency=other)
            case "discard":
                spent.discard_step(other)
            case "add":
                spent.add(Cause.CHECKPOINT, other)
            case "leave":
                spent.leave_step()
            case cause:
                with spent.measured(cause):
                    clock.advance(seconds)
    spent.close()
    assert sum(sent[-1].seconds.values()) == pytest.approx(clock.now - 100.0)
    assert all(seconds >= 0 for seconds in sent[-1].seconds.values())


def test_the_agent_adds_what_no_trainer_has_measured(clock: Clock) -> None:
    replica = ReplicaTime(clock, start=90.0)
    clock.advance(5.0)
    assert shown(replica.seconds()) == {"starting": 15.0}
    replica.follow(Cause.CHECK, Spent(present=Cause.CHECK))
    clock.advance(1.0)
    replica.follow(Cause.SPARE, Spent(present=Cause.STARTING))
    clock.advance(20.0)
    assert shown(replica.seconds()) == {"starting": 15.0, "check": 1.0, "spare": 20.0}
    # In a step, its end tells.
    replica.follow(Cause.STARTING, Spent(measures=True))
    clock.advance(7.0)
    assert shown(replica.seconds()) == {"starting": 15.0, "check": 1.0, "spare": 20.0}
    replica.follow(Cause.STARTING, Spent({"useful": 7.0}, Cause.EVALUATION, measures=True))
    clock.advance(3.0)
    expected = {"starting": 15.0, "check": 1.0, "spare": 20.0, "useful": 7.0, "evaluation": 3.0}
    assert shown(replica.seconds()) == expected
    # The trainer reports it, and is killed in a step.
    replica.follow(Cause.STARTING, Spent({"useful": 7.0, "evaluation": 3.0}, measures=True))
    clock.advance(2.0)
    replica.end_trainer(Cause.REPEATED)
    clock.advance(1.0)
    replica.follow(Cause.STARTING, Spent())  # another trainer
    assert shown(replica.seconds()) == {**expected, "starting": 16.0, "repeated": 2.0}
    assert sum(replica.seconds().values()) == clock.now - 90.0


@given(st.lists(st.tuples(st.sampled_from(["agent", "trainer", "killed"]), st.floats(0, 5), st.floats(0, 1))))
def test_no_cause_falls_whatever_arrives_late(events: list[tuple[str, float, float]]) -> None:
    clock, before = Clock(), dict[str, float]()
    replica, measured = ReplicaTime(clock, start=100.0), 0.0
    for kind, seconds, late in events:
        clock.advance(seconds)
        match kind:
            case "agent":
                replica.end_trainer(Cause.PROGRAM)
                replica.follow(Cause.SPARE)
                measured = 0.0
            case "trainer":
                # It has measured more than the agent knows when its message arrives.
                measured += seconds
                clock.advance(late)
                replica.follow(Cause.STARTING, Spent({"useful": measured}, measures=True))
            case "killed":
                replica.end_trainer(Cause.REPEATED)
                measured = 0.0
        after = replica.seconds()
        assert all(after[cause] >= each for cause, each in before.items())
        before = dict(after)


def test_the_time_of_an_agent_begins_with_its_process() -> None:
    replica = ReplicaTime()
    assert began() == pytest.approx(began(), abs=0.1)
    # The interpreter that runs the tests was started before.
    assert replica.seconds()["starting"] > 0.1
