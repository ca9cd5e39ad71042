"""The installation, as a real API server takes it: accepted, restricted, and with the rights it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from adascale_core import names

DEPLOY = Path(__file__).parents[2] / "deploy"
OVERLAYS = (".", "kind", "plain", "one-namespace")
CLUSTER_SCOPED = ("ClusterRole", "ClusterRoleBinding")

Manifest = dict[str, Any]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not there"),
    pytest.mark.skipif(not os.environ.get("KUBECONFIG"), reason="KUBECONFIG names no cluster"),
]


def kubectl(*arguments: str, given: object = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["kubectl", *arguments],
        input=None if given is None else json.dumps(given),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if check and done.returncode:
        pytest.fail(f"kubectl {' '.join(arguments)}: {done.stderr}")
    return done


def listed(objects: list[Manifest]) -> Manifest:
    return {"apiVersion": "v1", "kind": "List", "items": objects}


def render(overlay: str, namespace: str) -> list[Manifest]:
    """The objects of an overlay, in a namespace of this test, and with names of its own in the cluster.

    So the test neither needs nor changes an existing installation.
    """
    text = kubectl("kustomize", str(DEPLOY / overlay)).stdout
    objects = [manifest for manifest in yaml.safe_load_all(text) if manifest]
    (own,) = [manifest["metadata"]["name"] for manifest in objects if manifest["kind"] == "Namespace"]
    for manifest in objects:
        metadata = manifest["metadata"]
        if metadata.get("namespace") == own:
            metadata["namespace"] = namespace
        if manifest["kind"] == "Namespace":
            metadata["name"] = namespace
        if manifest["kind"] in CLUSTER_SCOPED:
            metadata["name"] = f"{namespace}-{metadata['name']}"
            # Without the labels that aggregate these permissions to the roles of users.
            metadata["labels"] = {"adascale.dev/test": namespace}
        if manifest.get("roleRef", {}).get("kind") == "ClusterRole":
            manifest["roleRef"]["name"] = f"{namespace}-{manifest['roleRef']['name']}"
        for subject in manifest.get("subjects", []):
            if subject["namespace"] == own:
                subject["namespace"] = namespace
    return objects


@pytest.fixture
def namespace() -> Iterator[str]:
    """A name for a namespace, which is removed again with all of the test that is not in it."""
    name = f"install-{uuid.uuid4().hex[:8]}"
    yield name
    kubectl("delete", "namespace", name, "--ignore-not-found", "--wait=false")
    kubectl("delete", "clusterroles,clusterrolebindings", "--selector", f"adascale.dev/test={name}")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_accepted_under_the_restricted_standard(overlay: str, namespace: str) -> None:
    objects = render(overlay, namespace)
    kubectl(
        "apply",
        "-f",
        "-",
        given=listed([manifest for manifest in objects if manifest["kind"] == "Namespace"]),
    )
    others = [
        manifest for manifest in objects if manifest["kind"] not in ("Namespace", "CustomResourceDefinition")
    ]
    result = kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", given=listed(others))
    assert "Warning" not in result.stderr, result.stderr
    # What makes the pods is only warned of; the pods themselves would be refused.
    for workload in others:
        if workload["kind"] in ("Deployment", "StatefulSet"):
            spec = dict(workload["spec"]["template"]["spec"])
            for claim in workload["spec"].get("volumeClaimTemplates", []):
                spec["volumes"] = [*spec["volumes"], {"name": claim["metadata"]["name"], "emptyDir": {}}]
            spec["serviceAccountName"] = "default"
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": workload["metadata"]["name"], "namespace": namespace},
                "spec": spec,
            }
            kubectl("wait", "--for=create", "serviceaccount/default", "-n", namespace, "--timeout=30s")
            kubectl("create", "--dry-run=server", "-f", "-", given=pod)


def test_the_crd_is_accepted() -> None:
    kubectl(
        "apply", "--dry-run=server", "--server-side", "--force-conflicts", "-f", str(DEPLOY / "base/crd.yaml")
    )


# -- rights ---------------------------------------------------------------------------------------------

Attributes = tuple[str, str, str, str]
"""Group, resource with subresource, verb, and the name of the object or ''."""

CONTROLLER_MAY: list[Attributes] = [
    ("adascale.dev", "adascalejobs", "list", ""),
    ("adascale.dev", "adascalejobs", "watch", ""),
    ("adascale.dev", "adascalejobs", "delete", ""),
    ("adascale.dev", "adascalejobs/status", "patch", ""),
    ("", "pods", "watch", ""),
    ("", "pods", "create", ""),
    ("", "pods", "patch", ""),
    ("", "pods", "delete", ""),
    ("scheduling.k8s.io", "podgroups", "create", ""),
    ("", "persistentvolumeclaims", "create", ""),
    ("", "events", "create", ""),
    ("", "configmaps", "create", ""),
    ("", "configmaps", "patch", names.AUTHORITY),
]
CONTROLLER_MAY_NOT: list[Attributes] = [
    ("adascale.dev", "adascalejobs", "create", ""),
    ("adascale.dev", "adascalejobs", "patch", ""),
    ("adascale.dev", "adascalejobs/scale", "patch", ""),
    ("batch", "jobs", "list", ""),
    ("batch", "jobs", "create", ""),
    ("", "pods", "update", ""),
    ("", "pods/exec", "create", ""),
    ("", "pods/log", "get", ""),
    ("", "persistentvolumeclaims", "delete", ""),
    ("", "secrets", "get", ""),
    ("", "secrets", "list", ""),
    ("", "configmaps", "get", ""),
    ("", "configmaps", "patch", "another"),
    ("", "serviceaccounts/token", "create", ""),
    ("", "namespaces", "list", ""),
    ("", "nodes", "patch", ""),
    ("authentication.k8s.io", "tokenreviews", "create", ""),
    ("rbac.authorization.k8s.io", "clusterroles", "bind", ""),
    ("rbac.authorization.k8s.io", "rolebindings", "create", ""),
    ("apiextensions.k8s.io", "customresourcedefinitions", "get", ""),
    ("*", "*", "*", ""),
]
LEASE: list[Attributes] = [
    ("coordination.k8s.io", "leases", "create", ""),
    ("coordination.k8s.io", "leases", "get", names.CONTROLLER),
    ("coordination.k8s.io", "leases", "update", names.CONTROLLER),
]
CERTIFICATES: list[Attributes] = [
    ("", "secrets", "create", ""),
    *[
        ("", "secrets", verb, name)
        for name in (names.AUTHORITY, names.CERTIFICATE_SECRET)
        for verb in ("get", "update")
    ],
]
OWN: list[Attributes] = [*LEASE, *CERTIFICATES]
"""Permissions in the operator's namespace alone."""
OTHERS: list[Attributes] = [
    ("coordination.k8s.io", "leases", "update", "another"),
    ("", "secrets", "get", "another"),
    ("", "secrets", "update", "another"),
    ("", "secrets", "delete", names.AUTHORITY),
]
NODES: list[Attributes] = [("", "nodes", verb, "") for verb in ("list", "watch")]
REVIEW: Attributes = ("authentication.k8s.io", "tokenreviews", "create", "")
NOT_OF_SERVICE: list[Attributes] = [
    ("", "secrets", "get", ""),
    ("", "pods", "list", ""),
    ("adascale.dev", "adascalejobs", "get", ""),
    ("adascale.dev", "adascalejobs/status", "patch", ""),
    ("authorization.k8s.io", "subjectaccessreviews", "create", ""),
    ("*", "*", "*", ""),
]


