"""The device of a replica: its choice, the check of its arithmetic, its clock and its use.

Products of matrices of small integers are exact in each precision, in any order of additions, so every
correct device computes the same. They are compared with products of integers, which the CPU computes. The
check changes neither the state of random generators nor the program's settings.
"""

from __future__ import annotations

import ctypes
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

REPETITIONS: Final = 3
"""How often each product is computed: a device that fails may be right most of the time."""
_SIZE: Final = 256
"""Rows and columns of the blocks that the matrices repeat."""
_LIMITS: Final = {torch.float32: 100, torch.float16: 2, torch.bfloat16: 1}
"""The largest element of the matrices, by precision. Sums of 256 products are exact: below 2**24 in float32,
whose factors have the 8 bits that TensorFloat-32 and bfloat16 keep, and at most 2**11 and 2**8 in the others.
"""


def find_fault(device: torch.device) -> str | None:
    """Return what is wrong with the arithmetic of a device; None if nothing was found.

    A device without the little memory that this takes is not checked, nor one on which PyTorch refuses an
    operation of the check.
    """
    if device.type == "cuda":
        # So that errors of earlier work of the program are not taken for those of the check.
        torch.cuda.synchronize(device)
    fault = _fault(device)
    if fault is None:
        return None
    described = f"device {device}"
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        described += f" ({properties.name}, {properties.uuid})"
    return f"{described} has failed its check: {fault}"


def _fault(device: torch.device) -> str | None:
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False), _any_algorithms():
            products = (_wrong_product(device, dtype) for dtype in _precisions(device))
            fault = next(filter(None, products), None)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return fault
    except RuntimeError as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason:
            return None
        if isinstance(error, torch.AcceleratorError) or "CUBLAS_STATUS_EXECUTION_FAILED" in reason:
            return f"it reports an error: {reason}"
        print(f"adascale: device {device} was not checked: {reason}", file=sys.stderr, flush=True)
        return None


@contextmanager
def _any_algorithms() -> Iterator[None]:
    """Allow all algorithms: cuBLAS has deterministic ones only with a variable in the environment."""
    mode = torch.get_deterministic_debug_mode()
    # Not `use_deterministic_algorithms`, which imports the compiler.
    torch.set_deterministic_debug_mode(0)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _precisions(device: torch.device) -> list[torch.dtype]:
    if device.type != "cuda":
        return [torch.float32]
    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return [dtype for dtype in _LIMITS if dtype is not torch.bfloat16 or has_bfloat16]


