"""What Kueue says about jobs, and how many replicas it lets run: its quota is capacity for the decision.

The limit of each job in a ClusterQueue has all of the unused quota. Kueue admits the growth of one of them,
and the limit of the others falls, so that they ask for no more than what they have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import floor
from typing import Final

from kubernetes.utils import parse_quantity

from adascale_controller.formatting import plural
from adascale_controller.operator.observe.observed_job import ObservedJob, QueueView
from adascale_controller.operator.types.kubernetes import ApiObject, find_condition
from adascale_controller.schedule.memory import Limit
from adascale_core.batch.plans import valid_replicas


def quota_limit(observed: ObservedJob) -> Limit:
    """Return the largest count for which Kueue has quota, and why. None if its growth is in no queue."""
    limit = _quota_limit(observed)
    if limit is None:
        return None, ""
    view = observed.queue
    if view is not None and view.room is not None:
        return limit, f"the quota of ClusterQueue {view.cluster_queue} holds {plural(limit, 'replica')}"
    return limit, f"Kueue is asked for {plural(limit, 'replica')} first"


def _quota_limit(observed: ObservedJob) -> int | None:
    job, view, group = observed.resource, observed.queue or QueueView(), observed.group_size
    if job.queue_of(extra=observed.core is not None) is None:
        return None
    others = sum(pod.queue is None for pod in observed.live_pods.values())
    if view.room is not None:
        return max(min(others + view.admitted + view.room, job.valid_job.spec.max_replicas), group)
    count = observed.current_allocation.replicas if observed.current_allocation is not None else 0
    if count != observed.training_replicas or not count:
        return max(count, group)
    # The quota is not known: it is found out by asking for the next larger count, one at a time.
    spec = job.valid_job.declaration
    counts = valid_replicas(spec.bounds, spec.max_replicas)
    return next((larger for larger in counts if larger > count and larger >= spec.min_replicas), count)


_EVICTED: Final = "Evicted"
_QUOTA_RESERVED: Final = "QuotaReserved"

_Flavor = tuple[str, str]
"""Names of a flavor and of a resource."""


def read_queues(
    workloads: Iterable[ApiObject], cluster_queues: Sequence[ApiObject] | None
) -> dict[str, QueueView]:
    """Return what Kueue says about pods, by the uid of the pod."""
    unused = None if cluster_queues is None else unused_quota(cluster_queues)
    views: dict[str, QueueView] = {}
    for raw in workloads:
        view = _view(raw, unused)
        for owner in raw["metadata"].get("ownerReferences") or ():
            if owner["kind"] == "Pod":
                views[owner["uid"]] = view
    return views


def of_job(views: Iterable[QueueView]) -> QueueView:
    """Return what Kueue says about a job, from what it says about its pods."""
    found = list(views)
    admitted = next((view for view in found if view.cluster_queue), QueueView())
    return replace(
        admitted,
        admitted=sum(view.admitted for view in found),
        message=next((view.message for view in found if view.message), ""),
    )


def unused_quota(cluster_queues: Iterable[ApiObject]) -> dict[str, dict[_Flavor, Decimal]]:
    """Return the quota that each ClusterQueue can still reserve: its own, and what its cohort lends.

    What a hierarchy of cohorts adds is not counted, and neither is quota that Kueue gets by preemption.
    """
    queues = {raw["metadata"]["name"]: (_cohort(raw), _quotas(raw)) for raw in cluster_queues}
    unused: dict[str, dict[_Flavor, Decimal]] = {}
    for name, (cohort, quotas) in queues.items():
        others = [each for other, (of, each) in queues.items() if other != name and cohort and of == cohort]
        unused[name] = {
            key: max(
                min(
                    quota.free + sum((each[key].lent for each in others if key in each), Decimal()),
                    quota.free + quota.borrowing,
                ),
                Decimal(),
            )
            for key, quota in quotas.items()
        }
    return unused


@dataclass(frozen=True)
class _Quota:
    """The quota of a ClusterQueue for a resource of a flavor."""

    nominal: Decimal
    borrowing: Decimal  # the most that it may borrow
    lending: Decimal  # the most that it lends
    reserved: Decimal

    @property
    def free(self) -> Decimal:
        """What is not reserved of its own quota, negative if it has borrowed."""
        return self.nominal - self.reserved

    @property
    def lent(self) -> Decimal:
        """What others may borrow of it, negative if it has borrowed."""
        return min(self.free, self.lending)


def _cohort(raw: ApiObject) -> str:
    spec = raw.get("spec") or {}
    return spec.get("cohortName") or spec.get("cohort") or ""


def _quotas(raw: ApiObject) -> dict[_Flavor, _Quota]:
    reserved = {
        (flavor["name"], each["name"]): parse_quantity(each.get("total", 0))
        for flavor in (raw.get("status") or {}).get("flavorsReservation") or ()
        for each in flavor.get("resources") or ()
    }

    def limit(quota: ApiObject, name: str) -> Decimal:
        value: Decimal = parse_quantity(quota[name]) if quota.get(name) is not None else Decimal("Infinity")
        return value

    return {
        (flavor["name"], quota["name"]): _Quota(
            parse_quantity(quota["nominalQuota"]),
            limit(quota, "borrowingLimit"),
            limit(quota, "lendingLimit"),
            reserved.get((flavor["name"], quota["name"]), Decimal()),
        )
        for group in (raw.get("spec") or {}).get("resourceGroups") or ()
        for flavor in group["flavors"]
        for quota in flavor["resources"]
    }


def _view(raw: ApiObject, unused: Mapping[str, Mapping[_Flavor, Decimal]] | None) -> QueueView:
    status = raw.get("status") or {}
    admission = status.get("admission")
    if not admission or not find_condition(status, _QUOTA_RESERVED):
        return QueueView(message=_message(raw))
    queue = admission["clusterQueue"]
    return QueueView(1, _room(admission, None if unused is None else unused.get(queue, {})), queue)


def _room(admission: ApiObject, unused: Mapping[_Flavor, Decimal] | None) -> int | None:
    """Return how many further replicas the unused quota of the admitted flavors holds."""
    if unused is None:
        return None
    room: int | None = None
    for assignment in admission["podSetAssignments"]:
        count, used = assignment.get("count", 0), assignment.get("resourceUsage") or {}
        flavors = assignment.get("flavors") or {}
        total: Counter[_Flavor] = Counter()
        for resource, flavor in flavors.items():
            total[flavor, resource] = parse_quantity(used.get(resource, 0))
        for key, amount in total.items():
            if count and amount > 0:
                held = floor(unused.get(key, Decimal()) * count / Decimal(amount))
                room = held if room is None else min(room, held)
    return room


def _message(raw: ApiObject) -> str:
    """Return why Kueue has evicted a Workload, or does not admit it; empty if it has."""
    status = raw.get("status") or {}
    found = find_condition(status, _EVICTED) or find_condition(status, _QUOTA_RESERVED, "False") or {}
    return str(found.get("message") or found.get("reason") or "")
