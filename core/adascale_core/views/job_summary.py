"""What a list shows of a job: its state, its latest gain, and how long it will still train."""

from __future__ import annotations

from dataclasses import dataclass

from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.message import Message
from adascale_core.messages.reports import GainReport
from adascale_core.rendezvous.rendezvous import Rendezvous
from adascale_core.views.job_state_name import (
    JobStateName,
    registered_state,
    training_replicas,
    waiting_spares,
)
from adascale_core.views.runs import RunView

MAX_SECONDS_LEFT = 1e9
"""A longer prediction of the time left is not shown."""


@dataclass(frozen=True)
class JobSummary(Message):
    """A job in a list.

    Args:
        id: the full job id.
        state: what it does.
        replicas: the number of replicas that train.
        desired: the desired number of replicas; None before the first allocation.
        spares: the number of spare replicas that wait.
        max_replicas: the most replicas that it may get; None if it is not declared.
        created_at: when the service created it, in seconds since 1970.
        generation: the active generation; 0 if there is none.
        failures, disruptions: the numbers of generations that ended by a failure of the program, and by
            another loss.
        batch_size: the batch size that the learning rate was tuned for; None if it is not declared.
        target: the progress at which training ends; None if the program decides.
        latest: the latest report; None if there is none.
        seconds_left: the predicted seconds until its end; None if unknown, or if it does not train.
        run: its runs on this machine; None unless `adascale ui` shows it.
    """

    id: str
    state: JobStateName
    replicas: int
    desired: int | None
    max_replicas: int | None
    created_at: float
    generation: int
    failures: int
    disruptions: int
    batch_size: int | None
    target: float | None
    latest: GainReport | None
    seconds_left: float | None
    run: RunView | None = None
    spares: int = 0


def summarize(
    job_id: str, spec: JobSpec | None, rendezvous: Rendezvous, latest: GainReport | None, created_at: float
) -> JobSummary:
    """Return the summary of a job."""
    replicas = rendezvous.replicas.values()
    desired, active, complete = rendezvous.desired, rendezvous.active, rendezvous.complete
    state = registered_state(desired, active, replicas, broken=rendezvous.broken, complete=complete)
    training = 0 if complete else training_replicas(active, replicas)
    steps = spec.steps if spec is not None else None
    target = steps if steps is not None else latest.target if latest is not None else None
    seconds_left = latest.seconds_left(target) if latest is not None and training else None
    return JobSummary(
        id=job_id,
        state=state,
        replicas=training,
        desired=desired.replicas if desired is not None else None,
        max_replicas=spec.max_replicas if spec is not None else None,
        created_at=created_at,
        generation=active.generation if active is not None else 0,
        failures=rendezvous.failures,
        disruptions=rendezvous.disruptions,
        batch_size=spec.batch_size if spec is not None else None,
        target=target,
        latest=latest,
        seconds_left=seconds_left if seconds_left is not None and seconds_left < MAX_SECONDS_LEFT else None,
        spares=waiting_spares(desired, active, replicas, broken=rendezvous.broken),
    )
