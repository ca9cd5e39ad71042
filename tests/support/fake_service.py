"""A metrics service in memory with the real rules for generations, and the agents that register there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from adascale_client import MetricsServiceClient, ServiceRefusedError
from adascale_core.messages.allocation import Allocation, AllocationView
from adascale_core.messages.job_spec import JobSpec
from adascale_core.messages.registration import Registration, ReplicaState
from adascale_core.messages.reports import GainReport, StepTime
from adascale_core.rendezvous.instruction import Instruction, instruction
from adascale_core.rendezvous.rendezvous import Rendezvous, StaleAllocationError, allocate, expire, register
from adascale_core.views.decision import DecisionView
from adascale_core.views.jobs import JobChanges, JobList, JobView, ReplicaView

JOB_ID = "team.digits"


@dataclass
class FakeAgent:
    """The agent in a pod, and its trainer."""

    rank: int
    name: str
    state: ReplicaState = ReplicaState.WAITING
    generation: int = 0
    number: int = 1
    """The number of its trainer."""
    members: frozenset[str] = frozenset()
    """The trainers of its generation."""

    @property
    def instance(self) -> str:
        """Its trainer."""
        return f"{self.name}.{self.number}"

    def registration(self) -> Registration:
        return Registration(
            *(self.rank, self.instance, self.state, self.generation, f"host-{self.name}", 1),
            assigned=self.generation,
            step=1 if self.state is ReplicaState.HOLDING else None,
            rank=self.rank,
            stepped=self.generation if self.state is ReplicaState.RUNNING else 0,
        )

    def replace_trainer(self) -> None:
        """Start another trainer."""
        self.state, self.generation, self.number = ReplicaState.WAITING, 0, self.number + 1

    def follow(self, view: AllocationView) -> None:
        """Enter or leave a generation, as the job's allocation requires."""
        if self.state is ReplicaState.REENTERING:
            self.replace_trainer()
        if self.state not in {ReplicaState.WAITING, ReplicaState.RUNNING, ReplicaState.HOLDING}:
            return
        holds = self.state is ReplicaState.HOLDING
        what = instruction(view, self.rank, self.instance, self.generation, holds=holds)
        if what is Instruction.RELEASE:
            self.state = ReplicaState.REENTERING
        elif what is not None and view.active is not None:
            self.generation = view.active.generation
            self.members = frozenset(member.instance for member in view.active.members)
            is_assigned = what is Instruction.ASSIGN
            self.state = ReplicaState.RUNNING if is_assigned else ReplicaState.HOLDING


class FakeService(MetricsServiceClient):
    """The client of a metrics service with one job.

    Args:
        before_write: is called before each write, with a description.
        clock: returns seconds since 1970.
    """

    def __init__(self, before_write: Callable[[str], None], clock: Callable[[], float] = time.time) -> None:
        self._before_write = before_write
        self._clock = clock
        self._created_at: float | None = None
        self._version = 1
        self.state = Rendezvous()
        self.spec: JobSpec | None = None
        self.latest: GainReport | None = None
        self.step_times: tuple[StepTime, ...] = ()
        self.decision: DecisionView | None = None

    # -- as `MetricsServiceClient` --------------------------------------------------------------------------

    def read_jobs(self, share: float = 1.0) -> JobList:
        return JobList(self.list_jobs(), None, self._cursor())

    def read_changes(self, cursor: str, wait: float = 0.0) -> JobChanges:
        deadline = time.monotonic() + wait
        while self._cursor() == cursor and time.monotonic() < deadline:
            time.sleep(0.005)
        jobs = self.list_jobs() if self._cursor() != cursor else []
        return JobChanges(jobs, () if self.list_jobs() else (JOB_ID,), self._cursor())

    def _cursor(self) -> str:
        return f"{self._created_at} {self._version}"

    def list_jobs(self) -> list[JobView]:
        """Return the job, if it exists."""
        state = self.state
        if self._created_at is None:
            return []
        view = state.view(self._version)
        return [
            JobView(
                id=JOB_ID,
                spec=self.spec,
                version=view.version,
                desired=view.desired,
                active=view.active,
                broken=view.broken,
                complete=view.complete,
                failures=state.failures,
                disruptions=state.disruptions,
                restarts_without_progress=state.restarts_without_progress,
                replicas=tuple(ReplicaView.of(replica, 0.0) for replica in state.replicas.values()),
                latest=self.latest,
                step_times=self.step_times,
                created_at=self._created_at,
            )
        ]

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        self._before_write(f"declare {job_id}")
        self._store(self.state, spec)

    def delete_job(self, job_id: str) -> None:
        self._before_write(f"deregister {job_id}")
        if self._created_at is None:
            raise ServiceRefusedError(f"job {job_id} does not exist", 404)
        self.lose_data()

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        self._before_write(f"allocate {allocation.generation}: {allocation.replicas}")
        try:
            self._store(allocate(self.state, allocation, self.spec), self.spec)
        except StaleAllocationError as error:
            raise ServiceRefusedError(str(error), 409) from error
        return self.state.view(self._version)

    def put_decision(self, decision: DecisionView) -> None:
        self.decision = decision

    def _store(self, state: Rendezvous, spec: JobSpec | None) -> None:
        """Store the job, with a higher version if it has changed. Versions rise over a loss of the data."""
        if self._created_at is None:
            self._created_at = self._clock()
        if (state, spec) != (self.state, self.spec):
            self.state, self.spec, self._version = state, spec, self._version + 1

    # -- what happens to it ---------------------------------------------------------------------------------

    def lose_data(self) -> None:
        """Delete everything, as when its volume is lost."""
        self.state, self.spec, self.latest, self._created_at = Rendezvous(), None, None, None
        self.step_times = ()

    def post(self, report: GainReport) -> None:
        """Store a report, which is no change of the job."""
        self._store(self.state, self.spec)
        self.latest = report

    def register_agent(self, agent: FakeAgent) -> None:
        """Store the registration of an agent, which follows the answer."""
        self._store(register(self.state, agent.registration(), self.spec), self.spec)
        left_out = agent.instance in self.state.left_out
        if left_out and agent.state is ReplicaState.WAITING:
            agent.replace_trainer()

    def expire_missing(self, instances: set[str]) -> None:
        """Expire the replicas whose agents no longer exist."""
        replicas = self.state.replicas
        missing = [rank for rank, replica in replicas.items() if replica.instance not in instances]
        if missing:
            self._store(expire(self.state, missing, self.spec), self.spec)
