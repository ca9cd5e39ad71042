"""The Helm chart: its objects are those of kustomize, and each value changes what it names.

Needs helm and kubectl, and no cluster.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from adascale_core import names

DEPLOY = Path(__file__).parents[2] / "deploy"

Manifest = dict[str, Any]

needs_helm = pytest.mark.skipif(
    not (shutil.which("helm") and shutil.which("kubectl")), reason="helm and kubectl are not there"
)


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def output(*command: str | Path) -> str:
    done = run(*command)
    assert done.returncode == 0, f"{command}: {done.stderr}{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart of this clone, with the version 9.8.7."""
    folder = tmp_path_factory.mktemp("chart") / "adascale-operator"
    output(sys.executable, DEPLOY / "chart.py", folder, "9.8.7")
    return folder


def objects(text: str) -> dict[tuple[str, str], Manifest]:
    """The objects by kind and name."""
    found = [item for item in yaml.safe_load_all(text) if item]
    by_name = {(item["kind"], item["metadata"]["name"]): item for item in found}
    assert len(by_name) == len(found)
    return by_name


def template(
    chart: Path, *values: str, namespace: str = names.SYSTEM_NAMESPACE
) -> dict[tuple[str, str], Manifest]:
    options = [argument for value in values for argument in ("--set", value)]
    return objects(output("helm", "template", "release", chart, "--namespace", namespace, *options))


def overlay(*folders: str) -> dict[tuple[str, str], Manifest]:
    """The objects of kustomize, without what a chart must not have."""
    found = objects("---\n".join(build(folder) for folder in folders))
    return {key: item for key, item in found.items() if key[0] != "Namespace"}


def build(folder: str) -> str:
    """The output of kustomize for an overlay, or for an overlay and a component: `postgres+without-tls`."""
    name, _, component = folder.partition("+")
    if not component:
        return output("kubectl", "kustomize", DEPLOY / name)
    with tempfile.TemporaryDirectory() as place:
        copied = Path(place) / "deploy"
        shutil.copytree(DEPLOY, copied)
        (copied / "own").mkdir()
        (copied / "own" / "kustomization.yaml").write_text(
            yaml.safe_dump({"resources": [f"../{name}"], "components": [f"../{component}"]})
        )
        return output("kubectl", "kustomize", copied / "own")


def without_annotation_of_helm(found: dict[tuple[str, str], Manifest]) -> dict[tuple[str, str], Manifest]:
    crd = found["CustomResourceDefinition", f"{names.PLURAL}.{names.API_GROUP}"]
    annotations = crd["metadata"]["annotations"]
    assert annotations.pop("helm.sh/resource-policy") == "keep"
    if not annotations:
        del crd["metadata"]["annotations"]
    return found


def pod(found: dict[tuple[str, str], Manifest], kind: str, name: str) -> Manifest:
    spec: Manifest = found[kind, name]["spec"]["template"]["spec"]
    return spec


@pytest.mark.parametrize(
    ("release", "semantic"),
    [("9.8.7", "9.8.7"), ("0.2.0rc1", "0.2.0-rc1"), ("0.2.0.dev3", "0.2.0-dev3"), ("0.2.0-rc1", "0.2.0-rc1")],
)
def test_the_version_of_the_chart_is_semantic_and_that_of_the_images_is_the_release(
    tmp_path: Path, release: str, semantic: str
) -> None:
    folder = tmp_path / "adascale-operator"
    output(sys.executable, DEPLOY / "chart.py", folder, release)
    written = yaml.safe_load((folder / "Chart.yaml").read_text())
    assert (written["version"], written["appVersion"]) == (semantic, release)


@needs_helm
@pytest.mark.parametrize(
    ("folders", "namespace", "values"),
    [
        (["."], names.SYSTEM_NAMESPACE, []),
        (["kind"], names.SYSTEM_NAMESPACE, ["image.pullPolicy=Never"]),
        (["one-namespace"], "adascale", ["oneNamespace=true"]),
        (["openshift"], names.SYSTEM_NAMESPACE, ["openshift=true"]),
        (["postgres"], names.SYSTEM_NAMESPACE, ["postgres.secretName=adascale-postgres"]),
        ([".", "monitoring"], names.SYSTEM_NAMESPACE, ["monitoring.enabled=true"]),
        (["kind+without-tls"], names.SYSTEM_NAMESPACE, ["image.pullPolicy=Never,tls.enabled=false"]),
        (
            ["postgres+without-tls"],
            names.SYSTEM_NAMESPACE,
            ["postgres.secretName=adascale-postgres,tls.enabled=false,tls.required=true"],
        ),
        (["kind+require-tls"], names.SYSTEM_NAMESPACE, ["image.pullPolicy=Never,tls.required=true"]),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, list) else "",
)
def test_the_objects_are_those_of_kustomize(
    chart: Path, folders: list[str], namespace: str, values: list[str]
) -> None:
    templated = template(chart, "image.tag=dev", *values, namespace=namespace)
    expected = overlay(*folders)
    assert set(templated) == set(expected)
    for key, item in without_annotation_of_helm(templated).items():
        assert item == expected[key]


