"""A metrics service in memory with the real rules for generations, and the agents that register there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from adascale_client import ServiceRefusedError
from adascale_core.messages import Allocation, AllocationView, GainReport, JobSpec, Registration, ReplicaState
from adascale_core.rendezvous import IDLE_STATES, Rendezvous, StaleAllocationError, allocate, expire, register
from adascale_core.views import JobView, ReplicaView

JOB_ID = "team.digits"


@dataclass
class FakeAgent:
    """The agent in a pod, as it registered last."""

    rank: int
    instance: str
    state: ReplicaState = ReplicaState.WAITING
    generation: int = 0
    port: int = 1

    def registration(self) -> Registration:
        """Return its registration."""
        return Registration(
            self.rank, self.instance, self.state, self.generation, f"host-{self.instance}", self.port
        )

    def follow(self, view: AllocationView) -> None:
        """Enter or leave a generation, as the job's allocation requires."""
        if self.state is ReplicaState.RUNNING and view.has_ended(self.generation):
            self.state = ReplicaState.REENTERING
        elif self.state in IDLE_STATES:
            following = view.next_allocation(self.generation)
            if following is not None and following.admits(self.rank, self.instance):
                self.state, self.generation = ReplicaState.RUNNING, following.generation
                self.port += 1
            elif self.rank == 0 and view.used_port == self.port:
                self.port += 1


class FakeService:
    """The metrics service with one job: an `AllocationService`.

    Args:
        before_write: is called before each write, with a description.
    """

    def __init__(self, before_write: Callable[[str], None]) -> None:
        self._before_write = before_write
        self.state = Rendezvous()
        self.spec: JobSpec | None = None
        self.latest: GainReport | None = None

    # -- as `AllocationService` -----------------------------------------------------------------------------

    def list_jobs(self) -> list[JobView]:
        """As `AllocationService.list_jobs`."""
        state = self.state
        if state == Rendezvous() and self.spec is None and self.latest is None:
            return []
        view = state.view(1)
        return [
            JobView(
                id=JOB_ID,
                spec=self.spec,
                version=1,
                desired=view.desired,
                active=view.active,
                broken=view.broken,
                complete=view.complete,
                failures=state.failures,
                disruptions=state.disruptions,
                replicas=tuple(ReplicaView.of(replica, 0.0) for replica in state.replicas.values()),
                latest=self.latest,
                step_times=(),
                created_at=0.0,
            )
        ]

    def declare_job(self, job_id: str, spec: JobSpec) -> None:
        """As `AllocationService.declare_job`."""
        self._before_write(f"declare {job_id}")
        self.spec = spec

    def delete_job(self, job_id: str) -> None:
        """As `AllocationService.delete_job`."""
        self._before_write(f"deregister {job_id}")
        self.lose_data()

    def allocate(self, job_id: str, allocation: Allocation) -> AllocationView:
        """As `AllocationService.allocate`."""
        self._before_write(f"allocate {allocation.generation}: {allocation.replicas}")
        try:
            self.state = allocate(self.state, allocation)
        except StaleAllocationError as error:
            raise ServiceRefusedError(str(error), 409) from error
        return self.state.view(1)

    # -- what happens to it ---------------------------------------------------------------------------------

    def lose_data(self) -> None:
        """Delete everything, as when its volume is lost."""
        self.state, self.spec, self.latest = Rendezvous(), None, None

    def register(self, agent: FakeAgent) -> None:
        """Store the registration of an agent."""
        self.state = register(self.state, agent.registration())

    def expire_missing(self, instances: set[str]) -> None:
        """Expire the replicas whose agents no longer exist."""
        replicas = self.state.replicas
        missing = [rank for rank, replica in replicas.items() if replica.instance not in instances]
        self.state = expire(self.state, missing)
