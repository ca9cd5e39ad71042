"""Errors that a user can cause, one tree.

Every message says what was got, what is allowed, and what to do. Programs print the message of an
`AdaScaleError` and leave with its exit code; only a defect of ours shows a traceback.
"""


class AdaScaleError(Exception):
    """Something that the user can put right."""

    exit_code = 1


class InvalidJobError(AdaScaleError):
    """A job, or the bounds in it, that no number of replicas could satisfy."""

    exit_code = 2
