"""Reads from Kueue what it says about queued jobs, at intervals: they are few, and it changes rarely."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from adascale_controller.operator.apply.cluster import Cluster, ClusterError
from adascale_controller.operator.observe.queue import QueueView
from adascale_controller.operator.schedule.queues import read_queues
from adascale_controller.operator.types.kubernetes import ApiObject

logger = logging.getLogger(__name__)

INTERVAL = 2.0
"""Seconds between two reads."""
MAX_SHARE = 0.05
"""The share of the time that reads take, at most."""
RETRY_INTERVAL = 60.0
"""Seconds until it is tried again to read what may not be read, or what is not understood."""


class QueueReader:
    """Reads the Workloads of queued jobs and all ClusterQueues.

    Kueue writes the status of a ClusterQueue a moment after it has reserved quota for a Workload. What is
    reserved would be counted as unused until then, so more room counts only once it was read twice.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._may_read = True
        self._due_at = float("-inf")
        """On the monotonic clock."""
        self._last: Mapping[str, QueueView] = {}
        """What was read last, without confirmation."""
        self.views: Mapping[str, QueueView] = {}
        """What Kueue says about Jobs, by the uid of the Job."""

    def is_due(self) -> bool:
        """Whether to read now."""
        return time.monotonic() >= self._due_at

    async def read(self, namespaces: Collection[str]) -> None:
        """Read what Kueue says about the jobs of these namespaces."""
        begun = time.monotonic()
        # Also after an error that nobody expects.
        self._due_at = begun + RETRY_INTERVAL
        try:
            cluster_queues = await self._cluster.list_kueue("clusterqueues")
            workloads: list[ApiObject] = []
            may_read = False
            for namespace in sorted(namespaces):
                found = await self._cluster.list_kueue("workloads", namespace)
                may_read |= found is not None
                workloads += found or ()
        except ClusterError as error:
            logger.debug("The queues of Kueue are not known: %s", error)
            self._due_at = time.monotonic() + INTERVAL
            return
        found_views = read_queues(workloads, cluster_queues)
        self.views = {uid: confirmed(view, self._last.get(uid)) for uid, view in found_views.items()}
        self._last = found_views
        now = time.monotonic()
        interval = max(INTERVAL, (now - begun) / MAX_SHARE)
        self._may_read = may_read
        self._due_at = now + (interval if may_read else RETRY_INTERVAL)

    def view(self, uid: str) -> QueueView | None:
        """Return what Kueue says about the Job with this uid. None if that is not read yet, or nothing."""
        return self.views.get(uid) or (None if self._may_read else QueueView())


def confirmed(view: QueueView, last: QueueView | None) -> QueueView:
    """Return what Kueue says about a job, with no more room than it said before."""
    if view.room is None:
        return view
    before = 0 if last is None else last.admitted + (last.room or 0)
    return replace(view, room=max(min(view.room, before - view.admitted), 0))
