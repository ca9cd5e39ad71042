"""The pods that the program has failed in."""

from __future__ import annotations

from collections.abc import Iterable

from adascale_controller.operator.observe.pods import Pod, PodExit
from adascale_core.failures import ExitClass, classify_exit


def failed_pods(pods: Iterable[Pod]) -> list[Pod]:
    """Return the pods that the program has failed in, by creation time."""
    failed = [pod for pod in pods if pod.exit is not None and is_program_failure(pod.exit)]
    return sorted(failed, key=lambda pod: (pod.created_at, pod.rank))


def is_program_failure(end: PodExit) -> bool:
    """Whether a pod has ended by a failure of the program, which counts against `backoffLimit`.

    Not a failure: the program saved its state and left, it was killed or ran out of memory, or Kubernetes
    ended the pod or never started it.
    """
    if end.exit_code is None or end.disruption:
        return False
    exit_class = classify_exit(end.exit_code, out_of_memory=end.reason == "OOMKilled")
    if end.of_worker or exit_class in {ExitClass.KILLED, ExitClass.OUT_OF_MEMORY}:
        return exit_class.is_failure
    # The exit codes of agents have no meaning in another container.
    return end.exit_code != 0
