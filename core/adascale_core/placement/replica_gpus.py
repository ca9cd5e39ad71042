"""The GPUs that a replica requests, of which it uses one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_GPU: Final = re.compile(r"(nvidia|amd)\.com/(gpu|gpu\.shared|mig-.+)|gpu\.intel\.com/(i915|xe)")
"""The names that the device plugins of the vendors give to their GPUs, and to parts of one."""


def requested_gpus(resources: object) -> int:
    """Return how many GPUs a container requests.

    Args:
        resources: its `resources`, as in a pod; what is no valid quantity is left to the API server.
    """
    if not isinstance(resources, Mapping):
        return 0
    found: dict[str, int] = {}
    for section in (resources.get("limits"), resources.get("requests")):
        for name, quantity in section.items() if isinstance(section, Mapping) else ():
            if _GPU.fullmatch(str(name)) and str(quantity).isdecimal():
                found[name] = max(int(quantity), found.get(name, 0))
    return sum(found.values())


def describe_unused_gpus(gpus: int) -> str | None:
    """Return the warning about a replica that has `gpus` GPUs; None if it uses all of them."""
    if gpus < 2:
        return None
    return (
        f"a replica has {gpus} GPUs and uses 1 of them, because it is one process on one GPU. Request 1 GPU "
        "for each replica (limits: {nvidia.com/gpu: 1}), and raise maxReplicas instead"
    )
