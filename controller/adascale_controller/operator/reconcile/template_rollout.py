"""How the pods of a changed template replace the others: one by one, where the job can train on fewer.

Each is deleted and leaves as any replica that is lost: the others keep the state of training, and the next
pod of its rank, of the new template, gets the state from them.
"""

from __future__ import annotations

from collections.abc import Iterator

from adascale_controller.operator.observe.observed_job import ObservedJob
from adascale_controller.operator.observe.pods import Pod, is_program_failure
from adascale_controller.operator.types.actions import FailedPlacement
from adascale_core.batch.plans import is_valid_replicas
from adascale_core.failures import EXIT_REFUSED
from adascale_core.messages.registration import ReplicaState


def is_one_by_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while its pods are replaced one by one."""
    holds = any(replica.holds for replica in observed.view.replicas)
    fails = any(pod.template == observed.digest and _has_failed(pod) for pod in observed.pods)
    return holds and not fails and _can_spare_one(observed)


def next_pods(observed: ObservedJob, failed_placement: FailedPlacement | None) -> Iterator[Pod]:
    """Yield the pods of another template that are to be replaced now: those that do not run, and one more."""
    outdated, live = observed.outdated_pods, observed.live_pods
    waiting = [pod for pod in outdated if not pod.has_started]
    if waiting or not outdated:
        yield from waiting
    elif _is_settled(observed) and _can_spare_one(observed):
        began = min(pod.created_at for pod in outdated)
        if len(outdated) == len(live) and _has_failed_since(failed_placement, began):
            # The first pod of the new template may be what could not be placed.
            return
        yield outdated[-1]


def _is_settled(observed: ObservedJob) -> bool:
    """Whether all replicas that the job is to have train together, each in the pod of its index."""
    view, training, allocation = observed.view, observed.training, observed.current_allocation
    if training is None or allocation is None:
        return False
    if view.desired != allocation or training.generation != allocation.generation:
        return False
    members, live = training.indices, observed.live_pods
    running = {
        replica.replica
        for replica in view.replicas
        if replica.state is ReplicaState.RUNNING and replica.generation == allocation.generation
    }
    ready = {replica.replica for replica in view.replicas if replica.state is ReplicaState.WAITING}
    is_whole = len(members) == allocation.replicas and set(allocation.indices) == live.keys()
    # A spare that is placed must have started: otherwise those that train would be replaced by such pods.
    starting = {rank for rank, pod in live.items() if pod.is_placed} - members - ready
    return is_whole and running == members and not starting


def _can_spare_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while one of its replicas is replaced."""
    job, allocation = observed.resource.job, observed.current_allocation
    if job is None or allocation is None:
        return False
    fewer = range(job.spec.min_replicas, allocation.replicas)
    return any(is_valid_replicas(job.spec.bounds, count) for count in fewer)


def _has_failed_since(placement: FailedPlacement | None, moment: float) -> bool:
    return placement is not None and placement.until - placement.pause >= moment


def _has_failed(pod: Pod) -> bool:
    """Whether a pod has ended in a way that another one of its template would repeat."""
    end = pod.exit
    if end is None:
        return False
    return is_program_failure(end) or (end.of_worker and end.exit_code == EXIT_REFUSED)
