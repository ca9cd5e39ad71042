"""The GPUs that a replica requests."""

import pytest

from adascale_core.placement.replica_gpus import describe_unused_gpus, requested_gpus


@pytest.mark.parametrize(
    ("resources", "gpus"),
    [
        (None, 0),
        ({}, 0),
        ({"limits": None}, 0),
        ({"limits": {"cpu": 8, "memory": "8Gi", "example.com/nic": 2}}, 0),
        ({"limits": {"nvidia.com/gpu": 1}}, 1),
        ({"limits": {"nvidia.com/gpu": "8"}, "requests": {"nvidia.com/gpu": 8}}, 8),
        ({"requests": {"amd.com/gpu": 4}}, 4),
        ({"limits": {"nvidia.com/mig-1g.10gb": 2}}, 2),
        ({"limits": {"gpu.intel.com/i915": 2}}, 2),
        ({"limits": {"nvidia.com/gpu": "many"}}, 0),
        ("limits", 0),
    ],
)
def test_the_gpus_of_a_container_are_counted(resources: object, gpus: int) -> None:
    assert requested_gpus(resources) == gpus


def test_more_than_one_gpu_for_a_replica_is_warned_of() -> None:
    assert describe_unused_gpus(0) is describe_unused_gpus(1) is None
    assert (describe_unused_gpus(8) or "").startswith("a replica has 8 GPUs and uses 1 of them")
