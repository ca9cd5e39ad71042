"""Which package of Lightning the program uses."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from types import ModuleType
from typing import Literal

from adascale_core.errors import requires_extra
from adascale_worker.errors import WorkerError

Package = Literal["lightning.pytorch", "pytorch_lightning"]

PACKAGES: tuple[Package, ...] = ("lightning.pytorch", "pytorch_lightning")


def import_package(name: Package | None) -> ModuleType:
    """Import the package whose `Trainer` the program uses."""
    if name is not None and name not in PACKAGES:
        raise WorkerError(
            f'ElasticStrategy got package={name!r}: it must be "lightning.pytorch" or "pytorch_lightning"'
        )
    imported = [each for each in PACKAGES if each in sys.modules]
    if name is None and len(imported) > 1:
        raise WorkerError(
            "the program has imported both lightning.pytorch and pytorch_lightning, whose classes are "
            'distinct: pass ElasticStrategy(package="lightning.pytorch"), or package="pytorch_lightning", '
            "the one that its Trainer is imported from"
        )
    installed = (each for each in PACKAGES if find_spec(each.partition(".")[0]) is not None)
    with requires_extra("adascale.lightning", "lightning"):
        return import_module(name or next(chain(imported, installed, PACKAGES)))