Question = tuple[str, Attributes]
"""What may be done, in which namespace; '' is all of them."""


def ask(namespace: str, account: str, questions: list[Question]) -> list[bool]:
    """Whether a service account may do each of these."""
    reviews = [
        {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{namespace}:{account}",
                "groups": [
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{namespace}",
                    "system:authenticated",
                ],
                "resourceAttributes": {
                    "namespace": where,
                    "group": group,
                    "resource": resource.partition("/")[0],
                    "subresource": resource.partition("/")[2],
                    "verb": verb,
                    "name": name,
                },
            },
        }
        for where, (group, resource, verb, name) in questions
    ]
    shown = "jsonpath={.status.allowed} "
    answers = kubectl("create", "--output", shown, "-f", "-", given=listed(reviews)).stdout.split()
    return [{"true": True, "false": False}[answer] for answer in answers]


def install_rights(overlay: str, namespace: str) -> None:
    kinds = ("Namespace", "ServiceAccount", "Role", "RoleBinding", *CLUSTER_SCOPED)
    kubectl("apply", "-f", "-", given=listed([o for o in render(overlay, namespace) if o["kind"] in kinds]))


def compare(namespace: str, account: str, expected: list[tuple[str, Attributes, bool]]) -> None:
    answers = ask(namespace, account, [(where, what) for where, what, _ in expected])
    found = [(where, what, answer) for (where, what, _), answer in zip(expected, answers, strict=True)]
    assert found == expected


