"""What the newest checkpoint of a job says of it: where it stands, and what came of it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_MANIFEST = re.compile(r"checkpoint-(\d+)\.json\Z")


@dataclass(frozen=True)
class CheckpointInfo:
    """A saved state of a job.

    Args:
        step: optimizer steps made.
        progress: steps at `batch_size` made.
        finished: whether the program had come to its end.
        result: what the program told of its result.
    """

    step: int
    progress: float
    finished: bool
    result: Mapping[str, float | str]


def newest(folder: Path) -> CheckpointInfo | None:
    """The newest saved state in a folder of checkpoints, if there is one.

    A manifest that can't be read is passed over: whether its state is whole is the trainer's to say.
    """
    numbers = {}
    if folder.is_dir():
        numbers = {int(match[1]): file for file in folder.iterdir() if (match := _MANIFEST.match(file.name))}
    for number in sorted(numbers, reverse=True):
        try:
            told = json.loads(numbers[number].read_bytes())
            return CheckpointInfo(told["step"], told["progress"], told["finished"], told.get("result") or {})
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None
