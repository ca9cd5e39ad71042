"""What the deadline of a job asks for, for people, before anything is measured."""

from __future__ import annotations

from adascale_controller.formatting import count, significant
from adascale_controller.job import Job


def describe_deadline(job: Job) -> str | None:
    """Return what the deadline of a job needs, and where to see whether it can be met; None without one."""
    seconds, steps = job.completion_deadline_seconds, job.spec.steps
    if seconds is None:
        return None
    if steps is None:
        need = (
            "can be compared with the end of training once the program reports it: set scaleInvariantSteps "
            "or trainSamples"
        )
    else:
        need = f"needs {significant(steps / seconds)} steps at batchSize per second for {count(steps)} steps"
    return (
        f"completionDeadlineSeconds {count(seconds)} {need}. Whether a replica count meets it is predicted "
        "from step times, of this job or of earlier jobs of its template: see the condition "
        "DeadlineFeasible, or the messages of `adascale run`"
    )
