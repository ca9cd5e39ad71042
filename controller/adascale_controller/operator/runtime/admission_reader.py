"""Asks the API server what admission makes of the pods of a template, by dry runs.

Admission may add tolerations, requests, a priority or a node selector. Without them the capacity for a job is
estimated too low or too high. Jobs of a namespace with equal templates share an answer. Where dry runs are
not possible, the pods that a job has show it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from adascale_controller.job.reasons import Reason
from adascale_controller.operator.apply.cluster import ApiServerError, Cluster
from adascale_controller.operator.apply.manifests import pod_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.observe.observed_job import Admission, CachedJob
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.conditions import ConditionType, condition_of
from adascale_controller.operator.types.kubernetes import ApiObject, JobKey, Manifest

Calls = Coroutine[Any, Any, None]
"""Calls of the API server that are about to be made."""

logger = logging.getLogger(__name__)

INTERVAL: Final = 600.0
"""Seconds after which admission is asked again: policies and webhooks change."""
RETRY_INTERVAL: Final = 60.0
"""The same after an error."""
QUOTA_INTERVAL: Final = 10.0
"""The same while a quota allows a job no more pods."""
DEADLINE: Final = 8.0
"""Seconds after which a dry run fails."""

_POD_FIELDS: Final = (
    "nodeName",
    "nodeSelector",
    "tolerations",
    "overhead",
    "resources",
    "priority",
    "priorityClassName",
    "preemptionPolicy",
)
_CONTAINER_FIELDS: Final = ("name", "resources", "restartPolicy")


@dataclass
class _Answer:
    """What is known of the pods of a template in a namespace."""

    admission: Admission | None = None  # the last answer. None before the first one.
    asked_at: float = float("-inf")  # seconds since 1970
    is_running: bool = False  # whether the API server has not answered yet
    waiting: set[JobKey] = field(default_factory=set)  # the jobs that wait for the first answer


@asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Raise an `ApiServerError` if the calls inside take longer."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise ApiServerError(f"the API server does not answer within {seconds:.0f} s") from error


class AdmissionReader:
    """The pods of templates as admission makes them."""

    def __init__(self, cluster: Cluster, on_answer: Callable[[JobKey], None]) -> None:
        self._cluster = cluster
        self._on_answer = on_answer
        self._answers: dict[str, _Answer] = {}
        self._keys: dict[str, tuple[int, str]] = {}
        """uid of an AdaScaleJob -> its generation, and the key of its answer."""

    def retain(self, uids: Collection[str]) -> None:
        """Drop the answers that only AdaScaleJobs with other uids have needed."""
        self._keys = {uid: key for uid, key in self._keys.items() if uid in uids}
        used = {key for _, key in self._keys.values()}
        self._answers = {key: answer for key, answer in self._answers.items() if key in used}

    def admission(self, job: AdaScaleJob) -> Admission | None:
        """Return what admission makes of the pods of a job. None before the first answer."""
        answer = self._answers.setdefault(self._key(job), _Answer())
        if answer.admission is None:
            answer.waiting.add(job.key)
        return answer.admission

    def due_at(self, job: AdaScaleJob) -> float:
        """Return when to ask for a job, in seconds since 1970.

        Often while a quota limits the job: it may be raised.
        """
        answer = self._answers.get(self._key(job))
        if answer is None:
            return float("-inf")
        if answer.is_running:
            return float("inf")
        known = answer.admission
        has_failed = known is not None and (known.problem or known.extra_problem)
        interval = QUOTA_INTERVAL if _lacks_quota(job) else RETRY_INTERVAL if has_failed else INTERVAL
        return answer.asked_at + interval

    def ask(self, cached: CachedJob, now: float, limit: asyncio.Semaphore) -> Calls:
        """Ask the API server for a job. An earlier answer stays if it has none now."""
        answer = self._answers.setdefault(self._key(cached.resource), _Answer())
        answer.is_running, answer.asked_at = True, now
        return self._ask(cached, answer, limit)

    async def _ask(self, cached: CachedJob, answer: _Answer, limit: asyncio.Semaphore) -> None:
        job = cached.resource
        try:
            async with limit, deadline(DEADLINE):
                found = await self._read(cached)
            answer.admission = replace(found, asked_at=answer.asked_at)
        except ApiServerError as error:
            self._note_problem(job, answer, error.reply or str(error))
        finally:
            answer.is_running = False
        waiting, answer.waiting = answer.waiting - {job.key}, set()
        for key in waiting:
            self._on_answer(key)

    async def _read(self, cached: CachedJob) -> Admission:
        try:
            pod = await self._cluster.admit_pod(_tried(cached.resource))
            return await self._with_extra_pods(cached.resource, Admission(_kept(pod["spec"])))
        except ApiServerError:
            job, made = cached.resource, next(iter(cached.live_pods.values()), None)
            found = await self._cluster.get("pods", job.namespace, made.name) if made is not None else None
            if found is None:
                raise
            return Admission(_kept(found["spec"]))

    async def _with_extra_pods(self, job: AdaScaleJob, admission: Admission) -> Admission:
        """Return an answer with the priority of extra pods, or with why these are rejected."""
        if job.valid_job.opportunistic is None:
            return admission
        manifest = _tried(job, extra=True)
        try:
            pod = await self._cluster.admit_pod(manifest)
        except ApiServerError as error:
            # A quota may be used up for now, and an error of a webhook is no answer.
            is_final = error.status == 403 and "exceeded quota" not in error.reply
            return replace(admission, extra_problem=error.reply if is_final else "")
        return replace(admission, extra_priority=pod["spec"].get("priority"))

    @staticmethod
    def _note_problem(job: AdaScaleJob, answer: _Answer, problem: str) -> None:
        has_quota = "exceeded quota" not in problem
        if answer.admission is None or answer.admission.spec is None:
            logger.info("%s: what admission makes of its pods is not known: %s", job.id, problem)
            answer.admission = Admission(problem=problem)
        answer.admission = replace(answer.admission, has_quota=has_quota, asked_at=answer.asked_at)

    def _key(self, job: AdaScaleJob) -> str:
        """Return a key that is equal for jobs of a namespace with equal templates."""
        known = self._keys.get(job.uid)
        if known is None or known[0] != job.generation:
            opportunistic = job.job.opportunistic if job.job is not None else None
            extra = [opportunistic.priority_class_name, job.valid_job.core_replicas] if opportunistic else []
            text = json.dumps([job.namespace, job.template, extra], sort_keys=True, default=dict)
            known = self._keys[job.uid] = job.generation, hashlib.sha256(text.encode()).hexdigest()
        return known[1]


def _tried(job: AdaScaleJob, *, extra: bool = False) -> Manifest:
    """Return a pod for a dry run. It requires no type of accelerator, and has a name of its own."""
    manifest = pod_manifest(job, NewPod(0, 0, extra=extra))
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "name"}
    return {**manifest, "metadata": {**metadata, "generateName": f"{manifest['metadata']['name']}-"}}


def _lacks_quota(job: AdaScaleJob) -> bool:
    """Whether a quota allows a job no more pods, by its status."""
    conditions = (condition_of(job.status, kind) for kind in (ConditionType.RUNNING, ConditionType.RESCALING))
    return any(each is not None and each.reason == Reason.QUOTA_EXCEEDED for each in conditions)


def _kept(spec: ApiObject) -> Manifest:
    """Return the parts of a PodSpec on which capacity depends."""
    kept = {name: spec[name] for name in _POD_FIELDS if name in spec}
    for kind in ("containers", "initContainers"):
        kept[kind] = [
            {name: container[name] for name in _CONTAINER_FIELDS if name in container}
            for container in spec.get(kind) or ()
        ]
    node_affinity = (spec.get("affinity") or {}).get("nodeAffinity")
    if node_affinity:
        kept["affinity"] = {"nodeAffinity": node_affinity}
    return kept
