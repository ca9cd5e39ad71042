"""Whether all replicas share the folder in `checkpoint.path`."""

from __future__ import annotations

import re
from typing import Any

import pytest

from adascale_controller.operator.observe.adascalejob import AdaScaleJob, why_not_shared
from adascale_controller.operator.types.settings import OperatorSettings
from support.fake_api_server import FakeApiServer

CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}


def template(mounts: dict[str, str], **volumes: dict[str, Any]) -> dict[str, Any]:
    """A template whose worker mounts volumes, by where."""
    mounted = [{"mountPath": place, "name": name} for place, name in mounts.items()]
    containers = [
        {"name": "beside", "image": "i", "volumeMounts": [{"mountPath": "/beside", "name": "data"}]},
        {"name": "worker", "image": "i", "volumeMounts": mounted},
    ]
    return {"spec": {"containers": containers, "volumes": [{"name": n} | v for n, v in volumes.items()]}}


@pytest.mark.parametrize(
    ("path", "mounts"),
    [
        ("/data", {"/data": "data"}),
        ("/data/", {"/data": "data"}),
        ("/data/run/1", {"/other": "tmp", "/data/": "data"}),
        ("/data/run", {"/": "data"}),
        ("/data/run", {"/data": "tmp", "/data/run": "data"}),
    ],
)
@pytest.mark.parametrize("kind", [CLAIM, {"nfs": {}}, {"hostPath": {}}, {"csi": {}}])
def test_a_path_in_a_shared_volume_is_accepted(
    path: str, mounts: dict[str, str], kind: dict[str, Any]
) -> None:
    assert why_not_shared(template(mounts, data=kind, tmp={"emptyDir": {}}), path) is None


@pytest.mark.parametrize(
    ("path", "mounts", "kind", "why"),
    [
        ("/data", {}, CLAIM, "container worker mounts no volume at /data or above it"),
        ("/beside", {}, CLAIM, "container worker mounts no volume at /beside"),
        ("/database", {"/data": "data"}, CLAIM, "mounts no volume at /database"),
        ("/data", {"/data/run": "data"}, CLAIM, "mounts no volume at /data"),
        ("/data/../x", {"/data": "data"}, CLAIM, "mounts no volume"),
        (
            "/data/x",
            {"/data": "data"},
            {"emptyDir": {}},
            "volume data, mounted at /data by .*, is of type emptyDir",
        ),
        (
            "/data",
            {"/data": "data"},
            {"ephemeral": {}},
            "is of type ephemeral: each pod has its own",
        ),
        ("/data", {"/data": "data"}, {"configMap": {}}, "is read-only"),
    ],
)
def test_a_path_that_pods_do_not_share_is_rejected(
    path: str, mounts: dict[str, str], kind: dict[str, Any], why: str
) -> None:
    reason = why_not_shared(template(mounts, data=kind), path)
    assert reason is not None
    assert re.search(why, reason)


@pytest.mark.parametrize(("most", "is_taken"), [(1, True), (2, False)])
def test_an_unshared_path_is_invalid_only_for_several_replicas(most: int, is_taken: bool) -> None:
    server = FakeApiServer()
    server.submit(maxReplicas=most, checkpoint={"path": "/data"}, template=template({}))
    assert server.job is not None
    job = AdaScaleJob.read(server.job, OperatorSettings("http://api"))
    assert (job.job is not None) == is_taken
    if not is_taken:
        assert "spec.checkpoint.path: container worker mounts no volume at /data" in (job.invalid or "")
