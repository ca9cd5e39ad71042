"""The status of an AdaScaleJob, from what is seen of it and what is decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from adascale_controller.formatting import duration, plural
from adascale_controller.operator.conditions import (
    Condition,
    ConditionType,
    Reason,
    condition_of,
    merged,
)
from adascale_controller.operator.resource import timestamp
from adascale_controller.operator.sighting import Sighting
from adascale_controller.operator.stage import Kind, Stage
from adascale_controller.operator.trials import Refused
from adascale_core import names
from adascale_core.failure_count import FailureCount
from adascale_core.messages import Allocation, GainReport

Status = dict[str, Any]

TELEMETRY = frozenset(
    {
        "batchSize",
        "localBatchSize",
        "accumulation",
        "gain",
        "efficiency",
        "progress",
        "progressText",
    }
)
"""Fields that change with every step: written from time to time, all others at once."""


_OWN = TELEMETRY | {
    "observedGeneration",
    "state",
    "replicas",
    "desiredReplicas",
    "selector",
    "rescales",
    "disruptions",
    "failures",
    "restarts",
    "attempts",
    "conditions",
    "allocation",
    "startTime",
    "completionTime",
    "claim",
}


@dataclass(frozen=True)
class Outlook:
    """What is decided for a job, and what that rests on.

    Args:
        stage: what it is up to.
        failures: of its program.
        want: the allocation that it is to have.
        reason: why, in words of the decision.
        decided: whether it is decided anew.
        refused: a count that could not be placed, if that is why it has no more.
    """

    stage: Stage
    failures: FailureCount
    want: Allocation | None
    reason: str = ""
    decided: bool = False
    refused: Refused | None = None


def status_of(seen: Sighting, outlook: Outlook) -> Status:
    """The status to write."""
    before = seen.job.status
    counts = _counts(seen, outlook)
    # Where the service does not answer, nobody knows better than the status of before.
    training = seen.training if seen.service is not None else before.get("replicas", 0)
    if outlook.stage.ended:
        training = 0
    conditions = list(_conditions(seen, outlook, training, counts))
    status: Status = {
        "observedGeneration": seen.job.generation,
        "state": _state(conditions, outlook),
        "replicas": training,
        "desiredReplicas": outlook.want.replicas if outlook.want and not outlook.stage.ended else 0,
        "selector": f"{names.LABEL_JOB}={seen.job.name}",
        **counts,
        **_telemetry(seen),
        "conditions": merged(before.get("conditions") or (), conditions, seen.job.generation, seen.now),
    }
    if outlook.want is not None:
        status["allocation"] = {
            "generation": outlook.want.generation,
            "replicas": outlook.want.replicas,
        }
        status["startTime"] = before.get("startTime") or timestamp(seen.now)
    if outlook.stage.ended:
        status["completionTime"] = before.get("completionTime") or timestamp(seen.now)
    if seen.claim is not None:
        status["claim"] = seen.claim.name
    return status


def worth_writing(before: Mapping[str, Any], status: Status) -> bool:
    """Whether a status says more than that time has passed."""

    def plain(one: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in own_part(one).items() if name not in TELEMETRY}

    return plain(before) != plain(status)


def own_part(status: Mapping[str, Any]) -> Status:
    """What the operator has written of a status: others may have added fields and conditions of their own."""
    own = {name: value for name, value in status.items() if name in _OWN}
    if "conditions" in own:
        types = set(ConditionType)
        known = {one["type"]: one for one in own["conditions"] if one["type"] in types}
        own["conditions"] = [known[kind] for kind in ConditionType if kind in known]
    return own


def _counts(seen: Sighting, outlook: Outlook) -> Status:
    """The counts of what has happened, with what is new."""
    before = seen.job.status
    attempts = before.get("attempts") or {}
    told = attempts.get("toldDisruptions", 0)
    disruptions = before.get("disruptions", 0)
    rescales = before.get("rescales", 0)
    trained = attempts.get("trained", 0)
    if seen.service is not None:
        new = seen.service.disruptions
        if new == told - 1 and seen.service.failures:
            # A peer was heard first; it was the program's failure that took it along.
            disruptions = max(disruptions - 1, 0)
        else:
            # A service that has lost its data counts from zero.
            disruptions += new - told if new >= told else new
        told = new
        if seen.training and seen.training != trained:
            rescales += trained > 0
            trained = seen.training
    failures = outlook.failures
    return {
        "rescales": rescales,
        "disruptions": disruptions,
        "failures": failures.count,
        "restarts": disruptions + failures.count,
        "attempts": {
            "toldDisruptions": told,
            "trained": trained,
            "failedGeneration": failures.generation,
            "falseStarts": failures.false_starts,
        },
    }


def _telemetry(seen: Sighting) -> Status:
    report = seen.service.latest if seen.service is not None else None
    if report is None:
        return {name: value for name, value in seen.job.status.items() if name in TELEMETRY}
    return {
        "batchSize": report.replicas * report.local_bsz * report.accumulation,
        "localBatchSize": report.local_bsz,
        "accumulation": report.accumulation,
        "gain": _rounded(report.gain),
        "efficiency": _rounded(report.efficiency),
        "progress": int(report.progress),
        "progressText": _progress(seen, report),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _progress(seen: Sighting, report: GainReport) -> str:
    steps = seen.job.job.spec.scale_invariant_steps if seen.job.job is not None else None
    if steps is None:
        return f"{int(report.progress)} steps"
    return f"{min(int(100 * report.progress / steps), 100)}%"


# -- conditions -----------------------------------------------------------------------------------------


def _conditions(seen: Sighting, outlook: Outlook, training: int, counts: Status) -> list[Condition]:
    stage = outlook.stage
    found = [
        _running(seen, outlook, training, counts),
        _rescaling(seen, outlook, training),
        _suspended(stage, training, seen),
    ]
    if stage.kind is Kind.COMPLETE:
        found.append(Condition(ConditionType.COMPLETE, True, stage.reason, stage.message))
    if stage.kind is Kind.FAILED:
        found.append(Condition(ConditionType.FAILED, True, stage.reason, stage.message))
    return found


def _running(seen: Sighting, outlook: Outlook, training: int, counts: Status) -> Condition:
    kind = ConditionType.RUNNING
    stage = outlook.stage
    if stage.ended:
        return Condition(kind, False, stage.reason, stage.message.split("\n")[0].rstrip(":"))
    if training:
        if stage.kind is Kind.WAIT:
            return Condition(kind, True, stage.reason, stage.message)
        return Condition(kind, True, Reason.TRAINING, f"trains on {plural(training, 'replica')}")
    if stage.kind is not Kind.RUN:
        return Condition(kind, False, stage.reason, stage.message)
    want = outlook.want
    if want is None or want.replicas == 0:
        return Condition(kind, False, Reason.WAITING_FOR_ROOM, outlook.reason)
    problem = seen.problem(range(want.replicas))
    if problem is not None:
        return Condition(kind, False, problem.reason, problem.message)
    if outlook.failures.count:
        limit = seen.job.valid.backoff_limit
        return Condition(
            kind,
            False,
            Reason.PROGRAM_FAILED,
            f"failure {outlook.failures.count} of the program, backoffLimit is {limit}; it is started again",
        )
    began = bool(counts["attempts"]["trained"])
    if began:
        return Condition(
            kind,
            False,
            Reason.REENTERING,
            f"re-enters on {plural(want.replicas, 'replica')} from what was saved",
        )
    return Condition(kind, False, Reason.STARTING, f"starts on {plural(want.replicas, 'replica')}")


def _rescaling(seen: Sighting, outlook: Outlook, training: int) -> Condition:
    kind = ConditionType.RESCALING
    want, refused = outlook.want, outlook.refused
    if outlook.stage.kind is Kind.RUN and training and want is not None and want.replicas != training:
        change = f"{training} -> {want.replicas}"
        problem = seen.problem(range(training, want.replicas))
        if problem is not None:
            return Condition(
                kind, True, problem.reason, f"{change}: {problem.message}; training goes on on {training}"
            )
        known = condition_of(seen.job.status, kind)
        if not outlook.decided and known is not None and known.message.startswith(f"{change}:"):
            return Condition(kind, True, Reason.PREPARING, known.message)
        return Condition(kind, True, Reason.PREPARING, f"{change}: {outlook.reason or 'is being prepared'}")
    if refused is not None and not outlook.stage.ended:
        return Condition(
            kind,
            False,
            refused.reason,
            f"{plural(refused.count, 'replica')} could not be had: {refused.message}; tried again after "
            f"{duration(refused.pause)}, or when there is more room",
        )
    return Condition(kind, False, Reason.SETTLED)


def _suspended(stage: Stage, training: int, seen: Sighting) -> Condition:
    kind = ConditionType.SUSPENDED
    asked = stage.kind is Kind.STOP and stage.reason in {Reason.SUSPENDED, Reason.SCALED_TO_ZERO}
    if asked and not training:
        return Condition(kind, True, stage.reason, stage.message)
    if asked:
        return Condition(kind, False, stage.reason, "state is being saved")
    before = condition_of(seen.job.status, kind)
    resumed = before is not None and (before.status or before.reason == Reason.RESUMED)
    return Condition(kind, False, Reason.RESUMED if resumed else Reason.SETTLED)


def _state(conditions: list[Condition], outlook: Outlook) -> str:
    """The one word that `kubectl get` shows."""
    holds = {one.type for one in conditions if one.status}
    for kind in (ConditionType.FAILED, ConditionType.COMPLETE, ConditionType.SUSPENDED):
        if kind in holds:
            return str(kind)
    if ConditionType.RUNNING in holds:
        return str(ConditionType.RESCALING if ConditionType.RESCALING in holds else ConditionType.RUNNING)
    if outlook.stage.kind is Kind.RUN and outlook.want is not None and outlook.want.replicas:
        return "Starting"
    return "Pending"
