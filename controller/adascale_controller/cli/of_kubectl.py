"""What kubectl does with the jobs of a cluster, and `adascale` does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from adascale_core import names
from adascale_core.errors import AdaScaleError

KUBECTL_LINES = {
    "submit": "kubectl apply -f FILE",
    "list": "kubectl get adascalejobs -n NAMESPACE",
    "logs": f"kubectl logs -l {names.LABEL_JOB}=JOB -n NAMESPACE --prefix --tail=-1",
    "scale": "kubectl scale adascalejob/JOB -n NAMESPACE --replicas=N",
    "stop": """kubectl patch adascalejob JOB -n NAMESPACE --type=merge -p '{"spec": {"suspend": true}}'""",
    "resume": """kubectl patch adascalejob JOB -n NAMESPACE --type=merge -p '{"spec": {"suspend": false}}'""",
    "rm": "kubectl delete adascalejob JOB -n NAMESPACE",
}
"""The line of kubectl for jobs of a cluster, by the command for jobs of this machine."""


class OfKubectlError(AdaScaleError):
    """A command for the jobs of a cluster that kubectl has."""

    exit_code = 2


def use_kubectl(command: str) -> Callable[..., None]:
    """Return the function of a command that kubectl has: it raises `OfKubectlError`."""

    def refuse() -> None:
        here = (
            "; on this machine, `adascale run FILE` starts or resumes a job"
            if command in {"submit", "resume"}
            else ""
        )
        raise OfKubectlError(f"for jobs of a cluster, use `{KUBECTL_LINES[command]}`{here}")

    return refuse


def _refuse_cluster(ctx: typer.Context, given: bool) -> None:
    if given:
        use_kubectl(str(ctx.info_name))()


OfKubectl = Annotated[
    bool,
    typer.Option(
        "--cluster",
        "--namespace",
        "-n",
        "--all-namespaces",
        "-A",
        "--context",
        "--kubeconfig",
        hidden=True,
        is_eager=True,
        callback=_refuse_cluster,
    ),
]
