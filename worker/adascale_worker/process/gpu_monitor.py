"""The use of a GPU and of its memory, from NVIDIA's management library (NVML), which comes with the driver.

Only its documented functions are called, by ctypes: the package that wraps them would be a dependency for two
numbers. Source of the names and types: NVML API reference, "Device Queries".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

LIBRARY: Final = "libnvidia-ml.so.1"
_SUCCESS: Final = 0


class _Utilization(ctypes.Structure):
    """nvmlUtilization_t: percent of the last sample period."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    """nvmlMemory_t: bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class GpuUse:
    """The use of a GPU."""

    # the share of the last moments in which it computed, from 0 to 1; None if it is not measured, as for
    # a MIG instance
    use: float | None = None
    # the share of its memory that all its processes use, from 0 to 1; None if unknown
    memory: float | None = None


class GpuMonitor:
    """Reads the use of a GPU, if it has an NVML."""

    def __init__(self, ids: Sequence[str] = (), library: str = LIBRARY) -> None:
        self._nvml: Any = None
        self._device = ctypes.c_void_p()
        if not ids:
            return
        try:
            nvml = ctypes.CDLL(library)
            if nvml.nvmlInit_v2() != _SUCCESS:
                return
            for each in ids:
                place = ctypes.byref(self._device)
                if nvml.nvmlDeviceGetHandleByUUID(each.encode(), place) == _SUCCESS:
                    self._nvml = nvml
                    return
        except (OSError, AttributeError):
            return  # no NVIDIA driver, or one without these functions

    def read(self) -> GpuUse:
        """Return the present use. Takes microseconds, and does not wait for the GPU."""
        if self._nvml is None:
            return GpuUse()
        utilization, memory = _Utilization(), _Memory()
        use: float | None = None
        used: float | None = None
        if self._nvml.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(utilization)) == _SUCCESS:
            use = min(utilization.gpu / 100, 1.0)
        if (
            self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) == _SUCCESS
            and memory.total
        ):
            used = min(memory.used / memory.total, 1.0)
        return GpuUse(use, used)


NO_GPU: Final = GpuMonitor()
"""Measures nothing."""


def monitor_of(device: torch.device) -> GpuMonitor:
    """Return what measures a device."""
    if device.type != "cuda":
        return NO_GPU
    properties: Any = torch.cuda.get_device_properties(device)
    # Torch has the id without the kind of the device in front.
    return GpuMonitor([f"{kind}-{properties.uuid}" for kind in ("GPU", "MIG")])