@needs_helm
def test_values_reach_what_they_name(chart: Path) -> None:
    found = template(
        chart,
        "image.registry=registry.example/team",
        "image.pullSecrets[0].name=credentials",
        "controller.image=registry.example/mine@sha256:0123",
        "controller.replicas=2",
        "controller.arguments={--request-nodes}",
        "controller.environment[0].name=HTTPS_PROXY,controller.environment[0].value=http://proxy:3128",
        "controller.tolerations[0].key=system",
        "api.tolerations[0].key=system",
        "api.arguments={--protect-reads}",
        "api.nodeSelector.disk=ssd",
        "api.priorityClassName=system-cluster-critical",
        "api.resources.limits.memory=1Gi",
        "api.storage.size=5Gi",
        "api.storage.storageClassName=fast",
        "clusterNameSuffix=-team",
        "crd.install=false",
    )
    operator, service = (
        pod(found, "Deployment", names.CONTROLLER),
        pod(found, "StatefulSet", names.API_SERVICE),
    )
    (controller,), (api,) = operator["containers"], service["containers"]
    assert controller["image"] == "registry.example/mine@sha256:0123"
    assert api["image"] == "registry.example/team/adascale-api:9.8.7"
    assert operator["imagePullSecrets"] == service["imagePullSecrets"] == [{"name": "credentials"}]
    assert found["Deployment", names.CONTROLLER]["spec"]["replicas"] == 2
    assert controller["args"][-1] == "--request-nodes"
    assert controller["env"][-1] == {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    assert len(operator["tolerations"]) == 3
    assert operator["tolerations"][-1] == service["tolerations"][-1] == {"key": "system"}
    assert api["args"][-1] == "--protect-reads"
    assert (service["nodeSelector"], service["priorityClassName"]) == (
        {"disk": "ssd"},
        "system-cluster-critical",
    )
    assert api["resources"]["limits"] == {"memory": "1Gi"}
    (claim,) = found["StatefulSet", names.API_SERVICE]["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"] == {"storage": "5Gi"}
    assert ("CustomResourceDefinition", f"{names.PLURAL}.{names.API_GROUP}") not in found
    for (kind, name), item in found.items():
        if kind in ("ClusterRole", "ClusterRoleBinding"):
            assert name.endswith("-team")
        if item.get("roleRef", {}).get("kind") == "ClusterRole":
            assert ("ClusterRole", item["roleRef"]["name"]) in found


@needs_helm
def test_the_secret_of_another_program_is_used_everywhere(chart: Path) -> None:
    found = template(chart, "tls.secretName=mine", "monitoring.enabled=true")
    assert names.CERTIFICATE_SECRET not in json.dumps(list(found.values()))
    (operator,) = pod(found, "Deployment", names.CONTROLLER)["containers"]
    assert {"--tls-secret=$(POD_NAMESPACE)/mine", "--tls-external"} <= set(operator["args"])
    volumes = pod(found, "StatefulSet", names.API_SERVICE)["volumes"]
    assert [each["secret"]["secretName"] for each in volumes if "secret" in each] == ["mine"]
    rules = found["Role", "adascale-controller-certificates"]["rules"]
    assert ["adascale-ca", "mine"] in [rule.get("resourceNames") for rule in rules]


@needs_helm
def test_without_tls_nothing_speaks_it(chart: Path) -> None:
    found = template(chart, "tls.enabled=false", "monitoring.enabled=true")
    del found["CustomResourceDefinition", f"{names.PLURAL}.{names.API_GROUP}"]
    used = {key: item for key, item in found.items() if key[1] != "adascale-metrics-reader"}
    assert "https" not in json.dumps(list(used.values())).lower()
    assert "tlsConfig" not in json.dumps(list(used.values()))


@needs_helm
def test_lint_finds_nothing(chart: Path) -> None:
    assert "0 chart(s) failed" in output("helm", "lint", "--strict", chart)


@needs_helm
@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("controler.replicas=2", "controler"),
        ("controller.replicas=3", "controller/replicas"),
        ("api.arguments=--protect-reads", "api/arguments"),
        ("image.pullPolicy=always", "image/pullPolicy"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(chart: Path, value: str, named: str) -> None:
    done = run("helm", "template", "release", chart, "--set", value)
    assert done.returncode != 0
    assert named in done.stderr


def names_in(schema: Manifest) -> Any:
    """The names of a schema, as those of values."""
    return (
        {key: names_in(value) for key, value in schema["properties"].items()}
        if "properties" in schema
        else None
    )


def names_of(values: Any, schema: Any) -> Any:
    return (
        {key: names_of(value, schema.get(key)) for key, value in values.items()}
        if schema is not None
        else None
    )


def test_the_schema_has_exactly_the_values() -> None:
    values = yaml.safe_load((DEPLOY / "chart" / "values.yaml").read_text())
    schema = names_in(json.loads((DEPLOY / "chart" / "values.schema.json").read_text()))
    # Helm adds it to the values of a chart that is a part of another.
    del schema["global"]
    assert names_of(values, schema) == schema
