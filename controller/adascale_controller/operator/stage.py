"""What a job is up to: whether it may run, has to stop, or has come to its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from adascale_controller.formatting import plural
from adascale_controller.operator.conditions import ConditionType, Reason, condition_of, is_true
from adascale_controller.operator.failures import failed
from adascale_controller.operator.pods import Pod
from adascale_controller.operator.sighting import Sighting
from adascale_core.failure_count import FailureCount

LOG_LINES = 20
"""Last lines of the program's output in the condition of a job that has failed."""


class Kind(Enum):
    """The kinds of stages."""

    RUN = auto()
    """It may have replicas."""
    STOP = auto()
    """It may have none for now; what it has, saves and goes."""
    WAIT = auto()
    """Nothing can be done about it before something else has changed; what it has, stays."""
    COMPLETE = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Stage:
    """What a job is up to, and why."""

    kind: Kind
    reason: Reason = Reason.TRAINING
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether the job is over for good."""
        return self.kind in {Kind.COMPLETE, Kind.FAILED}


def stage_of(seen: Sighting, failures: FailureCount) -> Stage:
    """The stage of a job.

    Args:
        seen: the job.
        failures: of its program, counted by now.
    """
    return _ended(seen, failures) or _blocked(seen) or _stopped(seen) or Stage(Kind.RUN)


def _ended(seen: Sighting, failures: FailureCount) -> Stage | None:
    job, batch = seen.job, seen.own_batch
    for kind, stage, otherwise in _ENDS:
        known = condition_of(job.status, kind)
        # A spec that was refused may have been put right; everything else stays as it ended.
        if known is not None and known.status and known.reason != Reason.INVALID_SPEC:
            return Stage(stage, _reason(known.reason, otherwise), known.message)
    if batch is not None and batch.complete:
        return Stage(Kind.COMPLETE, Reason.FINISHED, "The program has come to its end")
    if batch is not None and batch.failed is not None:
        reason, message = batch.failed
        known_reason = _reason(reason, Reason.FAILED)
        if known_reason is Reason.DEADLINE_EXCEEDED and job.job is not None:
            message = f"activeDeadlineSeconds {job.job.active_deadline_seconds} are over"
        return Stage(Kind.FAILED, known_reason, message)
    if job.job is None and (seen.standing is None or seen.batch is None):
        return Stage(Kind.FAILED, Reason.INVALID_SPEC, job.invalid or "")
    limit = job.job.backoff_limit if job.job is not None else None
    if limit is not None and failures.exceeds(limit):
        what = f"{plural(failures.count, 'failure')} of the program, backoffLimit is {limit}"
        return Stage(Kind.FAILED, Reason.BACKOFF_LIMIT_EXCEEDED, f"{what}. {last_failure(seen)}".rstrip())
    return None


_ENDS = (
    (ConditionType.COMPLETE, Kind.COMPLETE, Reason.FINISHED),
    (ConditionType.FAILED, Kind.FAILED, Reason.FAILED),
)


def _reason(word: str, otherwise: Reason) -> Reason:
    """The reason of a word that another version, or the Job controller, may have chosen."""
    return Reason(word) if word in set(Reason) else otherwise


def last_failure(seen: Sighting) -> str:
    """The latest failure of the program, in words and with the end of its output."""
    last: Pod | None = next(reversed(failed(seen.own_pods)), None)
    if last is None or last.ended is None:
        return ""
    ended = last.ended
    told = f"Replica {last.rank} (pod {last.name}) ended with exit code {ended.exit_code}"
    log = ended.words.log if ended.words is not None else ended.message
    lines = (log or "").rstrip().splitlines()[-LOG_LINES:]
    return f"{told}:\n" + "\n".join(lines) if lines else told


def _blocked(seen: Sighting) -> Stage | None:
    job, batch = seen.job, seen.batch
    if batch is not None and batch.owner != job.uid:
        if batch.owner is None and not batch.deleting:
            return Stage(
                Kind.WAIT,
                Reason.NAME_TAKEN,
                f"there is a Job {job.name} that is not of this AdaScaleJob: delete it, or give this one "
                "another name",
            )
        return Stage(Kind.WAIT, Reason.CLEANING_UP, f"an earlier AdaScaleJob {job.name} is still ending")
    if batch is None and any(pod.ended is None for pod in seen.pods):
        return Stage(Kind.WAIT, Reason.CLEANING_UP, f"pods of an earlier Job {job.name} are still ending")
    if seen.service is None:
        return Stage(
            Kind.WAIT,
            Reason.METRICS_SERVICE_UNAVAILABLE,
            "the metrics service does not answer; what runs goes on",
        )
    if batch is not None and batch.deleting:
        return Stage(Kind.STOP, Reason.TEMPLATE_CHANGED, "the Job is made anew")
    return None


def _stopped(seen: Sighting) -> Stage | None:
    job = seen.job.job
    if job is None:
        # It runs by the spec it had; the refused edit is told of by an event.
        return Stage(Kind.WAIT, Reason.INVALID_SPEC, seen.job.invalid or "")
    if job.suspend:
        return Stage(Kind.STOP, Reason.SUSPENDED, "spec.suspend is true")
    if job.replicas == 0:
        return Stage(Kind.STOP, Reason.SCALED_TO_ZERO, "spec.replicas is 0")
    batch = seen.own_batch
    if batch is not None and batch.digest != seen.digest:
        return Stage(
            Kind.STOP, Reason.TEMPLATE_CHANGED, "the template has changed: state is saved, pods are made anew"
        )
    if seen.claim is not None and not seen.claim.exists and not seen.claim.own:
        return Stage(
            Kind.STOP if batch is None else Kind.WAIT,
            Reason.VOLUME_NOT_FOUND,
            f"there is no PersistentVolumeClaim {seen.claim.name} in namespace {seen.job.namespace}: create "
            "it, or leave spec.checkpoint.claimName out to have one made",
        )
    return None


def has_ended(status: Mapping[str, object]) -> bool:
    """Whether a status says that the job is over for good."""
    return is_true(status, ConditionType.COMPLETE) or is_true(status, ConditionType.FAILED)
