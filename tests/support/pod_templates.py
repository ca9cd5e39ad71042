"""Jobs with a pod template, and the pods that are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from adascale_controller.operator.apply.manifests import pod_manifest
from adascale_controller.operator.observe.adascalejob import AdaScaleJob
from adascale_controller.operator.types.actions import NewPod
from adascale_controller.operator.types.settings import OperatorSettings
from adascale_core.messages.job_spec import JobSpec
from support.definitions import define

SPEC = JobSpec(4, 256, (4, 64), 1, 4, 1000)
OWNER = {
    "apiVersion": "adascale.dev/v1alpha1",
    "kind": "AdaScaleJob",
    "name": "digits",
    "uid": "b7d1",
    "controller": True,
    "blockOwnerDeletion": True,
}


def container(name: str = "worker", **fields: Any) -> dict[str, Any]:
    return {"name": name, "image": "trainer:1", **fields}


def template(*containers: Mapping[str, Any], metadata: Any = None, **spec: Any) -> dict[str, Any]:
    made = {"spec": {"containers": list(containers or (container(),)), **spec}}
    return made if metadata is None else {"metadata": metadata} | made


def workload(made_of: Mapping[str, Any] | None = None, **of_job: Any) -> AdaScaleJob:
    return AdaScaleJob(
        namespace="team",
        name="digits",
        uid="b7d1",
        generation=1,
        job=define("team.digits", **{"spec": SPEC, **of_job}),
        template=made_of or template(container(command=["python", "train.py"])),
        created_at=1_700_000_000,
        settings=OperatorSettings("http://adascale-api.adascale-system:8265"),
    )


def pod(made_of: AdaScaleJob, single_node: bool = False) -> dict[str, Any]:
    return pod_manifest(made_of, NewPod(0, 0), single_node=single_node)


def worker(made_of: AdaScaleJob) -> dict[str, Any]:
    containers = pod(made_of)["spec"]["containers"]
    found: dict[str, Any] = next((item for item in containers if item["name"] == "worker"), containers[0])
    return found


def env(made_of: AdaScaleJob) -> dict[str, Any]:
    variables = worker(made_of)["env"]
    found = {item["name"]: item.get("value", item.get("valueFrom")) for item in variables}
    assert len(found) == len(variables)
    return found


def mounts(made_of: AdaScaleJob) -> dict[str, dict[str, Any]]:
    """The volume at each place of the worker."""
    volumes = {item["name"]: item for item in pod(made_of)["spec"]["volumes"]}
    return {item["mountPath"]: volumes[item["name"]] | item for item in worker(made_of)["volumeMounts"]}
