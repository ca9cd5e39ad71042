"""The memory of a process that runs tests."""

import ctypes
import gc


def release_free_memory() -> None:
    """Return freed memory to the system: new memory would otherwise lie in pages that are mapped already."""
    # What earlier tests have left in cycles would be freed later, while memory is measured.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
