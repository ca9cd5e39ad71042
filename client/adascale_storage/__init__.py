"""Where checkpoints are stored: files that never change, in a folder or in an object store.

The worker writes and reads them; `adascale run` and the commands beside it read and delete them. This package
may import `adascale_core` and fsspec. It does not know what is in the files. `open_storage` chooses the
implementation by the location. Only `object_store` imports fsspec, because a folder must work without it.
"""

from __future__ import annotations

import re
from pathlib import Path

from adascale_storage.interface import Storage

_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(location: str | Path) -> bool:
    """Whether a location is the URL of an object store rather than a folder."""
    return isinstance(location, str) and _URL.match(location) is not None


def open_storage(location: str | Path, *, person_waits: bool = False) -> Storage:
    """Return the storage at a location, which is not read or written yet."""
    if is_url(location):
        from adascale_storage.object_store import ObjectStore

        return ObjectStore(str(location), person_waits=person_waits)
    from adascale_storage.folder import Folder

    return Folder(Path(location).expanduser().absolute())
