"""Errors of a worker that its user can correct."""

from adascale_core.errors import AdaScaleError


class WorkerError(AdaScaleError):
    """The training program, or its environment, cannot be used as it is."""


class EnvironmentVariableError(WorkerError):
    """An environment variable has an invalid value."""

    exit_code = 2


class StaleBatchSizeError(WorkerError):
    """The program trains an epoch with a local batch size that is no longer current."""


class DatasetError(WorkerError):
    """The job cannot train on this data set."""

    exit_code = 2


class CheckpointError(WorkerError):
    """A checkpoint cannot be saved or restored."""
