"""The highest generation that workers may name.

The next generation of a job is higher than any that its replicas have been in, even if the service has lost
its state. A worker that names the highest number would leave none for the controller.
"""

from adascale_api.errors import FieldError, InvalidInputError
from adascale_api.request_models import GainReportBody
from adascale_core.messages import Registration

EPOCH = 1_577_836_800.0
"""Seconds since 1970 of the beginning of 2020, before which no job ran."""
_FIELDS = ("generation", "assigned", "stepped")


def require_reachable(message: Registration | GainReportBody, now: float) -> None:
    """Refuse a generation that no job can have reached: more than one per second since `EPOCH`.

    Raises:
        InvalidInputError: a field names such a generation.
    """
    highest = max(int(now - EPOCH), 1)
    for name in _FIELDS:
        generation = getattr(message, name, None) or 0
        if generation > highest:
            expected = f"at most {highest}, the number of generations that a job can have had until now"
            raise InvalidInputError([FieldError(field=name, got=str(generation), expected=expected)])
