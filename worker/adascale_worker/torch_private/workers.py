"""Worker processes of DataLoader.

A data set that is read in a worker process may divide itself among the worker processes, according to
`torch.utils.data.get_worker_info()`, as data sets of Hugging Face do. The trainer divides its records, and
torch has no public way to let a data set be read completely there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils.data import _utils, get_worker_info

from adascale_worker.torch_private import private_part


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` return None, as in the main process.

    Uses `torch.utils.data._utils.worker._worker_info`.
    """
    info = get_worker_info()
    if info is None:
        yield
        return
    worker = private_part(_utils, "worker", "to read a whole stream in a worker process")
    private_part(worker, "_worker_info", "to read a whole stream in a worker process")
    worker._worker_info = None
    try:
        yield
    finally:
        worker._worker_info = info
