"""The heartbeats of replicas that services which share a database exchange.

Heartbeats are counted, without times: each service measures with its own clock how long ago a count has
changed, so no clocks are compared.
"""

from collections.abc import Mapping

from adascale_api.data.sql import Sql, Transaction

Received = Mapping[tuple[int, int], str]
"""(job key, replica) -> the agent that sent a heartbeat."""
Counts = dict[tuple[int, int], tuple[str, int]]
"""(job key, replica) -> the agent, and how many heartbeats were counted."""


def add(transaction: Transaction, received: Received) -> None:
    """Count the heartbeats that this service has received since it last did."""
    # In order, so that two services lock rows in the same order.
    for (key, replica), instance in sorted(received.items()):
        transaction.execute(_ADD, key=key, replica=replica, instance=instance)


def count(transaction: Transaction) -> Counts:
    """Return the heartbeats that all services have counted."""
    return {(key, replica): (instance, beats) for key, replica, instance, beats in transaction.all(_COUNTS)}


def remove_ended(transaction: Transaction) -> None:
    """Remove the counts of jobs that are complete or deleted; a service may add some after the end."""
    transaction.execute(_REMOVE_ENDED)


_ADD = Sql(
    """
    INSERT INTO heartbeats (job_key, replica, instance, beats) VALUES (:key, :replica, :instance, 1)
    ON CONFLICT (job_key, replica) DO UPDATE SET
        instance = excluded.instance, beats = heartbeats.beats + 1
    """
)
_REMOVE_ENDED = Sql("DELETE FROM heartbeats WHERE job_key NOT IN (SELECT key FROM jobs WHERE complete = 0)")
_COUNTS = Sql("SELECT job_key, replica, instance, beats FROM heartbeats")
