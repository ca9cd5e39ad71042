"""Errors of one job: what a server refuses is tried again less and less often, until the job changes."""

from __future__ import annotations

import pytest

from adascale_client import ServiceError, ServiceRefusedError
from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, PodRefusedError
from adascale_controller.operator.runtime.work_queue import MAX_RETRY_INTERVAL, RETRY_INTERVAL, ErrorIsolation
from support.clock import Clock

REFUSED = ApiServerError('pods "digits-0-0" is forbidden: exceeded quota', 403, "exceeded quota")


def intervals(errors: list[Exception]) -> list[float]:
    """Return the seconds after each of these errors of a job until the next attempt."""
    clock = Clock()
    isolation = ErrorIsolation(clock=clock)
    found: list[float] = []
    for error in errors:
        with isolation.isolate("team.digits"):
            raise error
        assert isolation.take_failed() == {"team.digits": isolation.retry_at("team.digits")}
        found.append(isolation.retry_at("team.digits") - clock.now)
        clock.now += found[-1]
    return found


@pytest.mark.parametrize(
    "error",
    [
        REFUSED,
        PodRefusedError("failed calling webhook", 500),
        ApiServerError("already exists", 409),
        ServiceRefusedError("unknown", 404),
        ValueError("a bug"),
    ],
)
def test_intervals_double_while_a_server_refuses(error: Exception) -> None:
    found = intervals([error] * 10)
    assert found[:4] == [RETRY_INTERVAL, 2, 4, 8]
    assert found[-1] == MAX_RETRY_INTERVAL


@pytest.mark.parametrize(
    "error",
    [
        ApiServerError("no answer"),
        ApiServerError("overloaded", 503),
        ApiServerError("too many requests", 429),
        ServiceError("no answer"),
        ServiceRefusedError("the database does not answer", 503),
    ],
)
def test_intervals_stay_short_while_a_server_does_not_answer(error: Exception) -> None:
    assert intervals([error] * 10) == [RETRY_INTERVAL] * 10
    assert intervals([REFUSED, REFUSED, error, REFUSED])[2:] == [1, 2]


def test_a_change_of_the_job_and_a_success_end_the_wait() -> None:
    clock = Clock()
    isolation = ErrorIsolation(clock=clock)
    for _ in range(5):
        with isolation.isolate("team.digits"):
            raise REFUSED
    isolation.retry_now(["team.digits", "team.other"])
    assert isolation.retry_at("team.digits") <= clock.now
    with isolation.isolate("team.digits"):
        raise REFUSED
    assert isolation.retry_at("team.digits") == clock.now + 32
    clock.now -= 1000
    assert isolation.retry_at("team.digits") == clock.now + 32, "the clock was set back"
    isolation.clear("team.digits")
    assert isolation.retry_at("team.digits") == 0.0
