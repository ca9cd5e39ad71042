"""Errors of a worker that its user can correct."""

from adascale_core.errors import AdaScaleError, InvalidJobError
from adascale_core.failures import (
    EXIT_CHECK_FAILED,
    EXIT_INVALID_PROGRAM,
    EXIT_REFUSED,
    EXIT_SINGLE_REPLICA,
)
from adascale_core.job_id import InvalidJobIdError


class WorkerError(AdaScaleError):
    """The training program, or its environment, cannot be used as it is: it would fail again."""

    exit_code = EXIT_INVALID_PROGRAM


class ReplicationError(WorkerError):
    """The training program cannot be used on several replicas as it is. It may work on one."""

    exit_code = EXIT_SINGLE_REPLICA


class ReplicaRefusedError(WorkerError):
    """The metrics service refuses the replica, which has another version than the replicas that train."""

    exit_code = EXIT_REFUSED


class ReplicaCheckError(WorkerError):
    """The replica does not join the others: its device computes wrong results, or it does not reach them."""

    exit_code = EXIT_CHECK_FAILED


class EnvironmentVariableError(WorkerError):
    """An environment variable has an invalid value."""


class UnsupportedOptimizerError(AdaScaleError, TypeError):
    """AdaScale cannot scale the learning rate of the optimizer, or cannot measure its parameters."""

    exit_code = EXIT_INVALID_PROGRAM


class UnsupportedTorchError(WorkerError, RuntimeError):
    """The installed torch does not have something that the worker needs."""


class SparseGradientError(WorkerError, TypeError):
    """A parameter has sparse gradients, whose norm is not that of a sum of micro-gradients."""


class NonFiniteWeightsError(WorkerError):
    """Weights are NaN or infinite."""


class DatasetError(WorkerError):
    """The job cannot train on this data set."""


FROM_SCRATCH = "start from scratch (adascale run --fresh, or another checkpoint folder)"
"""What can be done about any checkpoint that the program cannot use."""


class CheckpointError(WorkerError):
    """A checkpoint cannot be saved or restored."""

    exit_code = 1


class StorageUnavailableError(CheckpointError):
    """The storage of checkpoints cannot be read or written now. Trying again may help."""


class UnusableCheckpointError(CheckpointError):
    """All checkpoints are damaged, or were saved by another program or with other settings."""

    exit_code = EXIT_INVALID_PROGRAM


class UnsupportedStateError(WorkerError):
    """A state contains an object that cannot be saved.

    Args:
        path: where the object is in the state, e.g. "['layers'][0]".
        problem: what is wrong with it.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path or 'the state'} {problem}")
        self.path = path
        self.problem = problem


def exit_code(error: AdaScaleError) -> int:
    """Return the exit code of a trainer or an agent that `error` ends.

    The exit codes of an invalid job and of an invalid job id are for command lines.
    """
    invalid = isinstance(error, InvalidJobError | InvalidJobIdError)
    return EXIT_INVALID_PROGRAM if invalid else error.exit_code
