"""Accelerate: `ElasticAccelerator` in place of `Accelerator`, see docs/frameworks.md."""

from adascale_core.errors import requires_extra

with requires_extra("adascale.accelerate", "accelerate"):
    from adascale_frameworks.accelerate.accelerator import ElasticAccelerator

__all__ = ["ElasticAccelerator"]
