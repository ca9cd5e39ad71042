"""The operator at work: looks at all jobs, decides, and acts; see `docs/operator.md`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from adascale_controller.observation import Observation
from adascale_controller.operator.capacity import eligible_nodes, free_nodes, lost_nodes, pod_request
from adascale_controller.operator.cluster import Cluster, ClusterError
from adascale_controller.operator.failures import Failures
from adascale_controller.operator.objects import (
    PodSettings,
    Workload,
    claim_manifest,
    job_manifest,
    resize_patch,
    template_digest,
    template_warnings,
)
from adascale_controller.operator.pods import Pod, Problem, read_pod
from adascale_controller.operator.resource import ElasticJob, SpecReader
from adascale_controller.operator.settings import OperatorSettings
from adascale_controller.operator.sighting import BatchJob, Claim, Sighting
from adascale_controller.operator.stage import Kind as StageKind
from adascale_controller.operator.stage import Stage, has_ended, stage_of
from adascale_controller.operator.status import own_part, worth_writing
from adascale_controller.operator.steering import Course, Event, steer
from adascale_controller.operator.store import Kind, Store
from adascale_controller.operator.trials import Trials
from adascale_controller.service_client import (
    JobView,
    MetricsService,
    ServiceRefusedError,
    ServiceUnreachableError,
)
from adascale_core import names
from adascale_core.batch import valid_replicas
from adascale_core.decision import Decision, JobState, decide
from adascale_core.messages import Allocation
from adascale_core.room import Demand, NodeRoom, ReplicaRoom, Room

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two cycles while nothing is told to have changed."""
PAUSE = 0.2
"""Seconds between two cycles at least."""
TELEMETRY_INTERVAL = 10.0
"""Seconds between two writes of numbers that change with every step."""
RESYNC_INTERVAL = 300.0
"""Seconds between two lists of everything."""
STALE_INTERVAL = 5.0
"""Seconds between two lists where the API server has something else than what was seen."""
CLAIM_INTERVAL = 5.0
"""Seconds between two looks at a volume claim that is not there."""
REFUSAL_PATIENCE = 1.0
"""Seconds that pods may be missing before it is asked why."""
REFUSAL_INTERVAL = 5.0
"""Seconds between two such questions about one job."""
CREATION_PATIENCE = 10.0
"""Seconds that a node may take for a pod's volumes and network before it is asked what is wrong: at first,
they often are not there yet."""
AT_ONCE = 8
"""Jobs that are acted upon at the same time."""


@dataclass
class _Memory:
    """What is remembered of a job from one cycle to the next; all of it can be learned again."""

    observation: Observation | None = None
    trials: Trials = field(default_factory=Trials)
    claim: Claim | None = None
    claim_seen_at: float = float("-inf")
    short_since: float | None = None
    refusal: Problem | None = None
    refusal_seen_at: float = float("-inf")
    hindrance: tuple[str, Problem] | None = None
    hindrance_seen_at: float = float("-inf")
    written_at: float = float("-inf")
    complaint: str = ""


@dataclass(frozen=True)
class _Look:
    """A job, with what is made of it in this cycle."""

    seen: Sighting
    workload: Workload | None
    failures: Failures
    stage: Stage
    demand: Demand | None
    memory: _Memory


