"""`adascale explain`."""

from __future__ import annotations

import json
import time

from rich.console import Console

from adascale_controller.cli.arguments import JobName, Output, OutputFormat, ServiceUrl, StateRoot
from adascale_controller.cli.service_client import connect
from adascale_controller.decision_summary import render_decision
from adascale_controller.local.state_dir import DEFAULT_ROOT
from adascale_core.job_id import parse_job_id


def explain(
    job: JobName,
    url: ServiceUrl = None,
    state_dir: StateRoot = DEFAULT_ROOT,
    output: OutputFormat = Output.TEXT,
) -> None:
    """Show why a job has its replica count, and what other counts would give."""
    job_id = parse_job_id(job)
    view = connect(job, url, state_dir).get_decision(job_id)
    if output is Output.JSON:
        print(json.dumps(view.to_json(), indent=2))
    else:
        Console(highlight=False).print(render_decision(view, time.time()))
