"""The base classes of errors that a user can cause.

A message states the value that was found, the values that are allowed, and what to do. Programs print the
message of an `AdaScaleError` and exit with its exit code. A traceback is only shown for a defect of the
program.
"""


class AdaScaleError(Exception):
    """An error that the user can correct."""

    exit_code = 1


class InvalidJobError(AdaScaleError):
    """A job whose bounds no number of replicas satisfies."""

    exit_code = 2
