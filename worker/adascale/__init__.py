"""AdaScale Operator: elastic training of PyTorch models, at the accuracy of the small batch.

What a training program imports: `from adascale import ElasticTrainer`, or `AdaScale` for the optimizer alone.
`adascale.errors` has the errors. Importing this package has no side effects, and does not import torch: each
name is imported on its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adascale import errors as errors
    from adascale_worker.adascale import AdaScale as AdaScale
    from adascale_worker.loop.evaluation import Evaluation as Evaluation
    from adascale_worker.scaling.observation import Observation as Observation
    from adascale_worker.scaling.rules import SecondMomentOptimizer as SecondMomentOptimizer
    from adascale_worker.scaling.rules import adam_hyperparameters as adam_hyperparameters
    from adascale_worker.trainer import ElasticTrainer as ElasticTrainer
    from adascale_worker.trainer import ReentryState as ReentryState

_MODULE_OF = {
    "AdaScale": "adascale_worker.adascale",
    "ElasticTrainer": "adascale_worker.trainer",
    "Evaluation": "adascale_worker.loop.evaluation",
    "Observation": "adascale_worker.scaling.observation",
    "ReentryState": "adascale_worker.trainer",
    "SecondMomentOptimizer": "adascale_worker.scaling.rules",
    "adam_hyperparameters": "adascale_worker.scaling.rules",
}

__all__ = [
    "AdaScale",
    "ElasticTrainer",
    "Evaluation",
    "Observation",
    "ReentryState",
    "SecondMomentOptimizer",
    "adam_hyperparameters",
    "errors",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("adascale.errors")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