class Controller:
    """Keeps all AdaScaleJobs as they should be.

    Args:
        store: the objects as they were last seen.
        cluster: the Kubernetes API.
        service: the metrics service.
        settings: of the operator.
        kinds: what is watched.
        alive: called with each cycle.
        clock: the time, in seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        service: MetricsService,
        settings: OperatorSettings,
        kinds: Collection[Kind],
        *,
        alive: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._service = service
        self._settings = settings
        self._pod_settings = PodSettings(api_url=settings.pod_api_url or settings.api_url)
        self._kinds = kinds
        self._alive = alive
        self._clock = clock
        self._specs = SpecReader()
        self._memories: dict[str, _Memory] = {}
        self._pods: dict[str, tuple[str, Pod]] = {}
        self._service_was_up = True
        self._stale = False

    async def run(self) -> None:
        """Go on until cancelled."""
        listed_at = time.monotonic()
        while True:
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._store.changed.wait()
            except TimeoutError:
                pass
            self._store.changed.clear()
            if time.monotonic() - listed_at > (STALE_INTERVAL if self._stale else RESYNC_INTERVAL):
                listed_at = time.monotonic()
                self._stale = False
                await self._list_again()
            await self.cycle()
            self._alive()
            await asyncio.sleep(PAUSE)

    async def list_all(self) -> None:
        """Fill the store.

        Raises:
            ClusterError: the API server does not answer, or refuses.
        """
        for kind in self._kinds:
            items, version = await self._cluster.list(kind)
            self._store.replace(kind, items, version)

    async def cycle(self) -> None:
        """Look at everything once, and do what is to be done."""
        views = await self._ask_service()
        looks = await self._look(views)
        decisions = self._decide(looks)
        limit = asyncio.Semaphore(AT_ONCE)

        async def carry_out(look: _Look) -> None:
            async with limit:
                decision = decisions.get(look.seen.job.id)
                # Where something is wrong with a job that may run, so that nothing is decided, it goes on.
                if decision is not None or look.stage.kind is not StageKind.RUN:
                    await self._carry_out(look, decision)

        await asyncio.gather(*(carry_out(look) for look in looks))
        if views is not None:
            await self._have_service_forget(views)

    # -- looking --------------------------------------------------------------------------------------------

    async def _list_again(self) -> None:
        try:
            await self.list_all()
        except ClusterError as error:
            logger.warning("%s; watching goes on", error)

    async def _ask_service(self) -> dict[str, JobView] | None:
        try:
            views = await asyncio.to_thread(self._service.jobs)
        except (ServiceUnreachableError, ServiceRefusedError) as error:
            if self._service_was_up:
                logger.warning("%s; training goes on, and nothing is decided meanwhile", error)
            self._service_was_up = False
            return None
        if not self._service_was_up:
            logger.warning("The metrics service answers again")
        self._service_was_up = True
        return {view.id: view for view in views}

    async def _look(self, views: Mapping[str, JobView] | None) -> list[_Look]:
        raws = self._store.all(Kind.ADASCALEJOBS)
        raws = [raw for raw in raws if "deletionTimestamp" not in raw["metadata"]]
        uids = {raw["metadata"]["uid"] for raw in raws}
        self._specs.forget_all_but(uids)
        self._memories = {uid: memory for uid, memory in self._memories.items() if uid in uids}
        batches = {_key(raw): raw for raw in self._store.all(Kind.JOBS)}
        pods = self._pods_by_job()
        nodes = self._store.all(Kind.NODES)
        lost = lost_nodes(nodes)
        looks = []
        for raw in raws:
            memory = self._memories.setdefault(raw["metadata"]["uid"], _Memory())
            with self._apart(".".join(_key(raw)), memory):
                job = ElasticJob.read(raw, self._specs)
                raw_batch = batches.get((job.namespace, job.name))
                batch = BatchJob.read(raw_batch) if raw_batch is not None else None
                own = batch is not None and batch.owner == job.uid
                of_name = pods.get((job.namespace, job.name), [])
                mine = [one for one in of_name if not own or batch is None or _owner(one) == batch.uid]
                workload = self._workload(job)
                claim = await self._claim(job, workload, memory)
                seen = Sighting(
                    job=job,
                    service=None if views is None else views.get(job.id, JobView(id=job.id)),
                    batch=batch,
                    pods=[self._read_pod(one) for one in mine],
                    claim=claim,
                    digest=_digest(workload, batch, claim),
                    refusal=None,
                    lost_nodes=lost,
                    now=self._clock(),
                )
                seen = replace(seen, refusal=await self._refusal(seen, memory))
                seen = replace(seen, pods=await self._hindered(seen, memory))
                failures = Failures.read(job.status).seen(seen.own_pods)
                stage = stage_of(seen, failures)
                demand = _demand(seen, nodes) if stage.kind is StageKind.RUN else None
                looks.append(_Look(seen, workload, failures, stage, demand, memory))
        return looks

    @contextmanager
    def _apart(self, name: str, memory: _Memory) -> Iterator[None]:
        """What goes wrong with one job is told once, and does not keep the operator from the others."""
        try:
            yield
        except (ClusterError, ServiceUnreachableError, ServiceRefusedError) as error:
            if str(error) != memory.complaint:
                logger.warning("%s: %s; trying again", name, error)
            memory.complaint = str(error)
            self._stale |= isinstance(error, ClusterError) and error.status in {404, 409}
        except Exception as error:
            # Broad, since it stands for what nobody foresaw: an object of a shape that no schema rules out,
            # or a fault of ours. One job that can't be dealt with must not end the operator for all others.
            if repr(error) != memory.complaint:
                logger.exception("%s: nothing can be done about it", name)
            memory.complaint = repr(error)

    def _pods_by_job(self) -> Mapping[tuple[str, str], list[Mapping[str, Any]]]:
        found: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
        for raw in self._store.all(Kind.PODS):
            name = _job_of(raw)
            if name is not None:
                found[raw["metadata"]["namespace"], name].append(raw)
        present = {raw["metadata"]["uid"] for raws in found.values() for raw in raws}
        self._pods = {uid: known for uid, known in self._pods.items() if uid in present}
        return found

    def _read_pod(self, raw: Mapping[str, Any]) -> Pod:
        meta = raw["metadata"]
        version, pod = self._pods.get(meta["uid"], (None, None))
        if pod is None or version != meta["resourceVersion"]:
            pod = read_pod(raw)
            self._pods[meta["uid"]] = (meta["resourceVersion"], pod)
        return pod

    def _workload(self, job: ElasticJob) -> Workload | None:
        if job.job is None:
            return None
        return Workload(
            name=job.name,
            namespace=job.namespace,
            uid=job.uid,
            job=job.job,
            template=job.template,
            created_at=job.created_at,
            settings=self._pod_settings,
        )

    async def _claim(self, job: ElasticJob, workload: Workload | None, memory: _Memory) -> Claim | None:
        name = workload.claim_name if workload is not None else None
        if workload is None or name is None:
            return None
        known = memory.claim
        if known is not None and known.name != name:
            known = memory.claim = None
        if known is not None:
            # One that the operator makes is looked at when it is made, and nobody waits for one meanwhile.
            awaited = not (known.exists or known.own or workload.job.suspend or has_ended(job.status))
            if not awaited or self._clock() - memory.claim_seen_at < CLAIM_INTERVAL:
                return known
        checkpoint = workload.job.checkpoint
        own = checkpoint.claim_name is None
        modes: Collection[str] = [checkpoint.access_mode]
        try:
            raw = await self._cluster.claim(job.namespace, name)
            exists = raw is not None
            modes = raw["spec"]["accessModes"] if raw is not None else modes
        except ClusterError as error:
            # Nothing is guessed where it may be known soon: other pods would be made for it.
            if error.status != 403:
                raise
            # Where claims may not be read, pods tell what is wrong with them.
            exists = not own
            modes = modes if own else ["ReadWriteMany"]
        memory.claim_seen_at = self._clock()
        memory.claim = Claim(name, own, exists, one_node="ReadWriteMany" not in modes)
        return memory.claim

    async def _refusal(self, seen: Sighting, memory: _Memory) -> Problem | None:
        batch = seen.own_batch
        if batch is None or batch.suspended or batch.finished or len(seen.present) >= batch.size:
            memory.short_since = memory.refusal = None
            return None
        if memory.short_since is None:
            memory.short_since = seen.now
        if seen.now - memory.short_since < REFUSAL_PATIENCE:
            return None
        if seen.now - memory.refusal_seen_at >= REFUSAL_INTERVAL:
            memory.refusal_seen_at = seen.now
            since = memory.short_since - 2 * REFUSAL_PATIENCE
            try:
                memory.refusal = await self._cluster.refusal(seen.job.namespace, batch.uid, since)
            except ClusterError as error:
                logger.warning("%s: %s", seen.job.id, error)
        return memory.refusal

    async def _hindered(self, seen: Sighting, memory: _Memory) -> Sequence[Pod]:
        """The pods, the first that a node has taken and does not start with what is wrong with it."""
        taken = [pod for pod in seen.present.values() if pod.scheduled and not pod.begun and not pod.problem]
        late = [pod for pod in taken if seen.now > pod.created_at + CREATION_PATIENCE]
        if not late:
            memory.hindrance = None
            return seen.pods
        first = min(late, key=lambda pod: pod.rank)
        if seen.now - memory.hindrance_seen_at >= REFUSAL_INTERVAL:
            memory.hindrance_seen_at = seen.now
            try:
                problem = await self._cluster.hindrance(seen.job.namespace, first.uid)
                memory.hindrance = (first.uid, problem) if problem is not None else None
            except ClusterError as error:
                logger.warning("%s: %s", seen.job.id, error)
        if memory.hindrance is None or memory.hindrance[0] != first.uid:
            return seen.pods
        hindered = replace(first, problem=memory.hindrance[1])
        return [hindered if pod is first else pod for pod in seen.pods]

    # -- deciding -------------------------------------------------------------------------------------------

    def _decide(self, looks: Iterable[_Look]) -> dict[str, Decision]:
        """The replica counts of all jobs that may run."""
        running = {look.seen.job.id: look for look in looks if look.stage.kind is StageKind.RUN}
        room = self._room(running.values())
        states = []
        for name, look in running.items():
            with self._apart(name, look.memory):
                states.append(self._state(look, room))
        # Durations are measured on a clock that never goes back, and so is the time of the decision.
        decisions = decide(states, room, time.monotonic())
        for state in states:
            wish, decision = running[state.id].seen.job.valid.replicas, decisions[state.id]
            if wish is not None and state.limit == wish and decision.replicas < state.replicas:
                decisions[state.id] = replace(decision, reason=f"spec.replicas is {wish}")
        return decisions

    def _room(self, looks: Collection[_Look]) -> Room:
        if Kind.NODES not in self._kinds:
            return ReplicaRoom(sum(look.seen.job.valid.spec.max_replicas for look in looks))
        demands = {look.seen.job.id: look.demand for look in looks if look.demand is not None}
        nodes = self._store.all(Kind.NODES)
        return NodeRoom(free_nodes(nodes, self._store.all(Kind.PODS), demands), demands)

    def _state(self, look: _Look, room: Room) -> JobState:
        """A job as the decision has to know it."""
        seen, memory = look.seen, look.memory
        job, view = seen.job.valid, seen.service or JobView()
        if memory.observation is None:
            memory.observation = Observation(job)
        memory.observation.job = job
        memory.observation.see(view, time.monotonic())
        state = memory.observation.state(view, job.spec.scale_invariant_steps)
        standing = seen.standing
        at_work = view.wanted == standing and seen.training > 0
        most = room.most(job.id)
        self._try(look, most)
        limits = [limit for limit in (job.replicas, memory.trials.limit(most, seen.now)) if limit is not None]
        return replace(
            state,
            arrival=float(seen.job.created_at),
            replicas=standing.replicas if standing is not None else 0,
            settled_at=state.settled_at if at_work else None,
            limit=min(limits, default=None),
        )

    def _try(self, look: _Look, most: int) -> None:
        """Take in how the present allocation fares."""
        seen, standing = look.seen, look.seen.standing
        if standing is None or standing.replicas == 0:
            return
        problem = seen.problem(range(standing.replicas))
        present = seen.present
        placed = 0
        while placed in present and present[placed].scheduled and present[placed].problem is None:
            placed += 1
        spec = seen.job.valid.spec
        look.memory.trials.see(
            generation=standing.generation,
            count=standing.replicas,
            training=seen.training,
            problem=(problem.reason, problem.message) if problem is not None else None,
            placed=placed,
            valid=[one for one in valid_replicas(spec.bounds, spec.max_replicas) if one >= spec.min_replicas],
            room=most,
            now=seen.now,
        )

    # -- acting ---------------------------------------------------------------------------------------------

    async def _carry_out(self, look: _Look, decision: Decision | None) -> None:
        seen, memory = look.seen, look.memory
        if decision is not None and seen.service is not None and seen.service.complete and seen.standing:
            # Its program has come to its end; its pods are about to.
            decision = replace(decision, replicas=seen.standing.replicas)
        with self._apart(seen.job.id, memory):
            course = steer(seen, look.stage, look.failures, decision, memory.trials.standing(seen.now))
            await self._act(look, course)
            memory.complaint = ""

    async def _act(self, look: _Look, course: Course) -> None:
        seen = look.seen
        job = seen.job
        news = await self._write_status(look, course)
        if course.forget:
            await asyncio.to_thread(self._service.remove_job, job.id)
            return
        if course.declare is not None:
            await asyncio.to_thread(self._service.put_job, job.id, course.declare)
        # Where the job has moved on by itself, the next cycle takes that up.
        if course.want is None or await self._have_service_want(job.id, course.want):
            await self._size_batch(look, course)
        for name in course.remove_pods:
            logger.warning("%s: pod %s is lost: making way for another one", job.id, name)
            await self._cluster.remove_pod(job.namespace, name)
        for name in course.release_pods:
            await self._cluster.release_pod(job.namespace, name)
        if news:
            for event in course.events:
                await self._tell(look, event)
        if course.remove_job:
            logger.info("%s: ttlSecondsAfterFinished is over, deleting it", job.id)
            await self._cluster.remove_job(job.namespace, job.name, job.uid)

    async def _have_service_want(self, job_id: str, want: Allocation) -> bool:
        """Whether the service wants it, and nothing larger has become active since it was looked at."""
        try:
            told = await asyncio.to_thread(self._service.allocate, job_id, want)
        except ServiceRefusedError as error:
            if error.status != 409:
                raise
            return False
        return told.active is None or told.broken or told.active.replicas <= want.replicas

    async def _tell(self, look: _Look, event: Event) -> None:
        job = look.seen.job
        logger.info("%s: %s: %s", job.id, event.reason, event.message)
        await self._cluster.tell(
            job.namespace, job.name, job.uid, event, look.seen.now, self._settings.identity
        )

    async def _write_status(self, look: _Look, course: Course) -> bool:
        """Write the status if that is worth it; whether it told something new."""
        job, memory, now = look.seen.job, look.memory, look.seen.now
        news = worth_writing(job.status, course.status)
        late = own_part(job.status) != course.status and now - memory.written_at >= TELEMETRY_INTERVAL
        if news or late:
            written = await self._cluster.apply_status(job.namespace, job.name, job.uid, course.status)
            self._store.put(Kind.ADASCALEJOBS, written)
            memory.written_at = now
        return news

    async def _size_batch(self, look: _Look, course: Course) -> None:
        seen, workload = look.seen, look.workload
        job, batch = seen.job, seen.own_batch
        if course.create is not None and workload is not None:
            if course.make_claim:
                await self._make_claim(look, workload)
            manifest = job_manifest(workload, course.create, suspend=False, one_node=seen.one_node)
            try:
                self._store.put(Kind.JOBS, await self._cluster.create_batch(manifest))
            except ClusterError as error:
                if error.status not in {400, 422}:
                    raise
                # It will be no other before the spec is: no use in trying again.
                self._specs.refuse(job, f"spec.template: {error.told}")
                self._store.changed.set()
                return
            for warning in template_warnings(workload):
                await self._tell(look, Event("TemplateOverruled", warning, warning=True))
        elif course.remove_batch and batch is not None:
            await self._cluster.remove_batch(job.namespace, job.name, batch.uid)
        elif course.resize is not None and batch is not None:
            # A suspended Job keeps its size.
            size = course.resize or batch.size
            known = job.job is not None
            deadline = job.valid.active_deadline_seconds if known else batch.deadline
            patch = resize_patch(size, suspend=course.resize == 0, deadline=deadline)
            self._store.put(
                Kind.JOBS, await self._cluster.patch_batch(job.namespace, job.name, batch.uid, patch)
            )

    async def _make_claim(self, look: _Look, workload: Workload) -> None:
        manifest = claim_manifest(workload)
        if manifest is not None:
            await self._cluster.create_claim(manifest)
            look.memory.claim = None

    async def _have_service_forget(self, views: Mapping[str, JobView]) -> None:
        """Have the service forget the jobs that the cluster has no more."""
        present = {
            f"{raw['metadata']['namespace']}.{raw['metadata']['name']}"
            for raw in self._store.all(Kind.ADASCALEJOBS)
        }
        ending = {f"{namespace}.{name}" for namespace, name in self._pods_by_job()}
        for view in views.values():
            namespace = view.id.partition(".")[0]
            ours = self._settings.namespace in (None, namespace)
            # What was only ever posted to by hand is not the operator's to forget.
            elastic = view.spec is not None or view.wanted is not None or view.replicas
            if not ours or not elastic or view.id in present or view.id in ending:
                continue
            try:
                await asyncio.to_thread(self._service.remove_job, view.id)
                logger.info("%s is deleted, and forgotten by the metrics service", view.id)
            except (ServiceUnreachableError, ServiceRefusedError) as error:
                logger.warning("%s: %s", view.id, error)


def _key(raw: Mapping[str, Any]) -> tuple[str, str]:
    return raw["metadata"]["namespace"], raw["metadata"]["name"]


def _job_of(pod: Mapping[str, Any]) -> str | None:
    found: str | None = (pod["metadata"].get("labels") or {}).get(names.LABEL_JOB)
    return found


def _owner(raw: Mapping[str, Any]) -> str | None:
    owners = raw["metadata"].get("ownerReferences") or ()
    return next((one["uid"] for one in owners if one.get("controller")), None)


def _demand(seen: Sighting, nodes: Collection[Mapping[str, Any]]) -> Demand:
    """What a job asks of the nodes."""
    pod_spec = seen.job.template["spec"]
    return Demand(
        request=pod_request(pod_spec),
        nodes=eligible_nodes(pod_spec, nodes),
        placed={rank: pod.node for rank, pod in seen.present.items() if pod.node},
        one_node=seen.one_node,
    )


def _digest(workload: Workload | None, batch: BatchJob | None, claim: Claim | None) -> str:
    """Of what the pods are to be made from; where that is not known, as it is."""
    if workload is None:
        return (batch.digest if batch is not None else None) or ""
    return template_digest(workload, one_node=claim is not None and claim.one_node)
