"""What can go wrong in a worker through no defect of ours."""

from adascale_core.errors import AdaScaleError


class WorkerError(AdaScaleError):
    """A training program, or its surroundings, that cannot be worked with."""


class EnvironmentVariableError(WorkerError):
    """An environment variable that does not say what it should."""

    exit_code = 2


class StaleBatchSizeError(WorkerError):
    """An epoch is trained with a local batch size that is no longer the current one."""


class DatasetError(WorkerError):
    """A data set that the job cannot be trained on."""

    exit_code = 2


class CheckpointError(WorkerError):
    """State that cannot be saved or restored."""
