"""`deploy/monitoring`: Prometheus scrapes a real service, and all queries have results."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from adascale_controller.operator.runtime.health import OperatorMetrics
from api.client import Client, ServiceProcess, a_report, wait_until
from support.fake_cluster import FakeCluster
from support.launch import free_port
from support.operator_metrics import serve, show_a_started_job

FOLDER = Path(__file__).parents[2] / "deploy" / "monitoring"
RULES = yaml.safe_load((FOLDER / "rules.yaml").read_text())["spec"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
QUERIES = {panel["title"]: target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]}
NAMES = sorted(
    {name for rule in RULES["groups"][0]["rules"] for name in re.findall(r"adascale_\w+", rule["expr"])}
)

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None or shutil.which("promtool") is None,
    reason="Prometheus is not installed",
)


@needs_prometheus
def test_the_alerts_fire_only_if_something_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "rules.groups.yaml").write_text(yaml.safe_dump(RULES))
    shutil.copy(FOLDER / "rules_test.yaml", tmp_path)
    for command in (["check", "rules", "rules.groups.yaml"], ["test", "rules", "rules_test.yaml"]):
        done = subprocess.run(
            ["promtool", *command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("source", ["service", "operator"])
def test_the_metrics_follow_the_conventions(client: Client, source: str) -> None:
    text = client.call("GET", "/metrics").body if source == "service" else OperatorMetrics().text().decode()
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes a service every second."""
    folder, port = tmp_path_factory.mktemp("prometheus"), free_port()
    metrics = operator_metrics()
    with (
        ServiceProcess(folder) as service,
        Client(service.port) as client,
        serve(metrics) as operator,
    ):
        config = {
            "global": {"scrape_interval": "1s"},
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for name, port in (("adascale-api", service.port), ("adascale-controller", operator))
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        with (folder / "prometheus.log").open("wb") as log:
            process = subprocess.Popen(
                ["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
            )
        try:
            for step in range(3):
                client.post_gain("team.digits", a_report(step, progress=2.0 * step))
            url = f"http://127.0.0.1:{port}"
            wait_until(
                lambda: len(_range(url, 'adascale_job_gain{adascale_job="team.digits"}')) >= 3, "scrapes"
            )
            wait_until(lambda: len(_range(url, "adascale_operator_leader")) >= 3, "scrapes of the operator")
            yield url
        finally:
            process.terminate()
            process.wait(20)


def operator_metrics() -> OperatorMetrics:
    """The metrics of an operator that has started a job in a cluster in memory."""
    cluster = FakeCluster()
    cluster.submit()
    cluster.deliver()
    cluster.run_until(lambda: show_a_started_job(cluster.metrics))
    cluster.metrics.count_api_request("GET", 200)
    return cluster.metrics


def _range(url: str, series: str) -> list[Any]:
    found = query(url, f"{series}[5m]")
    return list(found[0]["values"]) if found else []


def query(url: str, expression: str) -> list[Any]:
    try:
        with urllib.request.urlopen(
            f"{url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=10
        ) as answer:
            return list(json.loads(answer.read())["data"]["result"])
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return []  # it starts
        raise AssertionError(f"{expression}: {error.read().decode()}") from error
    except OSError:
        return []


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("title", QUERIES)
def test_each_query_of_the_dashboard_has_a_result(prometheus: str, title: str) -> None:
    expression = QUERIES[title].replace("$adascale_job", ".*").replace("$__rate_interval", "5m")
    assert query(prometheus, expression)


@pytest.mark.slow
@needs_prometheus
@pytest.mark.parametrize("name", NAMES)
def test_each_metric_of_the_alerts_is_scraped(prometheus: str, name: str) -> None:
    assert query(prometheus, name)


def test_the_labels_of_a_job_are_not_those_that_prometheus_sets(client: Client, job: str) -> None:
    client.post_gain(job, a_report())
    text = client.call("GET", "/metrics").body
    assert f'adascale_job_gain{{adascale_job="{job}"}}' in text
    assert not re.search(r"[{,](job|instance|namespace|pod)=", text)


def test_the_manifests_select_the_service() -> None:
    monitor, pod_monitor = (
        each["spec"] for each in yaml.safe_load_all((FOLDER / "servicemonitor.yaml").read_text())
    )
    (deployment,) = [
        each
        for each in yaml.safe_load_all((FOLDER.parent / "base" / "controller.yaml").read_text())
        if each["kind"] == "Deployment"
    ]
    template = deployment["spec"]["template"]
    assert pod_monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    ports = {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert pod_monitor["podMetricsEndpoints"][0]["port"] in ports
    base = list(yaml.safe_load_all((FOLDER.parent / "base" / "api.yaml").read_text()))
    (service,) = [each for each in base if each["kind"] == "Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] in {port["name"] for port in service["spec"]["ports"]}