def test_the_permissions_of_the_operator_of_all_namespaces(namespace: str) -> None:
    install_rights(".", namespace)
    compare(
        namespace,
        names.CONTROLLER,
        [
            *[(where, attributes, True) for where in ("", "default") for attributes in CONTROLLER_MAY],
            *[("", attributes, True) for attributes in NODES],
            *[(namespace, attributes, True) for attributes in OWN],
            *[("default", attributes, False) for attributes in [*CONTROLLER_MAY_NOT, *OWN]],
            *[("", attributes, False) for attributes in CONTROLLER_MAY_NOT],
            *[(namespace, attributes, False) for attributes in OTHERS],
        ],
    )


def test_the_operator_of_one_namespace_has_no_permissions_outside_it(namespace: str) -> None:
    install_rights("one-namespace", namespace)
    compare(
        namespace,
        names.CONTROLLER,
        [
            *[(namespace, attributes, True) for attributes in [*CONTROLLER_MAY, *OWN]],
            *[(namespace, attributes, False) for attributes in [*CONTROLLER_MAY_NOT, *OTHERS]],
            *[
                (where, attributes, False)
                for where in ("", "default")
                for attributes in [*CONTROLLER_MAY, *OWN, *NODES]
            ],
        ],
    )


@pytest.mark.parametrize("overlay", [".", "one-namespace"])
def test_the_metrics_service_may_only_create_token_reviews(overlay: str, namespace: str) -> None:
    install_rights(overlay, namespace)
    compare(
        namespace,
        names.API_SERVICE,
        [
            ("", REVIEW, True),
            *[(where, attributes, False) for where in ("", namespace) for attributes in NOT_OF_SERVICE],
        ],
    )


@pytest.mark.parametrize("overlay", [".", "one-namespace"])
def test_the_service_account_of_worker_pods_has_no_permissions(overlay: str, namespace: str) -> None:
    install_rights(overlay, namespace)
    everything = [*CONTROLLER_MAY, *CONTROLLER_MAY_NOT, *OWN, *NODES, REVIEW, *NOT_OF_SERVICE]
    compare(
        namespace, "default", [(namespace, attributes, False) for attributes in dict.fromkeys(everything)]
    )


def test_the_roles_edit_and_view_include_adascalejobs(namespace: str) -> None:
    roles = [role for role in yaml.safe_load_all((DEPLOY / "base/users.yaml").read_text()) if role]
    for role in roles:
        role["metadata"]["name"] = f"{namespace}-{role['metadata']['name']}"
        role["metadata"]["labels"]["adascale.dev/test"] = namespace
    kubectl("create", "namespace", namespace)
    kubectl("create", "-f", "-", given=listed(roles))
    for role in ("edit", "view"):
        account = f"--serviceaccount={namespace}:{role}"
        kubectl("create", "rolebinding", role, f"--clusterrole={role}", account, "--namespace", namespace)
    jobs, scale, status = "adascalejobs", "adascalejobs/scale", "adascalejobs/status"
    table: list[tuple[str, str, bool, bool]] = [
        *[(jobs, verb, True, True) for verb in ("get", "list", "watch")],
        *[(jobs, verb, True, False) for verb in ("create", "update", "patch", "delete")],
        *[(scale, "get", True, True), (scale, "patch", True, False)],
        *[(status, "get", True, True), (status, "patch", False, False)],
    ]
    questions: list[Question] = [
        (namespace, (names.API_GROUP, resource, verb, "")) for resource, verb, *_ in table
    ]
    # The API server adds the roles up a moment after they are made.
    end = time.monotonic() + 30
    while True:
        answers = zip(ask(namespace, "edit", questions), ask(namespace, "view", questions), strict=True)
        found = [
            (resource, verb, edit, view)
            for (resource, verb, *_), (edit, view) in zip(table, answers, strict=True)
        ]
        if found == table or time.monotonic() > end:
            break
        time.sleep(0.2)
    assert found == table
