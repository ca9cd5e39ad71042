"""Which node a job avoids because of a slow replica.

A synchronous step takes as long as on its slowest replica. Where training on fewer replicas, or on as many
on other nodes, is predicted to be faster, the pods on the node of the slow replica are replaced, and new pods
avoid that node for a time. If there is no place for them elsewhere, the job trains on fewer.
"""

from __future__ import annotations

from typing import Final

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.reconcile import template_rollout
from adascale_controller.operator.types.conditions import ConditionType, since
from adascale_core.performance.slow_replica import is_faster_without

CONFIRMATION: Final = 30.0
"""Seconds for which a replica has to be slow."""


def confirmed_at(observed: ObservedJob) -> float | None:
    """Return when a replica that is slow has been slow for `CONFIRMATION`; None if none is."""
    view = observed.service
    began = since(observed.resource.status, ConditionType.SLOW_REPLICA)
    return began + CONFIRMATION if view is not None and view.slow is not None and began is not None else None


def node_of_slow_replica(observed: ObservedJob) -> str | None:
    """Return the node that a job may avoid; None if there is none, or it avoids one already."""
    view, confirmed = observed.service, confirmed_at(observed)
    if view is None or view.slow is None or confirmed is None or observed.now < confirmed:
        return None
    if observed.avoided_node is not None or observed.single_node or observed.resource.job is None:
        return None
    pod = observed.live_pods.get(view.slow.replica)
    return pod.node or None if pod is not None and template_rollout.may_replace_pods(observed) else None


def is_left_out(observed: ObservedJob, count: int) -> bool:
    """Whether training on `count` replicas, without the node of the slow one, is predicted to be faster."""
    view = observed.service
    if view is None or view.latest is None or view.slow is None or not count:
        return False
    return is_faster_without(view.latest, view.slow.factor, count)
