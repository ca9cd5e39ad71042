"""`adascale operator`."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Annotated

import typer

from adascale_core import names
from adascale_core.extras import requires_extra

_LABEL = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")


def _require_label(label: str) -> str:
    if label and not _LABEL.fullmatch(label):
        raise typer.BadParameter(
            f"{label!r} is not the key of a label: it must be like {names.DEFAULT_ACCELERATOR_LABEL}, with "
            "letters, digits, '-', '_' and '.', or empty"
        )
    return label


def operator(
    identity: Annotated[
        str,
        typer.Option(
            "--identity",
            metavar="NAME",
            envvar="POD_NAME",
            default_factory=socket.gethostname,
            help="The name of this operator in the lease. Default: the host name.",
            show_default=False,
        ),
    ],
    api_url: Annotated[
        str,
        typer.Option("--api-url", metavar="URL", help="The address of the metrics service for the operator."),
    ] = f"http://{names.API_SERVICE}.{names.SYSTEM_NAMESPACE}.svc:{names.DEFAULT_API_PORT}",
    pod_api_url: Annotated[
        str | None,
        typer.Option(
            "--pod-api-url",
            metavar="URL",
            help="The address of the metrics service for pods. Default: that of --api-url.",
            show_default=False,
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file",
            metavar="PATH",
            envvar=names.ENV_TOKEN_FILE,
            help="The file with the operator's token for the metrics service, which is read for each call.",
            show_default=False,
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            metavar="NAME",
            help="The only namespace to watch. Default: all namespaces.",
            show_default=False,
        ),
    ] = None,
    lease_namespace: Annotated[
        str | None,
        typer.Option(
            "--lease-namespace",
            metavar="NAME",
            help="The namespace of the Lease for leader election. Default: no leader election.",
            show_default=False,
        ),
    ] = None,
    liveness: Annotated[
        str | None,
        typer.Option(
            "--liveness",
            metavar="HOST:PORT",
            help="The address that serves GET /healthz and /metrics. Default: not served.",
            show_default=False,
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
) -> None:
    """Run the Kubernetes operator, on the cluster that it runs in or that KUBECONFIG names."""
    # Imported here because importing kopf and the Kubernetes client takes a second.
    with requires_extra("adascale operator", "kubernetes"):
        from adascale_controller.operator.runtime.main import run_operator
    from adascale_controller.operator.runtime.settings import OperatorSettings

    run_operator(
        OperatorSettings(
            api_url=api_url,
            pod_api_url=pod_api_url,
            token_file=token_file,
            namespace=namespace,
            lease_namespace=lease_namespace,
            identity=identity,
            liveness=liveness,
            accelerator_label=accelerator_label,
        )
    )
