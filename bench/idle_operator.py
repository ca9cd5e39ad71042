"""The cost of an idle operator: memory, processor time and calls, by the number of suspended jobs.

    KUBECONFIG=... .venv/bin/python bench/idle_operator.py [--jobs 0 200] [--seconds 60]

The operator runs in a process of its own, with a lease, on a real API server, for one namespace. All its
calls are counted, watches too: those of kopf, its own, and those to the metrics service.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kubernetes import client, config

from adascale_core import names
from api.client import ServiceProcess, environment
from cluster.conftest import fresh_namespace
from cluster.system import job_manifest
from support.launch import wait_until
from support.operator_process import OperatorProcess

TOKEN = "token-of-the-measurement"


def all_jobs(objects: Any, namespace: str) -> list[dict[str, Any]]:
    """Return all AdaScaleJobs of a namespace."""
    found: list[dict[str, Any]] = objects.list_namespaced_custom_object(
        names.API_GROUP, names.API_VERSION, namespace, names.PLURAL
    )["items"]
    return found


def measure(api: client.ApiClient, kubeconfig: str, count: int, seconds: float, folder: Path) -> None:
    """Measure with `count` jobs and print the results."""
    objects: Any = client.CustomObjectsApi(api)
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    service = ServiceProcess(folder, environ=environment(ADASCALE_TOKEN=TOKEN), own_interpreter=True)
    with fresh_namespace(api) as namespace:
        for number in range(count):
            manifest = job_manifest(f"idle-{number}", suspend=True)
            objects.create_namespaced_custom_object(
                names.API_GROUP, names.API_VERSION, namespace, names.PLURAL, manifest
            )
        options = ("--namespace", namespace, "--lease-namespace", namespace)
        operator = OperatorProcess(
            kubeconfig, f"http://127.0.0.1:{service.port}", token_file, folder, *options
        )
        try:
            wait_until(lambda: "Running in" in operator.log, "a running operator")
            wait_until(
                lambda: all(job.get("status") for job in all_jobs(objects, namespace)), "a status of each job"
            )
            time.sleep(10)
            versions = [job["metadata"]["resourceVersion"] for job in all_jobs(objects, namespace)]
            before, cpu = operator.calls, operator.cpu
            time.sleep(seconds)
            calls, cpu = operator.calls - before, operator.cpu - cpu
            after = [job["metadata"]["resourceVersion"] for job in all_jobs(objects, namespace)]
            print(f"\n{count} idle jobs")
            print(f"  memory            {operator.memory / 2**20:.0f} MiB")
            print(f"  processor         {100 * cpu / seconds:.1f} % of one core")
            print(f"  objects written   {sum(old != new for old, new in zip(versions, after, strict=True))}")
            for kind, number in sorted((Counter(calls)).items()):
                print(f"  {kind:<40} {number * 60 / seconds:6.1f} a minute")
        finally:
            operator.stop()
            service.stop()


def main() -> None:
    """Measure with each number of jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, nargs="+", default=[0, 200])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    kubeconfig = os.environ["KUBECONFIG"]
    with config.new_client_from_config(config_file=kubeconfig) as api:
        for count in arguments.jobs:
            with tempfile.TemporaryDirectory() as folder:
                measure(api, kubeconfig, count, arguments.seconds, Path(folder))


if __name__ == "__main__":
    main()
