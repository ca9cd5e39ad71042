"""When the agent kills a trainer that does not leave its generation, and when it starts the next one."""

from __future__ import annotations

from adascale_core.names import LEAVE_GRACE

RESCALE_GRACE = 600.0
"""Seconds that a trainer may take to reach the end of its step and leave a generation that is not broken."""
REPLACED_GRACE = 3.0
"""Seconds that a trainer may take to exit when the others have taken it for lost and keep the state.

Usually it is frozen, and the job has one replica less until another trainer is started. A trainer that runs
exits within milliseconds, after the exit functions of the program."""
KILL_INTERVAL = 10.0
"""Seconds after which a trainer that has survived SIGKILL (in uninterruptible sleep) is killed again."""


def release_grace(*, was_lost: bool, last: bool) -> float:
    """Return the seconds that a released trainer may take to exit.

    `was_lost`: its replica is still desired, so the others have taken it for lost. `last`: no other trainer
    keeps the state.
    """
    if not was_lost:
        return RESCALE_GRACE
    return LEAVE_GRACE if last else REPLACED_GRACE


MAX_DELAY = 30.0
"""Maximum seconds before the next trainer is started."""


def restart_delay(fruitless: int) -> float:
    """Return the seconds until the next trainer is started: 0, 1, 2, 4 and so on.

    `fruitless` trainers were killed before they had finished a step. The next one may be killed for the same
    reason, for example because the program exceeds the memory of its container.
    """
    # The exponent is bounded, because a float overflows.
    return min(2.0 ** min(fruitless - 2, 30), MAX_DELAY) if fruitless > 1 else 0.0
