"""Counts that could not be placed: tried for a while, given up, tried again."""

from __future__ import annotations

from typing import Any

from adascale_controller.operator.trials import (
    FIRST_PAUSE,
    MAX_BACKOFF,
    TIMEOUT_TRAINING,
    TIMEOUT_WAITING,
    Trials,
)

NO_ROOM = ("Unschedulable", "no node takes it")


def see(trials: Trials, now: float, **changed: Any) -> None:
    """Four are tried for, two train."""
    told: dict[str, Any] = {
        "generation": 5, "count": 4, "training": 2, "problem": NO_ROOM, "placed": 2,
        "valid": [1, 2, 4, 8], "room": 8, "now": now,
    }  # fmt: skip
    trials.see(**{**told, **changed})


def refused(now: float = TIMEOUT_TRAINING, **changed: Any) -> Trials:
    trials = Trials()
    see(trials, 0.0, **changed)
    see(trials, now, **changed)
    return trials


def test_a_count_is_tried_for_a_while() -> None:
    assert refused(TIMEOUT_TRAINING - 1).refused is None
    assert refused().limit(8, TIMEOUT_TRAINING) == 2
    assert refused(TIMEOUT_WAITING, training=0, placed=1).limit(8, TIMEOUT_WAITING) == 1


def test_what_was_refused_is_tried_again_after_a_pause_or_when_there_is_more_room() -> None:
    trials = refused()
    over = TIMEOUT_TRAINING + FIRST_PAUSE
    assert trials.limit(8, over - 1) == 2
    assert trials.limit(9, over - 1) is None
    assert trials.limit(8, over) is None
    assert trials.standing(over) is None


def test_pauses_grow_longer_up_to_a_limit() -> None:
    trials, now, pauses = Trials(), 0.0, []
    for generation in range(6):
        see(trials, now, generation=generation)
        now += TIMEOUT_TRAINING
        see(trials, now, generation=generation)
        assert trials.refused is not None
        pauses.append(trials.refused.pause)
        now = trials.refused.until
    assert pauses == [60, 120, 240, 480, 900, MAX_BACKOFF]


def test_what_goes_well_in_between_begins_patience_anew() -> None:
    trials = Trials()
    see(trials, 0.0)
    see(trials, 30.0, problem=None)
    see(trials, 40.0)
    see(trials, 40.0 + TIMEOUT_TRAINING - 1)
    assert trials.refused is None


def test_a_count_that_trains_is_refused_no_more() -> None:
    trials = refused()
    see(trials, 90.0, generation=6, count=4, training=4, problem=None)
    assert trials.refused is None


def test_below_the_smallest_count_there_is_nothing_to_fall_back_on() -> None:
    assert refused(count=1, training=0, placed=0).refused is None
    assert refused(count=4, training=0, placed=0, valid=[4, 8]).refused is None
