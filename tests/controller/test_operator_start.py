"""What the operator says at its start about a cluster that it can't use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from adascale_controller.cli.app import app
from adascale_controller.operator.runtime import main
from adascale_controller.operator.types.settings import OperatorSettings
from support.api_server import serving

REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def test_the_operator_ends_with_one_sentence_on_a_cluster_that_it_can_not_use(tmp_path: Path) -> None:
    with serving() as server:
        server.installed = False
        server.answers["POST", REVIEWS] = (201, {"status": {"allowed": True}})
        kubeconfig = server.write_kubeconfig(tmp_path / "config")
        done = subprocess.run(
            [sys.executable, "-m", "adascale_controller", "operator", "--api-url", "http://127.0.0.1:9"],
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        2,
        "adascale: the cluster has no resource adascalejobs.adascale.dev: apply its CustomResourceDefinition "
        "with kubectl apply -f deploy/base/crd.yaml, which is a part of kubectl apply -k deploy",
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "namespace"),
    [
        (["--namespace", "team"], "team"),
        (["--namespace", "team", "--lease-namespace", "other"], "other"),
        (["--namespace", "team", "--lease-namespace", ""], None),
        ([], None),
    ],
)
def test_operators_for_a_namespace_have_one_lease(
    options: list[str], namespace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[OperatorSettings] = []
    monkeypatch.setattr(main, "run_operator", started.append)
    assert CliRunner().invoke(app, ["operator", *options]).exit_code == 0
    assert [each.lease_namespace for each in started] == [namespace]
