"""What is installed on a cluster: names, rights, and what pods are allowed."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from adascale_api.cli import ENV_DATABASE
from adascale_controller.cluster.kubernetes_api import METRICS_READER
from adascale_core import names

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PARTS = ("worker", "api", "controller")


def read(*files: str) -> list[dict[str, Any]]:
    """The objects of these files."""
    return [item for file in files for item in yaml.safe_load_all((DEPLOY / file).read_text()) if item]


EVERYWHERE = [
    item for name in read("base/kustomization.yaml")[0]["resources"] for item in read(f"base/{name}")
]
ALL_NAMESPACES = read("all-namespaces/rights.yaml", "all-namespaces/network.yaml")
ONE_NAMESPACE = read("one-namespace/rights.yaml")
POSTGRES = read("postgres/api.yaml")
WORKLOADS = [item for item in [*EVERYWHERE, *POSTGRES] if item["kind"] in ("Deployment", "StatefulSet")]


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    (found,) = [item for item in objects if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


# -- names ----------------------------------------------------------------------------------------------


def test_workloads_have_the_names_in_core() -> None:
    find(EVERYWHERE, "Namespace", names.SYSTEM_NAMESPACE)
    find(EVERYWHERE, "CustomResourceDefinition", f"{names.PLURAL}.{names.API_GROUP}")
    for part in (names.API_SERVICE, names.CONTROLLER):
        find(EVERYWHERE, "ServiceAccount", part)
        for workload in [item for item in WORKLOADS if item["metadata"]["name"] == part]:
            assert pod(workload)["serviceAccountName"] == part
            assert pod(workload)["containers"][0]["image"] == part
    service = find(EVERYWHERE, "Service", names.API_SERVICE)
    assert [port["port"] for port in service["spec"]["ports"]] == [names.DEFAULT_API_PORT]
    assert read("base/kustomization.yaml")[0]["namespace"] == names.SYSTEM_NAMESPACE


def test_the_metrics_service_accepts_the_operators_service_account() -> None:
    service = pod(find(EVERYWHERE, "StatefulSet", names.API_SERVICE))["containers"][0]
    assert f"--controller-account=$(POD_NAMESPACE):{names.CONTROLLER}" in service["args"]


def test_the_operators_token_is_for_the_metrics_service_only() -> None:
    spec = pod(find(EVERYWHERE, "Deployment", names.CONTROLLER))
    (token,) = [volume for volume in spec["volumes"] if volume["name"] == "token"]
    (source,) = token["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == names.API_AUDIENCE
    (place,) = [m["mountPath"] for m in spec["containers"][0]["volumeMounts"] if m["name"] == "token"]
    assert f"--token-file={place}/{source['serviceAccountToken']['path']}" in spec["containers"][0]["args"]


def test_the_operator_calls_the_metrics_service_at_its_address() -> None:
    arguments = pod(find(EVERYWHERE, "Deployment", names.CONTROLLER))["containers"][0]["args"]
    url = f"https://{names.API_SERVICE}.$(POD_NAMESPACE).svc:{names.DEFAULT_API_PORT}"
    assert f"--api-url={url}" in arguments
    assert f"--tls-secret=$(POD_NAMESPACE)/{names.CERTIFICATE_SECRET}" in arguments


def test_the_service_reaches_pods_of_a_version_without_tls_whose_port_has_another_name() -> None:
    (port,) = find(EVERYWHERE, "Service", names.API_SERVICE)["spec"]["ports"]
    assert port["targetPort"] == port["port"] == names.DEFAULT_API_PORT
    (component,) = read("without-tls/kustomization.yaml")
    (patch,) = [each["patch"] for each in component["patches"] if each["target"]["kind"] == "Service"]
    (without_tls,) = yaml.safe_load(patch)
    assert without_tls["value"]["targetPort"] == names.DEFAULT_API_PORT


def test_the_metrics_service_has_the_certificate_and_not_the_authority_of_the_operator() -> None:
    for service in [item for item in WORKLOADS if item["metadata"]["name"] == names.API_SERVICE]:
        spec = pod(service)
        (volume,) = [each for each in spec["volumes"] if each["name"] == "tls"]
        assert volume["secret"]["secretName"] == names.CERTIFICATE_SECRET
        (container,) = spec["containers"]
        (place,) = [each["mountPath"] for each in container["volumeMounts"] if each["name"] == "tls"]
        files = {item["key"]: f"{place}/{item['path']}" for item in volume["secret"]["items"]}
        for option, key in (("--tls-cert", "tls.crt"), ("--tls-key", "tls.key")):
            assert f"{option}={files[key]}" in container["args"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"


def test_the_services_of_the_postgres_overlay_differ_in_their_database_only() -> None:
    alone, shared = (
        find(EVERYWHERE, "StatefulSet", names.API_SERVICE),
        find(POSTGRES, "Deployment", names.API_SERVICE),
    )
    assert shared["spec"]["replicas"] == 2
    one, other = pod(alone)["containers"][0], pod(shared)["containers"][0]
    assert [argument for argument in one["args"] if not argument.startswith("--database=")] == other["args"]
    assert ENV_DATABASE in [variable["name"] for variable in other["env"]]
    for field in ("ports", "startupProbe", "livenessProbe", "readinessProbe", "resources", "securityContext"):
        assert one[field] == other[field]
    budget = find(POSTGRES, "PodDisruptionBudget", names.API_SERVICE)
    assert budget["spec"]["selector"] == shared["spec"]["selector"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda item: str(item["metadata"]["name"]))
def test_probes_use_the_port_of_the_program(workload: dict[str, Any]) -> None:
    (container,) = pod(workload)["containers"]
    (port,) = container["ports"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        if probe in container:
            assert container[probe]["httpGet"]["port"] == port["name"]
    if workload["metadata"]["name"] == names.CONTROLLER:
        assert f"--liveness=:{port['containerPort']}" in container["args"]
    else:
        assert port["containerPort"] == names.DEFAULT_API_PORT


# -- rights ---------------------------------------------------------------------------------------------

Rights = dict[tuple[str, str], set[str]]

CERTIFICATE_RIGHTS: Rights = {
    ("", "secrets"): {"create"},
    ("", f"secrets/{names.AUTHORITY}"): {"get", "update"},
    ("", f"secrets/{names.CERTIFICATE_SECRET}"): {"get", "update"},
}
LEASE_RIGHTS: Rights = {
    ("coordination.k8s.io", "leases"): {"create"},
    ("coordination.k8s.io", "leases/adascale-controller"): {"get", "update"},
}
ROLES: dict[tuple[str, str], Rights] = {
    ("Role", "adascale-controller-lease"): LEASE_RIGHTS,
    ("Role", "adascale-controller-certificates"): CERTIFICATE_RIGHTS,
    ("ClusterRole", "adascale-api"): {("authentication.k8s.io", "tokenreviews"): {"create"}},
    ("ClusterRole", "adascale-edit"): {
        ("adascale.dev", "adascalejobs"): {
            *("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"),
        },
        ("adascale.dev", "adascalejobs/scale"): {"get", "update", "patch"},
        ("adascale.dev", "adascalejobs/status"): {"get"},
    },
    ("ClusterRole", "adascale-view"): {
        ("adascale.dev", "adascalejobs"): {"get", "list", "watch"},
        ("adascale.dev", "adascalejobs/scale"): {"get"},
        ("adascale.dev", "adascalejobs/status"): {"get"},
    },
    ("Role", METRICS_READER): {
        ("", "services/proxy/https:adascale-api:8265"): {"get"},
        ("", "services/proxy/adascale-api:8265"): {"get"},
    },
}
BINDINGS: dict[str, set[tuple[str, str, str, str, str]]] = {
    # kind, namespace that the right is held to, role, account
    "everywhere": {
        ("ClusterRoleBinding", "", "ClusterRole", "adascale-api", "adascale-api"),
        ("RoleBinding", "its own", "Role", "adascale-controller-lease", "adascale-controller"),
        ("RoleBinding", "its own", "Role", "adascale-controller-certificates", "adascale-controller"),
    },
    "all-namespaces": {
        ("ClusterRoleBinding", "", "ClusterRole", "adascale-controller", "adascale-controller"),
        ("ClusterRoleBinding", "", "ClusterRole", "adascale-controller-nodes", "adascale-controller"),
        ("ClusterRoleBinding", "", "ClusterRole", "adascale-controller-queues", "adascale-controller"),
    },
    "one-namespace": {
        ("RoleBinding", "its own", "ClusterRole", "adascale-controller", "adascale-controller"),
    },
}


def rights(role: dict[str, Any]) -> Rights:
    found: Rights = {}
    for rule in role["rules"]:
        assert set(rule) <= {"apiGroups", "resources", "resourceNames", "verbs"}
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for name in rule.get("resourceNames", [""]):
                    key = (group, f"{resource}/{name}".rstrip("/"))
                    found.setdefault(key, set()).update(rule["verbs"])
    return found


def test_roles_have_exactly_these_permissions() -> None:
    roles = [item for item in [*EVERYWHERE, *ALL_NAMESPACES, *ONE_NAMESPACE] if item["kind"].endswith("Role")]
    found = {(item["kind"], item["metadata"]["name"]): rights(item) for item in roles}
    # The rights of the operator are those of its calls, as test_kubernetes_cluster.py says.
    for part in ("", "-nodes", "-queues"):
        del found["ClusterRole", f"adascale-controller{part}"]
    assert found == ROLES


@pytest.mark.parametrize(("role", "of_users"), [("edit", ["admin", "edit"]), ("view", ["view"])])
def test_roles_of_users_include_adascalejobs(role: str, of_users: list[str]) -> None:
    labels = find(EVERYWHERE, "ClusterRole", f"adascale-{role}")["metadata"]["labels"]
    for name in ("admin", "edit", "view"):
        added = labels.get(f"rbac.authorization.k8s.io/aggregate-to-{name}") == "true"
        assert added == (name in of_users)


@pytest.mark.parametrize(
    ("where", "objects"),
    [("everywhere", EVERYWHERE), ("all-namespaces", ALL_NAMESPACES), ("one-namespace", ONE_NAMESPACE)],
)
def test_roles_are_bound_to_exactly_these_accounts(where: str, objects: list[dict[str, Any]]) -> None:
    bound = set()
    for item in objects:
        if item["kind"].endswith("Binding"):
            for subject in item["subjects"]:
                assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", names.SYSTEM_NAMESPACE)
                held = "its own" if item["kind"] == "RoleBinding" else ""
                bound.add(
                    (item["kind"], held, item["roleRef"]["kind"], item["roleRef"]["name"], subject["name"])
                )
    assert bound == BINDINGS[where]


# -- pods -----------------------------------------------------------------------------------------------


def test_the_namespace_enforces_the_restricted_standard() -> None:
    labels = find(EVERYWHERE, "Namespace", names.SYSTEM_NAMESPACE)["metadata"]["labels"]
    for mode in ("enforce", "audit", "warn"):
        assert labels[f"pod-security.kubernetes.io/{mode}"] == "restricted"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda item: str(item["metadata"]["name"]))
def test_pods_are_restricted_and_write_to_volumes_only(workload: dict[str, Any]) -> None:
    spec = pod(workload)
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for volume in spec["volumes"]:
        assert {"emptyDir", "projected", "secret"} & set(volume), "no volume is of the node"
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(container["resources"]["requests"]) == {"cpu", "memory"}
    assert "memory" in container["resources"]["limits"]
    assert {"startupProbe", "livenessProbe"} <= set(container)


def test_the_metrics_service_never_has_two_pods() -> None:
    # A StatefulSet starts a pod only after the previous pod has been deleted; a Deployment does not.
    service = find(EVERYWHERE, "StatefulSet", names.API_SERVICE)
    assert service["spec"]["replicas"] == 1
    (claim,) = service["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in claim["spec"]


def test_only_replicas_and_the_operator_may_reach_the_metrics_service() -> None:
    policy = find(EVERYWHERE, "NetworkPolicy", names.API_SERVICE)["spec"]
    (rule,) = policy["ingress"]
    assert [port["port"] for port in rule["ports"]] == [names.DEFAULT_API_PORT]
    replicas, operator = rule["from"]
    assert replicas["namespaceSelector"] == {}
    assert replicas["podSelector"] == {"matchExpressions": [{"key": names.LABEL_JOB, "operator": "Exists"}]}
    assert operator == {"podSelector": {"matchLabels": {"app.kubernetes.io/name": names.CONTROLLER}}}
    closed = find(EVERYWHERE, "NetworkPolicy", names.CONTROLLER)["spec"]
    assert closed["policyTypes"] == ["Ingress"]
    assert "ingress" not in closed


def test_in_one_namespace_no_policy_blocks_traffic_between_replicas() -> None:
    assert all(item["spec"]["podSelector"] for item in EVERYWHERE if item["kind"] == "NetworkPolicy")


# -- overlays -------------------------------------------------------------------------------------------


def test_cert_manager_makes_the_secret_that_the_service_mounts() -> None:
    issued = read("cert-manager/certificate.yaml")
    certificate = find(issued, "Certificate", names.API_SERVICE)["spec"]
    assert certificate["secretName"] == names.CERTIFICATE_SECRET
    assert f"{names.API_SERVICE}.{names.SYSTEM_NAMESPACE}.svc" in certificate["dnsNames"]
    assert find(issued, "Issuer", certificate["issuerRef"]["name"])["spec"]["ca"] == {
        "secretName": find(issued, "Certificate", names.AUTHORITY)["spec"]["secretName"]
    }


@pytest.mark.parametrize("overlay", [".", "kind", "one-namespace"])
def test_overlays_use_the_images_that_make_images_builds(overlay: str) -> None:
    (overlaid,) = read(f"{overlay}/kustomization.yaml")
    assert [(image["name"], image["newTag"]) for image in overlaid["images"]] == [
        (names.API_SERVICE, "dev"),
        (names.CONTROLLER, "dev"),
    ]


def test_the_shipped_job_runs_on_the_image_of_the_worker() -> None:
    (job,) = read("adascalejob.yaml")
    (worker,) = job["spec"]["template"]["spec"]["containers"]
    assert (worker["name"], worker["image"]) == (names.WORKER_CONTAINER, "adascale-worker:dev")
    assert worker["securityContext"]["readOnlyRootFilesystem"] is True
    program = worker["command"][1]
    assert (ROOT / program).is_file()
    assert f"COPY {Path(program).parent} {Path(program).parent}" in stage("worker")


# -- images ---------------------------------------------------------------------------------------------

DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stage(name: str) -> str:
    (found,) = re.findall(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize("part", PARTS)
def test_no_image_runs_as_root(part: str) -> None:
    users = re.findall(r"^USER (\S+)$", stage(part), re.MULTILINE)
    # By number: a kubelet can't check whether a user name is that of root.
    assert users == ["65532:65532"]


@pytest.mark.parametrize("part", PARTS)
def test_an_image_installs_the_locked_dependencies_of_its_part(part: str) -> None:
    assert f"COPY --from=locks /locks/{part}.lock" in stage(part)
    assert "--require-hashes" in stage(part)


def test_the_dependencies_of_the_images_are_those_of_the_distribution() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"].values()
    allowed = {
        requirement.partition(">=")[0]
        for requirement in itertools.chain(project["project"]["dependencies"], *extras)
    }
    groups = {part: {*project["dependency-groups"][f"image-{part}"]} for part in PARTS}
    # Programs that use one of these install it in their own image.
    own = {"accelerate", "lightning", "scikit-learn", "transformers"}
    assert set[str]().union(*groups.values()) == allowed - own


def test_the_operator_needs_no_generated_calls_of_the_client_which_its_image_does_not_have() -> None:
    assert "trim kubernetes/aio/client/api" in stage("controller")
    for path in (ROOT / "controller" / "adascale_controller" / "operator").rglob("*.py"):
        assert not re.search(r"\bclient\.(?!Api)\w+Api\b|aio\.client\.api\b", path.read_text()), path


def test_images_use_the_installer_of_the_makefile() -> None:
    (in_image,) = re.findall(r"^ARG UV=(\S+)$", DOCKERFILE, re.MULTILINE)
    (in_makefile,) = re.findall(r"^UV := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert in_image == in_makefile


def test_the_images_are_built_from_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    folders = {Path(package).parent.name for package in packages}
    assert folders == {path.parents[1].name for path in ROOT.glob("*/adascale_*/__init__.py")}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    for folder in folders:
        assert f"COPY {folder} {folder}" in stage("wheel")
        assert f"!{folder}" in ignored
