"""How the pods of a changed template replace the others: one by one, where the job can train on fewer.

The template of a Job can't be changed. So the Indexed Job is deleted without its pods, and one of the new
template adopts them. Then they are deleted one at a time. Each leaves as any replica that is lost: the others
keep the state of training, and the Job controller creates the next pod of its index, of the new template,
which gets the state from them.
"""

from __future__ import annotations

from adascale_controller.operator.observe.observed_job import IndexedJob, ObservedJob
from adascale_controller.operator.observe.pods import Pod, is_program_failure
from adascale_controller.operator.types.actions import FailedPlacement
from adascale_controller.operator.types.conditions import has_ended
from adascale_core.batch.plans import is_valid_replicas
from adascale_core.failures import EXIT_REFUSED
from adascale_core.messages.registration import ReplicaState


def begins(observed: ObservedJob) -> bool:
    """Whether the Indexed Job is of another template, and one of the new template may adopt its pods."""
    indexed_job, check = observed.own_indexed_job, observed.template_check
    if indexed_job is None or indexed_job.digest == observed.digest or check is None or not check.done:
        return False
    queueing = observed.workload.queueing if observed.workload is not None else None
    if indexed_job.queue is not None or (queueing is not None and queueing.queue is not None):
        # Kueue would suspend the next Job, and with it the pods.
        return False
    if observed.core is not None or observed.own_extra_job is not None:
        # The pods are those of two Jobs.
        return False
    # Pods of an earlier version of the operator do not say what they were made from.
    uid = observed.resource.uid
    marked = all(pod.job_uid == uid and pod.template is not None for pod in observed.live_pods.values())
    return marked and _is_settled(observed) and _can_spare_one(observed)


def is_between_jobs(observed: ObservedJob) -> bool:
    """Whether pods of this AdaScaleJob run and no Indexed Job controls them.

    The Job that adopts them is in no queue: Kueue would suspend it. One in the queue replaces it then.
    """
    allocation, uid = observed.resource.recorded_allocation, observed.resource.uid
    if observed.indexed_job is not None or observed.workload is None or has_ended(observed.resource.status):
        return False
    if allocation is None or not allocation.replicas:
        return False
    running = [pod for pod in observed.pods if pod.exit is None]
    if any(pod.is_extra for pod in running):
        # One Job can't have the pods of two.
        return False
    return bool(running) and all(pod.controller is None and pod.job_uid == uid for pod in running)


def next_pod(observed: ObservedJob, failed_placement: FailedPlacement | None) -> Pod | None:
    """Return the pod of another template that is to be replaced now. None if there is none."""
    outdated, indexed_job = observed.outdated_pods, observed.own_indexed_job
    if not outdated or indexed_job is None or indexed_job.digest != observed.digest:
        return None
    if not _is_settled(observed) or not _can_spare_one(observed):
        return None
    if len(outdated) == indexed_job.parallelism and _has_failed_since(failed_placement, indexed_job):
        # The first pod of the new template may be what could not be placed.
        return None
    return outdated[-1]


def is_given_up(observed: ObservedJob) -> bool:
    """Whether all pods have to be replaced at once: those of the new template can't train with the others."""
    outdated, indexed_job = observed.outdated_pods, observed.own_indexed_job
    if not outdated or indexed_job is None or indexed_job.digest != observed.digest:
        return False
    if observed.core is not None:
        # Extra pods were introduced while the pods had no Job, and one Job has adopted those of all ranks.
        return True
    fails = any(pod.template == observed.digest and _has_failed(pod) for pod in observed.own_pods)
    return fails or (_is_settled(observed) and not _can_spare_one(observed))


def _is_settled(observed: ObservedJob) -> bool:
    """Whether all replicas that the job is to have train together, each in the pod of its index."""
    view, allocation, indexed_job = observed.service, observed.current_allocation, observed.own_indexed_job
    if view is None or view.active is None or view.broken or allocation is None or indexed_job is None:
        return False
    if view.desired != allocation or view.active.generation != allocation.generation:
        return False
    members, live = view.active.indices, observed.live_pods
    running = {
        replica.replica
        for replica in view.replicas
        if replica.state is ReplicaState.RUNNING and replica.generation == allocation.generation
    }
    ready = {replica.replica for replica in view.replicas if replica.state is ReplicaState.WAITING}
    resized = indexed_job.suspended or indexed_job.parallelism != allocation.indices.stop
    is_whole = len(members) == allocation.replicas and set(allocation.indices) == live.keys()
    # A spare that is placed must have started: otherwise those that train would be replaced by such pods.
    starting = {rank for rank, pod in live.items() if pod.is_placed} - members - ready
    return not resized and is_whole and running == members and not starting


def _can_spare_one(observed: ObservedJob) -> bool:
    """Whether the job trains on while one of its replicas is replaced."""
    job, allocation = observed.resource.job, observed.current_allocation
    if job is None or allocation is None:
        return False
    fewer = range(job.spec.min_replicas, allocation.replicas)
    return any(is_valid_replicas(job.spec.bounds, count) for count in fewer)


def _has_failed_since(placement: FailedPlacement | None, indexed_job: IndexedJob) -> bool:
    """Whether a placement has failed since the Indexed Job was created."""
    return placement is not None and placement.until - placement.pause >= indexed_job.created_at


def _has_failed(pod: Pod) -> bool:
    """Whether a pod has ended in a way that another one of its template would repeat."""
    end = pod.exit
    if end is None:
        return False
    return is_program_failure(end) or (end.of_worker and end.exit_code == EXIT_REFUSED)
