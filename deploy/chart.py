"""Writes the Helm chart from the manifests of this folder: `make chart`.

The manifests for kustomize are the only source of the objects. This program turns them into templates: it
replaces what `chart/values.yaml` can set, and puts conditions around what an installation may leave out. The
files of `chart/` itself are written by hand. A text that is not found where it is expected is an error, so a
change of a manifest can not silently lose a value of the chart.

    python deploy/chart.py FOLDER [VERSION]

writes the chart to FOLDER, which must not exist or be an earlier chart. Without a version, it is that of
pyproject.toml.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEPLOY = Path(__file__).parent
NAMESPACE = "adascale-system"
CLUSTER_SCOPED = ("ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")

ALL = "not .Values.oneNamespace"
ONE = ".Values.oneNamespace"
SQLITE = "not .Values.postgres.secretName"
POSTGRES = ".Values.postgres.secretName"
MONITORING = ".Values.monitoring.enabled"
TLS = ".Values.tls.enabled"
REQUIRE_TLS = "and .Values.tls.enabled .Values.tls.required"
EXTERNAL_TLS = "and .Values.tls.enabled .Values.tls.secretName"
TLS_SECRET = "adascale-api-tls"


class ChartError(Exception):
    """A manifest is not as this program expects it."""


def replace(text: str, old: str, new: str) -> str:
    """Return a text with its only occurrence of `old` replaced.

    Raises:
        ChartError: it occurs not once.
    """
    if text.count(old) != 1:
        raise ChartError(
            f"`{old.strip()}` occurs {text.count(old)} times, and not once; adapt deploy/chart.py"
        )
    return text.replace(old, new)


def append(text: str, key: str, addition: str) -> str:
    """Return a manifest with lines after the last line of the list or mapping of `key`.

    Args:
        text: the manifest.
        key: the only line with this key, with its indentation.
        addition: lines of a template.
    """
    pattern = rf"^{re.escape(key)}\n(?:{' ' * (len(key) - len(key.lstrip()))} .*\n)*"
    found = list(re.finditer(pattern, text, re.MULTILINE))
    if len(found) != 1:
        raise ChartError(f"`{key.strip()}` occurs {len(found)} times, and not once; adapt deploy/chart.py")
    return text[: found[0].end()] + addition + text[found[0].end() :]


def value(expression: str) -> str:
    """Return the template of the value of an expression."""
    return "{{ " + expression + " }}"


def when(condition: str, lines: str) -> str:
    """Return the template of lines that depend on a condition."""
    return "{{- if " + condition + " }}\n" + lines + "{{- end }}\n"


def given(name: str, lines: str) -> str:
    """Return the template of lines with a value, which is `.` in them, if it is not empty."""
    return "{{- with .Values." + name + " }}\n" + lines + "{{- end }}\n"


def as_yaml(expression: str, indent: int) -> str:
    """Return the template of a value as YAML."""
    return value(f"toYaml {expression} | indent {indent}") + "\n"


def workload(text: str, part: str) -> str:
    """Return the template of a Deployment or StatefulSet of a part, `api` or `controller`."""
    image = value(f'include "adascale.image" (list . "{part}") | quote')
    text = replace(text, f"          image: adascale-{part}\n", f"          image: {image}\n")
    text = replace(text, "PullPolicy: IfNotPresent", "PullPolicy: " + value(".Values.image.pullPolicy"))
    text = append(text, "          args:", given(f"{part}.arguments", as_yaml(".", 12)))
    text = append(text, "          env:", given(f"{part}.environment", as_yaml(".", 12)))
    text, count = re.subn(
        r"^          resources:\n(?: {12}.*\n)+",
        "          resources:\n" + as_yaml(f".Values.{part}.resources", 12),
        text,
        flags=re.MULTILINE,
    )
    if count != 1:
        raise ChartError(
            f"the container of {part} has {count} `resources`, and not one; adapt deploy/chart.py"
        )
    pod = (
        given(f"{part}.nodeSelector", "      nodeSelector:\n" + as_yaml(".", 8))
        + given(f"{part}.priorityClassName", "      priorityClassName: " + value(".") + "\n")
        + given("image.pullSecrets", "      imagePullSecrets:\n" + as_yaml(".", 8))
    )
    if "      tolerations:\n" in text:
        text = append(text, "      tolerations:", given(f"{part}.tolerations", as_yaml(".", 8)))
    else:
        pod += given(f"{part}.tolerations", "      tolerations:\n" + as_yaml(".", 8))
    text = replace(text, "      enableServiceLinks: false\n", "      enableServiceLinks: false\n" + pod)
    for group in ("        fsGroup: 65532\n", "        fsGroupChangePolicy: OnRootMismatch\n"):
        if group in text:
            text = replace(text, group, when("not .Values.openshift", group))
    return text


def lines_with_tls(text: str, *patterns: str) -> str:
    """Return a template whose lines that match a pattern, with those below them, are there with TLS only."""
    for pattern in patterns:
        found = re.findall(rf"^ *{pattern}.*\n", text, re.MULTILINE)
        if len(found) != 1:
            raise ChartError(f"`{pattern}` matches {len(found)} lines, and not one; adapt deploy/chart.py")
        indent = len(found[0]) - len(found[0].lstrip())
        (block,) = re.findall(rf"^ *{pattern}.*\n(?: {{{indent + 1},}}.*\n)*", text, re.MULTILINE)
        text = replace(text, block, when(TLS, block))
    return text


def scheme(text: str) -> str:
    """Return a template with `https` only with TLS."""
    for upper, lower in (("HTTPS", "HTTP"), ("https", "http")):
        chosen = value(f'ternary "{upper}" "{lower}" .Values.tls.enabled')
        text = re.sub(rf"\b{upper}\b", chosen, text)
    return text


def service(text: str) -> str:
    """Return the template of a workload of the metrics service."""
    text = append(
        workload(text, "api"), "          args:", when(REQUIRE_TLS, "            - --require-tls\n")
    )
    return scheme(lines_with_tls(text, "- --tls-cert=", "- --tls-key=", r"- \{name: tls,", "- name: tls$"))


def monitor(text: str) -> str:
    """Return the template of what Prometheus reads."""
    return text if "tlsConfig" not in text else scheme(lines_with_tls(text, "scheme: ", "tlsConfig:"))


def operator(text: str) -> str:
    """Return the template of the operator."""
    text = append(
        workload(text, "controller"),
        "          args:",
        when(ONE, "            - --namespace=$(POD_NAMESPACE)\n")
        + when(".Values.openshift", "            - --no-fs-group\n")
        + when(EXTERNAL_TLS, "            - --tls-external\n"),
    )
    text = scheme(lines_with_tls(text, "- --tls-secret="))
    return replace(text, "  replicas: 1\n", "  replicas: " + value(".Values.controller.replicas") + "\n")


def service_with_sqlite(text: str) -> str:
    """Return the template of the metrics service with a volume."""
    text = replace(service(text), "storage: 1Gi}", "storage: " + value(".Values.api.storage.size") + "}")
    claim = "        accessModes: [ReadWriteOnce]\n"
    name = given("api.storage.storageClassName", "        storageClassName: " + value(".") + "\n")
    return replace(text, claim, claim + name)


def service_with_postgres(text: str) -> str:
    """Return the template of the metrics services on one database."""
    text = replace(service(text), "name: adascale-postgres,", "name: " + value(POSTGRES) + ",")
    return replace(text, "  replicas: 2\n", "  replicas: " + value(".Values.postgres.replicas") + "\n")


def address(text: str) -> str:
    """Return the template of the Service: with several services, clients shall reach a ready one."""
    field = "  publishNotReadyAddresses: true\n"
    return replace(scheme(text), field, when(SQLITE, field))


def of_prometheus(text: str) -> str:
    """Return the template of a network policy for Prometheus."""
    name = value(".Values.monitoring.namespace")
    return replace(text, "metadata.name: monitoring}", "metadata.name: " + name + "}")


def unchanged(text: str) -> str:
    """Return the same text."""
    return text


def kept(text: str) -> str:
    """Return the template of the CRD. Helm updates it, and never deletes it: all jobs would be deleted."""
    annotation = "    helm.sh/resource-policy: keep\n"
    if re.search(r"^  annotations:$", text, re.MULTILINE):
        return append(text, "  annotations:", annotation)
    return replace(text, "\nmetadata:\n", "\nmetadata:\n  annotations:\n" + annotation)


@dataclass(frozen=True)
class Source:
    """Objects of a manifest that become templates.

    Args:
        file: the manifest.
        kinds: the kinds of these objects; empty for all.
        condition: of a template, for their presence; empty for always.
        edit: makes the template of one object.
    """

    file: str
    kinds: tuple[str, ...] = ()
    condition: str = ""
    edit: Callable[[str], str] = unchanged


SOURCES = (
    Source("base/crd.yaml", condition=".Values.crd.install", edit=kept),
    Source("base/api.yaml", ("ServiceAccount",)),
    Source("base/api.yaml", ("Service",), edit=address),
    Source("base/api.yaml", ("StatefulSet",), SQLITE, service_with_sqlite),
    Source("postgres/api.yaml", ("Deployment",), POSTGRES, service_with_postgres),
    Source("postgres/api.yaml", ("PodDisruptionBudget",), POSTGRES),
    Source("base/controller.yaml", ("ServiceAccount",)),
    Source("base/controller.yaml", ("Deployment",), edit=operator),
    Source("base/rights.yaml"),
    Source("base/users.yaml"),
    Source("base/network.yaml"),
    Source("all-namespaces/rights.yaml", condition=ALL),
    Source("all-namespaces/network.yaml", condition=ALL),
    Source("one-namespace/rights.yaml", condition=ONE),
    Source("monitoring/network.yaml", condition=MONITORING, edit=of_prometheus),
    Source("monitoring/rules.yaml", condition=MONITORING),
    Source("monitoring/servicemonitor.yaml", condition=MONITORING, edit=monitor),
)
DASHBOARD = when(
    MONITORING,
    """apiVersion: v1
