"""Intervals between requests, by the number of jobs and replicas."""

import pytest

from adascale_core.messages.registration import (
    MISSED_HEARTBEATS,
    change_wait,
    heartbeat_interval,
    heartbeat_timeout,
    post_interval,
    report_interval,
)
from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, REPORT_INTERVAL


@pytest.mark.parametrize(
    ("jobs", "heartbeats", "expiry", "posts", "waits"),
    [
        (0, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, REPORT_INTERVAL, 20),
        (50, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, REPORT_INTERVAL, 20),
        (300, HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, 1.5, 20),
        (1000, 10, 35, 5, 30),
        (2000, 20, 70, 10, 60),
        (100_000, 60, 210, 60, 60),
    ],
)
def test_the_intervals_of_jobs_of_four_replicas(
    jobs: int, heartbeats: float, expiry: float, posts: float, waits: float
) -> None:
    interval = heartbeat_interval(4 * jobs)
    assert (interval, heartbeat_timeout(interval), post_interval(jobs), change_wait(interval, 20)) == (
        heartbeats,
        expiry,
        posts,
        waits,
    )


@pytest.mark.parametrize("replicas", [1, 100, 5000, 10**6])
def test_a_replica_may_miss_heartbeats_before_it_is_lost(replicas: int) -> None:
    interval = heartbeat_interval(replicas)
    assert heartbeat_timeout(interval) > MISSED_HEARTBEATS * interval


def test_few_reports_are_posted_together() -> None:
    assert report_interval(post_interval(2000)) == 10 / 8
