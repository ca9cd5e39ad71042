"""How frequently agents and trainers send requests, so that their sum stays within what a service can answer.

The metrics service computes the intervals from the number of replicas, and returns them in its answers.
"""

from __future__ import annotations

from adascale_core.names import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, REPORT_INTERVAL

HEARTBEATS_PER_SECOND = 400.0
"""Registrations of all agents together that the intervals aim at."""
POSTS_PER_SECOND = 200.0
"""Requests with reports of all trainers together that the intervals aim at."""
MAX_INTERVAL = 60.0
"""Seconds; the intervals grow no further."""
REPORTS_PER_POST = 8
"""Reports that a trainer posts together, when it posts less frequently than it could report."""
MISSED_HEARTBEATS = 3
"""Heartbeats that an agent may miss until its replica is lost, where the interval is long."""
MAX_CHANGE_WAIT = 60.0
"""Seconds for which a request may wait for a change of the generations, at most."""


def heartbeat_interval(replicas: int) -> float:
    """Return the seconds between two heartbeats of an agent, for a number of replicas of all jobs."""
    return min(max(HEARTBEAT_INTERVAL, replicas / HEARTBEATS_PER_SECOND), MAX_INTERVAL)


def heartbeat_timeout(interval: float) -> float:
    """Return the seconds without a heartbeat after which a replica whose agent has this interval is lost."""
    return max(HEARTBEAT_TIMEOUT, (MISSED_HEARTBEATS + 0.5) * interval)


def post_interval(jobs: int) -> float:
    """Return the seconds between two requests with reports of a job, for a number of jobs with replicas."""
    return min(max(REPORT_INTERVAL, jobs / POSTS_PER_SECOND), MAX_INTERVAL)


def report_interval(post_interval: float) -> float:
    """Return the seconds between two reports, at least, of a trainer that posts them at this interval."""
    return post_interval / REPORTS_PER_POST


def change_wait(heartbeat_interval: float, shortest: float) -> float:
    """Return the seconds for which an agent's request waits for a change, `shortest` at least."""
    return min(max(shortest, MISSED_HEARTBEATS * heartbeat_interval), MAX_CHANGE_WAIT)