def _wrong_product(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return which element of a product of matrices is wrong; None if all are right."""
    limit, generator = _LIMITS[dtype], torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-limit, limit + 1, (_SIZE, _SIZE), generator=generator, dtype=torch.int32, device="cpu")
        for _ in range(2)
    )
    # With these counts all multiprocessors of a large GPU, and several cores of a CPU, compute a part.
    count = 8 if device.type == "cuda" else 2
    left, right, expected = (
        block.to(dtype).to(device).repeat(repeats)
        for block, repeats in ((a, (count, 1)), (b, (1, count)), (a @ b, (count, count)))
    )
    for repetition in range(1, REPETITIONS + 1):
        product = torch.matmul(left, right)
        # Also true where the product is NaN.
        wrong = (product != expected).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            got, should = product[row, column].item(), expected[row, column].item()
            name = str(dtype).removeprefix("torch.")
            return (
                f"in a product of {name} matrices, number {repetition} of {REPETITIONS}, {len(wrong)} of "
                f"{product.numel()} elements are wrong. Expected {should:.0f} at [{row}, {column}], got {got}"
            )
    return None


_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
"""Has the same content in all containers of a host."""


def select_device(requested: torch.device | str | None, local_rank: int) -> torch.device:
    """Return the device of a replica: by default its own GPU, or the CPU if there is no GPU."""
    if requested is not None:
        device = torch.device(requested)
        if device.type != "cuda" or device.index is not None:
            return device
    elif not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))


def gpu_names(device: torch.device) -> tuple[str, str]:
    """Return what identifies a GPU in every process of a cluster: its id, and its host and address there.

    The MIG instances of a GPU have ids of their own, and the same address. NCCL takes them for one GPU.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    address = f"{properties.pci_domain_id:x}:{properties.pci_bus_id:x}:{properties.pci_device_id:x}"
    return str(properties.uuid), f"{socket.gethostname()} {boot} {address}"


Label = TypeVar("Label")
Span = tuple[Any, Any]
"""Two marks of a clock, from one to the other."""

MAX_PENDING: Final = 256
"""Measurements that wait for the device at the same time; older ones are left out. CUDA lets a program run
ahead by about a thousand kernels."""


class DeviceClock:
    """The time of the host; of a GPU, events in its current stream, which are never waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._gpu = device if device is not None and device.type == "cuda" else None

    def mark(self) -> Any:
        """Return a mark for the time at which the device has done what was launched so far."""
        if self._gpu is None:
            # The work of other devices is done when its call returns.
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._gpu))
        return event

    def seconds_between(self, start: Any, end: Any) -> float | None:
        """Return the seconds from one mark to another; None if the device has not passed both."""
        if self._gpu is None:
            return float(end - start)
        # Both are queried: after a change of the current stream, they are in different ones.
        if not (start.query() and end.query()):
            return None
        return float(start.elapsed_time(end)) / 1000

    def take(self, pending: deque[tuple[Label, list[Span]]]) -> Iterator[tuple[Label, float]]:
        """Remove and yield the measurements that are complete, with their seconds. Does not wait.

        `pending` has measurements in their order, which the device may not have made yet: what is measured,
        and the spans whose times are added.
        """
        while pending:
            label, spans = pending[0]
            seconds = [self.seconds_between(*span) for span in spans]
            known = [each for each in seconds if each is not None]
            if len(known) < len(seconds):
                return
            pending.popleft()
            yield label, sum(known)


LIBRARY: Final = "libnvidia-ml.so.1"
_SUCCESS: Final = 0


class GpuMonitor:
    """Reads the use of a GPU, if it has an NVML, by one of its ids."""

    def __init__(self, ids: Sequence[str] = (), library: str = LIBRARY) -> None:
        self._nvml: Any = None
        self._device = ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL(library) if ids else None
            if nvml is None or nvml.nvmlInit_v2() != _SUCCESS:
                return
            for each in ids:
                place = ctypes.byref(self._device)
                if nvml.nvmlDeviceGetHandleByUUID(each.encode(), place) == _SUCCESS:
                    self._nvml = nvml
                    return
        except (OSError, AttributeError):
            return  # no NVIDIA driver, or one without these functions

    def read(self) -> tuple[float | None, float | None]:
        """Return the share of the last moments in which it computed, and of its memory that is used.

        None for what is not measured, as the first of a MIG instance. Takes microseconds, and does not wait.
        """
        if self._nvml is None:
            return None, None
        # nvmlUtilization_t: percent for the GPU and its memory. nvmlMemory_t: bytes in all, free and used.
        percent, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
        measures = self._nvml.nvmlDeviceGetUtilizationRates(self._device, ctypes.byref(percent)) == _SUCCESS
        knows = self._nvml.nvmlDeviceGetMemoryInfo(self._device, ctypes.byref(memory)) == _SUCCESS
        return (
            min(percent[0] / 100, 1.0) if measures else None,
            min(memory[2] / memory[0], 1.0) if knows and memory[0] else None,
        )


def monitor_of(device: torch.device) -> GpuMonitor:
    """Return what measures a device."""
    if device.type != "cuda":
        return GpuMonitor()
    properties: Any = torch.cuda.get_device_properties(device)
    # Torch has the id without the kind of the device in front.
    return GpuMonitor([f"{kind}-{properties.uuid}" for kind in ("GPU", "MIG")])
