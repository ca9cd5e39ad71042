"""The errors of a training program. All of them are an `AdaScaleError`, and none imports torch.

AdaScaleError
├── InvalidJobError                  the settings of a job
│   └── InvalidBoundsError
├── InvalidJobIdError
├── UnsupportedOptimizerError        also a TypeError
└── WorkerError                      the program or its environment
    ├── CheckpointError
    │   ├── StorageUnavailableError
    │   └── UnusableCheckpointError
    ├── DatasetError
    ├── EnvironmentVariableError
    ├── NonFiniteWeightsError
    ├── ReplicaCheckError            its device, or its network
    ├── ReplicaRefusedError
    ├── ReplicationError             works on one replica
    ├── SparseGradientError          also a TypeError
    ├── UnsupportedStateError
    └── UnsupportedTorchError        also a RuntimeError
"""

from adascale_core.batch.plans import InvalidBoundsError
from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.job_id import InvalidJobIdError
from adascale_worker.errors import (
    CheckpointError,
    DatasetError,
    EnvironmentVariableError,
    NonFiniteWeightsError,
    ReplicaCheckError,
    ReplicaRefusedError,
    ReplicationError,
    SparseGradientError,
    StorageUnavailableError,
    UnsupportedOptimizerError,
    UnsupportedStateError,
    UnsupportedTorchError,
    UnusableCheckpointError,
    WorkerError,
)

__all__ = [
    "AdaScaleError",
    "CheckpointError",
    "DatasetError",
    "EnvironmentVariableError",
    "InvalidBoundsError",
    "InvalidJobError",
    "InvalidJobIdError",
    "NonFiniteWeightsError",
    "ReplicaCheckError",
    "ReplicaRefusedError",
    "ReplicationError",
    "SparseGradientError",
    "StorageUnavailableError",
    "UnsupportedOptimizerError",
    "UnsupportedStateError",
    "UnsupportedTorchError",
    "UnusableCheckpointError",
    "WorkerError",
]
