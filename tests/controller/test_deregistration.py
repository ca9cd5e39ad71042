"""Jobs that the cluster no longer has are removed from the metrics service."""

from __future__ import annotations

import asyncio
from typing import cast

from adascale_client import MetricsServiceClient
from adascale_controller.operator.runtime.job_follower import Deregistration
from adascale_controller.operator.runtime.object_cache import ObjectCache
from adascale_controller.operator.types.kubernetes import Resource


class Service:
    """Records what is deleted, during which another job is created again."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.cache = ObjectCache()

    def delete_job(self, job_id: str) -> None:
        self.deleted.append(job_id)
        again = {"metadata": {"namespace": "team", "name": "b", "resourceVersion": "1"}}
        self.cache.put(Resource.ADASCALEJOBS, again)


def test_a_job_that_is_created_again_meanwhile_is_kept() -> None:
    service = Service()
    deregistration = Deregistration(cast(MetricsServiceClient, service), None, service.cache)
    asyncio.run(deregistration.deregister(["team.a", "team.b", "team.c"]))
    assert service.deleted == ["team.a", "team.c"]
