"""The use of a GPU, from NVML."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from adascale_worker.process.device import GpuMonitor, monitor_of

LIBRARY = r"""
#include <string.h>
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned long long total, free, used; } Memory;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *id, void **device) {
    *device = (void *)0x1234567812345678;
    return strcmp(id, "GPU-known") && strcmp(id, "MIG-known") ? 6 : (*device = (void *)id, 0);
}
int nvmlDeviceGetUtilizationRates(void *device, Utilization *use) {
    if (!strcmp(device, "MIG-known")) return 3;  /* NVML_ERROR_NOT_SUPPORTED */
    use->gpu = 75; use->memory = 10;
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    memory->total = 80ull << 30; memory->used = 20ull << 30; memory->free = 60ull << 30;
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library with the documented functions of NVML, for a machine without its driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) is installed")
    folder: Path = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(LIBRARY)
    target = folder / "libnvml.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, folder / "nvml.c"], check=True)
    return str(target)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        (["GPU-known", "MIG-known"], (0.75, 0.25)),
        # The use of an instance is not measured.
        (["GPU-instance", "MIG-known"], (None, 0.25)),
        (["GPU-unknown"], (None, None)),
    ],
)
def test_a_gpu_is_read_by_its_id(
    library: str, ids: list[str], expected: tuple[float | None, float | None]
) -> None:
    assert GpuMonitor(ids, library).read() == expected


@pytest.mark.parametrize("library", ["libnothing.so", "libc.so.6"])
def test_without_nvml_nothing_is_measured(library: str) -> None:
    assert GpuMonitor(["GPU-known"], library).read() == (None, None)
    assert monitor_of(torch.device("cpu")).read() == (None, None)


@pytest.mark.gpu
def test_the_memory_of_a_real_gpu_is_read() -> None:
    device = torch.device("cuda", 0)
    kept = torch.zeros(2**28, device=device)
    torch.cuda.synchronize()
    use, memory = monitor_of(device).read()
    assert memory is not None
    assert memory >= kept.nbytes / torch.cuda.get_device_properties(device).total_memory
    assert use is None or 0 <= use <= 1
