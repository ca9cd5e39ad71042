"""`adascale explain`."""

from __future__ import annotations

import json
import time

from rich.console import Console

from adascale_controller.cli.arguments import JobName, Output, OutputFormat, ServiceUrl, StateRoot
from adascale_controller.cli.cluster_options import (
    Cluster,
    Context,
    Kubeconfig,
    Namespace,
    SystemNamespace,
    open_cluster,
    select_cluster,
)
from adascale_controller.cli.service_client import connect
from adascale_controller.decision_summary import render_decision
from adascale_core import names
from adascale_core.job_id import parse_job_id


def explain(
    job: JobName,
    url: ServiceUrl = None,
    state_dir: StateRoot = None,
    output: OutputFormat = Output.TEXT,
    cluster: Cluster = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    system_namespace: SystemNamespace = names.SYSTEM_NAMESPACE,
) -> None:
    """Show why a job has its replica count, and what other counts would give."""
    target = select_cluster(cluster, namespace, context, kubeconfig, state_dir)
    if target is not None:
        with open_cluster(target) as connection:
            found = connection.jobs.find(job)
            client = connection.metrics(system_namespace, url)
            view, slow = client.get_decision(found.id), client.get_job(found.id).slowness
    else:
        job_id = parse_job_id(job)
        with connect(job, url, state_dir) as client:
            view, slow = client.get_decision(job_id), client.get_job(job_id).slowness
    if output is Output.JSON:
        print(json.dumps(view.to_json(), indent=2))
    else:
        Console(highlight=False).print(render_decision(view, time.time(), slow))
