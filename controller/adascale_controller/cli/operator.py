"""`adascale operator`."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from adascale_controller.cli.arguments import Fairness, option
from adascale_core import names
from adascale_core.errors import requires_extra

_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _require_label(label: str) -> str:
    if label and not _LABEL.fullmatch(label):
        raise typer.BadParameter(
            f"{label!r} is not the key of a label: it must be like {names.DEFAULT_ACCELERATOR_LABEL}, with "
            "letters, digits, '-', '_' and '.', or empty"
        )
    return label


def _parse_secret(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    namespace, _, name = text.partition("/")
    if not namespace or not name or "/" in name:
        raise typer.BadParameter(f"got {text!r}, expected NAMESPACE/NAME", param_hint="--tls-secret")
    return namespace, name


def operator(
    identity: Annotated[
        str,
        option(
            "--identity",
            metavar="NAME",
            envvar="POD_NAME",
            default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
            help="The name of this operator in the lease. Default: the host name and the process id.",
        ),
    ],
    api_url: Annotated[
        str,
        typer.Option("--api-url", metavar="URL", help="The address of the metrics service for the operator."),
    ] = f"http://{names.API_SERVICE}.{names.SYSTEM_NAMESPACE}.svc:{names.DEFAULT_API_PORT}",
    pod_api_url: Annotated[
        str | None,
        option(
            "--pod-api-url",
            metavar="URL",
            help="The address of the metrics service for pods. Default: that of --api-url.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            metavar="PATH",
            envvar=names.ENV_TOKEN_FILE,
            help="The file with the operator's token for the metrics service, which is read for each call.",
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        option("--namespace", metavar="NAME", help="The only namespace to watch. Default: all namespaces."),
    ] = None,
    lease_namespace: Annotated[
        str | None,
        option(
            "--lease-namespace",
            metavar="NAME",
            help="The namespace of the Lease for leader election. Default: that of --namespace. Without "
            "both, or if it is empty: no leader election.",
        ),
    ] = None,
    liveness: Annotated[
        str | None,
        option(
            "--liveness",
            metavar="HOST:PORT",
            help="The address that serves GET /healthz and /metrics, :PORT for all addresses. Default: not "
            "served.",
        ),
    ] = None,
    accelerator_label: Annotated[
        str,
        typer.Option(
            "--accelerator-label",
            metavar="LABEL",
            help="The label of nodes that names the type of their accelerators. A job runs on one type at a "
            "time. Empty: types are not distinguished.",
            callback=_require_label,
        ),
    ] = names.DEFAULT_ACCELERATOR_LABEL,
    request_nodes: Annotated[
        bool,
        typer.Option(
            "--request-nodes",
            help="Request replicas that do not fit, so that an autoscaler adds nodes for their pending pods: "
            "the fewest of a job, or one step of growth. spec.requestNodes of a job takes precedence.",
        ),
    ] = False,
    fairness: Fairness = None,
    no_fs_group: Annotated[
        bool,
        typer.Option(
            "--no-fs-group",
            help="Set no fsGroup, by which programs that are not root may write to volumes. OpenShift sets "
            "one by itself, and rejects others.",
        ),
    ] = False,
    tls_secret: Annotated[
        str | None,
        option(
            "--tls-secret",
            metavar="NAMESPACE/NAME",
            help="The Secret with the certificate of the metrics service (tls.crt, tls.key) and that of its "
            "authority (ca.crt), which pods get. The operator makes it, and renews it.",
        ),
    ] = None,
    tls_external: Annotated[
        bool,
        typer.Option(
            "--tls-external",
            help="Another program, such as cert-manager, makes the Secret of --tls-secret, and renews it.",
        ),
    ] = False,
) -> None:
    """Run the Kubernetes operator, on the cluster that it runs in or that KUBECONFIG names."""
    secret = _parse_secret(tls_secret)
    if secret is None and tls_external:
        raise typer.BadParameter("it needs --tls-secret", param_hint="--tls-external")
    if secret is not None and not all(
        url.startswith("https://") for url in (api_url, pod_api_url or api_url)
    ):
        raise typer.BadParameter(
            "with --tls-secret, the addresses of the metrics service must begin with https://",
            param_hint="--api-url and --pod-api-url",
        )
    # Imported here because importing kopf and the Kubernetes client takes a second.
    with requires_extra("adascale operator", "operator"):
        from adascale_controller.operator.runtime.main import run_operator
    from adascale_controller.operator.types.settings import OperatorSettings

    run_operator(
        OperatorSettings(
            api_url=api_url,
            pod_api_url=pod_api_url,
            token_file=token_file,
            namespace=namespace,
            lease_namespace=(namespace if lease_namespace is None else lease_namespace) or None,
            identity=identity,
            liveness=liveness,
            accelerator_label=accelerator_label,
            request_nodes=request_nodes,
            fairness=fairness,
            fs_group=not no_fs_group,
            tls_secret=secret,
            tls_external=tls_external,
        )
    )
