"""Which package of Lightning the program uses."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
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
    if name is None:
        name = _imported()
    with requires_extra("adascale.lightning", "lightning"):
        return import_module(name)


def _imported() -> Package:
    imported = [each for each in PACKAGES if each in sys.modules]
    if len(imported) > 1:
        raise WorkerError(
            "the program has imported both lightning.pytorch and pytorch_lightning, whose classes are "
            'distinct: pass ElasticStrategy(package="lightning.pytorch"), or package="pytorch_lightning", '
            "the one that its Trainer is imported from"
        )
    if imported:
        return imported[0]
    return next((each for each in PACKAGES if find_spec(each.partition(".")[0]) is not None), PACKAGES[0])
