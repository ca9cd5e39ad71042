"""The newest checkpoint of a job."""

from __future__ import annotations

import json
from pathlib import Path

from adascale_core.checkpoint_manifest import Manifest, manifest_number


def newest_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of the newest checkpoint in `folder`; None if it has no checkpoint.

    A manifest that cannot be read is skipped: the trainer reports damaged checkpoints.
    """
    if not folder.is_dir():
        return None
    numbered = {manifest_number(path.name): path for path in folder.iterdir()}
    for number in sorted((number for number in numbered if number is not None), reverse=True):
        try:
            return Manifest.from_json(json.loads(numbered[number].read_bytes()))
        except (OSError, ValueError):
            continue
    return None
