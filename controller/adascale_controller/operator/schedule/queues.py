"""The Workloads of jobs in Kueue, and the quota that is left for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from math import floor
from typing import Final

from kubernetes.utils import parse_quantity

from adascale_controller.operator.observe.queue import QueueView
from adascale_controller.operator.types.kubernetes import ApiObject

_FINISHED: Final = "Finished"
_EVICTED: Final = "Evicted"
_QUOTA_RESERVED: Final = "QuotaReserved"

_Flavor = tuple[str, str]
"""Names of a flavor and of a resource."""


def read_queues(
    workloads: Iterable[ApiObject], cluster_queues: Sequence[ApiObject] | None
) -> dict[str, QueueView]:
    """Return what Kueue says about Jobs, by the uid of the Job."""
    by_job: dict[str, list[ApiObject]] = {}
    for raw in workloads:
        owner = next(
            (each for each in raw["metadata"].get("ownerReferences") or () if each.get("controller")), None
        )
        if owner is not None and not _is_true(raw, _FINISHED):
            by_job.setdefault(owner["uid"], []).append(raw)
    unused = None if cluster_queues is None else unused_quota(cluster_queues)
    return {uid: _view(found, unused) for uid, found in by_job.items()}


def unused_quota(cluster_queues: Iterable[ApiObject]) -> dict[str, dict[_Flavor, Decimal]]:
    """Return the quota that each ClusterQueue can still reserve: its own, and what its cohort lends.

    What a hierarchy of cohorts adds is not counted, and neither is quota that Kueue gets by preemption.
    """
    found = {raw["metadata"]["name"]: _Quotas(raw) for raw in cluster_queues}
    unused: dict[str, dict[_Flavor, Decimal]] = {}
    for name, quotas in found.items():
        others = [
            each
            for other, each in found.items()
            if other != name and each.cohort and each.cohort == quotas.cohort
        ]
        unused[name] = {key: _unused(key, quotas, others) for key in quotas.nominal}
    return unused


class _Quotas:
    """The quotas of a ClusterQueue by flavor and resource, and what is reserved of them."""

    def __init__(self, raw: ApiObject) -> None:
        spec = raw.get("spec") or {}
        self.cohort = spec.get("cohortName") or spec.get("cohort") or ""
        self.nominal: dict[_Flavor, Decimal] = {}
        self.borrowing: dict[_Flavor, Decimal] = {}
        self.lending: dict[_Flavor, Decimal] = {}
        for group in spec.get("resourceGroups") or ():
            for flavor in group["flavors"]:
                for quota in flavor["resources"]:
                    key = flavor["name"], quota["name"]
                    self.nominal[key] = parse_quantity(quota["nominalQuota"])
                    if quota.get("borrowingLimit") is not None:
                        self.borrowing[key] = parse_quantity(quota["borrowingLimit"])
                    if quota.get("lendingLimit") is not None:
                        self.lending[key] = parse_quantity(quota["lendingLimit"])
        self.reserved: dict[_Flavor, Decimal] = {
            (flavor["name"], each["name"]): parse_quantity(each.get("total", 0))
            for flavor in (raw.get("status") or {}).get("flavorsReservation") or ()
            for each in flavor.get("resources") or ()
        }

    def free(self, key: _Flavor) -> Decimal:
        """What is not reserved of its own quota, negative if it has borrowed."""
        return self.nominal.get(key, Decimal()) - self.reserved.get(key, Decimal())

    def lent(self, key: _Flavor) -> Decimal:
        """What others may borrow of it, negative if it has borrowed."""
        free = self.free(key)
        return min(free, self.lending[key]) if key in self.lending else free


def _unused(key: _Flavor, quotas: _Quotas, others: Iterable[_Quotas]) -> Decimal:
    free = quotas.free(key)
    total = free + sum((other.lent(key) for other in others), Decimal())
    if key in quotas.borrowing:
        total = min(total, free + quotas.borrowing[key])
    return max(total, Decimal())


def _view(
    workloads: Sequence[ApiObject], unused: Mapping[str, Mapping[_Flavor, Decimal]] | None
) -> QueueView:
    ordered = sorted(
        workloads, key=lambda raw: (raw["metadata"]["creationTimestamp"], raw["metadata"]["name"])
    )
    admitted = [raw for raw in ordered if _is_true(raw, _QUOTA_RESERVED) and (raw["status"].get("admission"))]
    pending = [raw for raw in ordered if raw not in admitted]
    message = _message((pending or ordered)[-1])
    if not admitted:
        return QueueView(message=message)
    admission = admitted[-1]["status"]["admission"]
    queue = admission["clusterQueue"]
    count = sum(each.get("count", 0) for each in admission["podSetAssignments"])
    return QueueView(
        count, _room(admission, None if unused is None else unused.get(queue, {})), queue, message
    )


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
    for kind, status in ((_EVICTED, "True"), (_QUOTA_RESERVED, "False")):
        for condition in (raw.get("status") or {}).get("conditions") or ():
            if condition["type"] == kind and condition["status"] == status:
                return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _is_true(raw: ApiObject, kind: str) -> bool:
    conditions = (raw.get("status") or {}).get("conditions") or ()
    return any(each["type"] == kind and each["status"] == "True" for each in conditions)
