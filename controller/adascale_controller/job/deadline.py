"""Whether a job can be complete by its `completionDeadlineSeconds`, which is a target and ends no job."""

from __future__ import annotations

from adascale_controller.formatting import plural
from adascale_controller.job.reasons import Reason
from adascale_core.decision.deadline import Feasibility


def deadline_outlook(
    target: str, feasibility: Feasibility | None, *, has_passed: bool, limit: int | None
) -> tuple[Reason, str] | None:
    """Return whether a deadline can be met by a job of at most `limit` replicas, as a reason and in words.

    None as long as nothing is predicted.
    """
    if has_passed:
        return Reason.DEADLINE_MISSED, f"Not complete within {target}; it goes on"
    if feasibility is None:
        return None
    predicted = f"{target}, as predicted from {feasibility.source}"
    if feasibility.count is None:
        return Reason.NO_COUNT_SUFFICES, f"No replica count meets {predicted}"
    counts = plural(feasibility.count, "replica")
    if limit is not None and feasibility.count > limit:
        message = f"{counts} or more would meet {predicted}, and it has at most {limit}"
        return Reason.NO_COUNT_SUFFICES, message
    return Reason.COUNT_SUFFICES, f"{counts} or more, from now on, meet {predicted}"
