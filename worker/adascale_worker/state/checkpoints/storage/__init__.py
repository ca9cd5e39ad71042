"""Where checkpoints are stored: files that never change, in a folder or in an object store.

Knows nothing of what is in the files. `open_storage` chooses the implementation by the location. Only
`object_store` imports fsspec, because a folder must work without it.
"""

from __future__ import annotations

import re
from pathlib import Path

from adascale_worker.state.checkpoints.storage.interface import Storage

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(location: str | Path) -> bool:
    """Whether a location is the URL of an object store rather than a folder."""
    return isinstance(location, str) and _URL.match(location) is not None


def open_storage(location: str | Path) -> Storage:
    """Return the storage at a location, which is not read or written yet.

    Args:
        location: a folder, or a URL such as s3://bucket/prefix. A relative path stays the same folder if the
            program changes its working directory later.

    Raises:
        CheckpointError: no package for this kind of URL is installed, or the URL is invalid.
    """
    if is_url(location):
        from adascale_worker.state.checkpoints.storage.object_store import ObjectStore

        return ObjectStore(str(location))
    from adascale_worker.state.checkpoints.storage.folder import Folder

    return Folder(Path(location).expanduser().absolute())
