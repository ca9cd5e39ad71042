"""The training side: the AdaScale optimizer, the elastic trainer, and the agent that starts it.

Modules of the trainer import torch. The agent, which runs beside the trainer, does not, so that it starts
fast. This package never imports the api or the controller: it exchanges `adascale_core.messages` with them
over HTTP. Importing it has no side effects: public names are imported on first access.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adascale_worker.adascale import AdaScale as AdaScale
    from adascale_worker.errors import StaleBatchSizeError as StaleBatchSizeError
    from adascale_worker.loop.evaluation import Evaluation as Evaluation
    from adascale_worker.scaling.rules import SecondMomentOptimizer as SecondMomentOptimizer
    from adascale_worker.trainer import ElasticTrainer as ElasticTrainer
    from adascale_worker.trainer import ReentryState as ReentryState

_MODULE_OF = {
    "AdaScale": "adascale_worker.adascale",
    "ElasticTrainer": "adascale_worker.trainer",
    "Evaluation": "adascale_worker.loop.evaluation",
    "ReentryState": "adascale_worker.trainer",
    "SecondMomentOptimizer": "adascale_worker.scaling.rules",
    "StaleBatchSizeError": "adascale_worker.errors",
}

__all__ = [
    "AdaScale",
    "ElasticTrainer",
    "Evaluation",
    "ReentryState",
    "SecondMomentOptimizer",
    "StaleBatchSizeError",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