kind: ConfigMap
metadata:
  name: adascale-dashboard
  namespace: {{ .Release.Namespace }}
  labels: {grafana_dashboard: "1"}
data:
  dashboard.json: {{ .Files.Get "dashboard.json" | toJson }}
""",
)


def kind_of(document: str) -> str:
    """Return the kind of a manifest of one object."""
    (kind,) = re.findall(r"^kind: (\w+)$", document, re.MULTILINE)
    return str(kind)


def source_of(document: str, file: str) -> Source:
    """Return the entry of `SOURCES` for an object of a file."""
    kind = kind_of(document)
    found = [source for source in SOURCES if source.file == file and kind in (source.kinds or (kind,))]
    if len(found) != 1:
        raise ChartError(
            f"SOURCES of deploy/chart.py has {len(found)} entries for the {kind} of {file}; it needs one"
        )
    return found[0]


def template_of(document: str, source: Source) -> str:
    """Return the template of one object."""
    # What Prometheus fills in is not for Helm.
    text = document.replace("{{", '{{ "{{" }}')
    kind = kind_of(document)
    text = source.edit(text)
    if kind != "CustomResourceDefinition":
        text = text.replace(NAMESPACE, value(".Release.Namespace"))
    if kind not in CLUSTER_SCOPED and not re.search(r"^  namespace: ", text, re.MULTILINE):
        text = replace(
            text, "\nmetadata:\n", "\nmetadata:\n  namespace: " + value(".Release.Namespace") + "\n"
        )
    text = text.replace(TLS_SECRET, value(f'.Values.tls.secretName | default "{TLS_SECRET}"'))
    suffix = value(".Values.clusterNameSuffix")
    if kind in ("ClusterRole", "ClusterRoleBinding"):
        text = re.sub(r"^(  name: \S+)$", rf"\1{suffix}", text, flags=re.MULTILINE)
    text = re.sub(r"(roleRef: .*kind: ClusterRole, name: [\w-]+)", rf"\1{suffix}", text)
    return when(source.condition, f"---\n{text}") if source.condition else f"---\n{text}"


def chart_version(version: str) -> str:
    """Return the version of a chart, which is semantic: 1.2.0-rc1 for the Python version 1.2.0rc1."""
    return re.sub(r"(\d)((?:a|b|rc|\.dev)\d+)$", lambda match: f"{match[1]}-{match[2].lstrip('.')}", version)


def write(folder: Path, version: str) -> None:
    """Write the chart.

    Args:
        folder: of the chart. An earlier chart is replaced.
        version: of the release and of the images, as in pyproject.toml.

    Raises:
        ChartError: a manifest is not as expected, or the folder has something else.
    """
    if folder.exists() and not (folder / "Chart.yaml").is_file():
        raise ChartError(f"{folder} exists, and is not a chart: give a folder that does not exist")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DEPLOY / "chart", folder)
    description = folder / "Chart.yaml"
    text = re.sub(r"^version: .*$", f"version: {chart_version(version)}", description.read_text(), flags=re.M)
    description.write_text(re.sub(r"^appVersion: .*$", f"appVersion: {version}", text, flags=re.M))
    shutil.copy(DEPLOY / "monitoring" / "dashboard.json", folder)
    (folder / "templates" / "monitoring-dashboard.yaml").write_text(DASHBOARD)
    for file in dict.fromkeys(source.file for source in SOURCES):
        documents = re.split(r"^---\n", (DEPLOY / file).read_text(), flags=re.MULTILINE)
        templates = "".join(template_of(document, source_of(document, file)) for document in documents)
        (folder / "templates" / file.replace("/", "-").removeprefix("base-")).write_text(templates)


def main() -> None:
    """Write the chart to the folder of the command line."""
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: chart.py FOLDER [VERSION]")
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]
    try:
        write(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else project["version"])
    except ChartError as error:
        sys.exit(f"deploy/chart.py: {error}")


if __name__ == "__main__":
    main()
