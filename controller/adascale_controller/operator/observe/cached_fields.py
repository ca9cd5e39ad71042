"""What is kept in memory of the objects that the operator watches: the parts that it reads."""

from __future__ import annotations

from adascale_controller.operator.observe.pods import Pod, read_pod
from adascale_controller.operator.types.kubernetes import ApiObject, Resource, only, shared

Cached = ApiObject | Pod
"""A pod, or another object as JSON."""


def cached_fields(resource: Resource, raw: ApiObject) -> Cached:
    """Return an object without the parts that the operator does not read, such as the images of a node."""
    if resource is Resource.PODS:
        return read_pod(raw)
    kept = {
        **raw,
        "metadata": {name: each for name, each in raw["metadata"].items() if name != "managedFields"},
    }
    if resource is Resource.NODES:
        kept["status"] = only(raw.get("status") or {}, ("allocatable", "conditions"))
    found: ApiObject = shared(kept)
    return found
