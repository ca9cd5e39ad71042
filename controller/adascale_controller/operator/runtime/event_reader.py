"""Reads Events of whole namespaces, for all jobs that wait for them.

The API server has no index and no cache of Events, so a read costs it as much as all Events of the namespace,
whatever the read selects. Jobs that lack pods because the API server is busy would keep it busy by reading
them. So all jobs of a namespace share a read, reads are made one at a time, and take at most `MAX_SHARE` of
the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence

from adascale_controller.operator.apply.cluster import Cluster, ClusterError
from adascale_controller.operator.types.kubernetes import ApiObject

logger = logging.getLogger(__name__)

MAX_SHARE = 0.1
"""The largest part of the time in which a read is in progress."""

EventsByObject = Mapping[str, Sequence[ApiObject]]
"""Events, by the uid of the object that they are about."""


class EventReader:
    """Reads Events."""

    def __init__(self, cluster: Cluster, deadline: float) -> None:
        self._cluster = cluster
        self._deadline = deadline
        self._reads: dict[tuple[str, str], asyncio.Task[EventsByObject | None]] = {}
        self._turn = asyncio.Lock()
        self._next_start = 0.0

    async def read(self, namespace: str, field_selector: str) -> EventsByObject | None:
        """Return the Events of a namespace that match a selector, or None if they could not be read.

        A read of the same Events that has not returned yet is joined.
        """
        key = (namespace, field_selector)
        task = self._reads.get(key)
        if task is None:
            task = self._reads[key] = asyncio.create_task(self._read(namespace, field_selector))
            task.add_done_callback(lambda _: self._reads.pop(key))
        return await asyncio.shield(task)

    async def _read(self, namespace: str, field_selector: str) -> EventsByObject | None:
        clock = asyncio.get_running_loop().time
        async with self._turn:
            await asyncio.sleep(self._next_start - clock())
            start = clock()
            try:
                async with asyncio.timeout(self._deadline):
                    events = await self._cluster.list_events(namespace, field_selector)
            except TimeoutError:
                logger.warning(
                    "The Events of namespace %s can't be read: the API server does not answer within %.0f s",
                    *(namespace, self._deadline),
                )
                return None
            except ClusterError as error:
                logger.warning("The Events of namespace %s can't be read: %s", namespace, error)
                return None
            finally:
                end = clock()
                self._next_start = end + (end - start) * (1 / MAX_SHARE - 1)
        by_object = defaultdict(list)
        for event in events:
            by_object[event["involvedObject"]["uid"]].append(event)
        return by_object
