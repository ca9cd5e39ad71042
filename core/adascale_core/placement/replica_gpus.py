"""The GPUs that a replica requests, of which each of its processes uses one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

_GPU: Final = re.compile(r"(nvidia|amd)\.com/(gpu|gpu\.shared|mig-.+)|gpu\.intel\.com/(i915|xe)")
"""The names that the device plugins of the vendors give to their GPUs, and to parts of one."""


def requested_gpus(resources: object) -> int:
    """Return how many GPUs a container requests. Invalid quantities are left to the API server."""
    if not isinstance(resources, Mapping):
        return 0
    found: dict[str, int] = {}
    for section in (resources.get("limits"), resources.get("requests")):
        for name, quantity in section.items() if isinstance(section, Mapping) else ():
            if _GPU.fullmatch(str(name)) and str(quantity).isdecimal():
                found[name] = max(int(quantity), found.get(name, 0))
    return sum(found.values())


def describe_unused_gpus(gpus: int, processes: int | None = None) -> str | None:
    """Return the warning about a replica that has more or fewer GPUs than it uses; None if it uses all."""
    if processes is not None:
        if gpus in (0, processes):
            return None
        count = "1 process" if processes == 1 else f"{processes} processes"
        return (
            f"a replica requests {gpus} GPUs for {count}, each of which uses one GPU: request {processes} "
            f"(limits: {{nvidia.com/gpu: {processes}}}), or set processesPerReplica to {gpus}"
        )
    if gpus < 2:
        return None
    return (
        f"a replica has {gpus} GPUs and uses 1 of them, because it is one process on one GPU. Request 1 GPU "
        "for each replica (limits: {nvidia.com/gpu: 1}), and raise maxReplicas instead; or shard the model "
        "over several processes, whose number is processesPerReplica"
    )
