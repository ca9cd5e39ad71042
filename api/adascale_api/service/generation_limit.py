"""The highest generation that workers may name.

The next generation of a job is higher than any that its replicas have been in, even if the service has lost
its state. A worker that names the highest number would leave none for the controller.
"""

from adascale_api.data.job import Job
from adascale_api.errors import FieldError, InvalidInputError
from adascale_core.messages.registration import Registration
from adascale_core.messages.reports import GainReport

EPOCH = 1_577_836_800.0
"""Seconds since 1970 of the beginning of 2020, before which no job ran."""
LOST_GENERATIONS = 100_000
"""Generations that a job may have had before the service lost its data, or went back to a backup."""
_FIELDS = ("generation", "assigned", "stepped")


def require_reachable(message: Registration | GainReport, job: Job | None, now: float) -> None:
    """Refuse a generation that the job can't have reached.

    That is one above the desired generation by more than `LOST_GENERATIONS` and one per second since the job
    was created, or above one per second since `EPOCH`.
    """
    known, age = 0, 0.0
    if job is not None:
        known = 0 if job.rendezvous.desired is None else job.rendezvous.desired.generation
        age = now - job.created_at
    highest = min(known + int(max(age, 0.0)) + LOST_GENERATIONS, max(int(now - EPOCH), 1))
    for name in _FIELDS:
        generation = getattr(message, name, None) or 0
        if generation > highest:
            expected = f"at most {highest}, the generations that the job can have had until now"
            raise InvalidInputError([FieldError(field=name, got=str(generation), expected=expected)])
