"""The training side: the AdaScale optimizer, the elastic trainer, and the agent that starts it.

This package may import torch, but only where a trainer needs it: an agent runs beside the trainer and
starts without it. It never imports the api or the controller: it meets them through HTTP, in the words
of `adascale_core.messages`. Importing it changes nothing in the process.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adascale_worker.adascale import AdaScale as AdaScale
    from adascale_worker.errors import StaleBatchSizeError as StaleBatchSizeError
    from adascale_worker.trainer import ElasticTrainer as ElasticTrainer
    from adascale_worker.trainer import ReentryState as ReentryState

_HOMES = {
    "AdaScale": "adascale_worker.adascale",
    "ElasticTrainer": "adascale_worker.trainer",
    "ReentryState": "adascale_worker.trainer",
    "StaleBatchSizeError": "adascale_worker.errors",
}

__all__ = ["AdaScale", "ElasticTrainer", "ReentryState", "StaleBatchSizeError"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
