"""What Kueue says about a job."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QueueView:
    """What Kueue says about one job."""

    admitted: int = 0  # the number of replicas for which quota is reserved
    # the number of further replicas that the unused quota of its flavor holds. None if that is not known.
    room: int | None = None
    cluster_queue: str = ""  # the ClusterQueue that has reserved the quota. Empty if none has.
    message: str = ""  # why Kueue has not admitted it, has evicted it, or does not admit more replicas
