"""The commands for jobs of a cluster, against an API server over HTTP."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from adascale_controller.cli import kubectl_main
from adascale_controller.cluster.kubernetes_api import advice
from adascale_controller.job_overview import JobOverview
from adascale_core import names
from adascale_core.views.job_summary import JobStateName
from controller.conftest import REPORT
from e2e.local_run import adascale_in_process
from support.api_server import ApiServer, Object, serving
from support.certificates import tls_files
from support.service import Service

Adascale = Callable[..., "CompletedProcess[str]"]

RUNNING: Object = {
    "state": "Running", "replicas": 2, "desiredReplicas": 2, "batchSize": 32, "gain": 6.25,
    "efficiency": 0.781, "progress": 4512, "progressText": "37%", "restarts": 1,
    "conditions": [
        {"type": "Running", "status": "True", "reason": "Training", "message": "Training on 2 replicas"}
    ],
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with serving() as started:
        yield started


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path) -> Path:
    return server.write_kubeconfig(tmp_path / "kubeconfig")


@pytest.fixture
def adascale(kubeconfig: Path) -> Adascale:
    """Runs the command line with the kubeconfig of the server."""

    def run(*arguments: object, **options: object) -> CompletedProcess[str]:
        environ: dict[str, object] = {"KUBECONFIG": str(kubeconfig), **options}
        return adascale_in_process(*arguments, **environ)  # type: ignore[arg-type]

    return run


# -- which place a command is for -----------------------------------------------------------------------


def test_a_command_without_an_option_for_a_cluster_is_for_this_machine(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = adascale("status", "digits", "--state-dir", tmp_path)
    assert shown.returncode == 1
    assert f"no job digits found in {tmp_path}" in shown.stderr
    assert server.requests == []


@pytest.mark.parametrize(
    "options", [["--cluster"], ["-n", "default"], ["--context", "prod"]], ids=lambda each: str(each[0])
)
def test_each_option_for_a_cluster_selects_the_cluster(
    server: ApiServer, adascale: Adascale, options: list[str]
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = adascale("status", "digits", *options)
    assert shown.returncode == 0, shown.stderr
    assert "Running (Training on 2 replicas)" in shown.stdout


def test_the_plugin_of_kubectl_is_for_the_cluster_and_has_no_commands_for_one_machine(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = adascale("status", "digits", entry=kubectl_main)
    assert shown.returncode == 0, shown.stderr
    assert "Running (Training on 2 replicas)" in shown.stdout
    here = adascale("status", "digits", "--state-dir", ".", entry=kubectl_main)
    assert "No such option: --state-dir" in here.stderr
    helped = adascale("--help", entry=kubectl_main).stdout
    assert "Usage: kubectl adascale" in helped
    assert " explain " in helped
    assert " operator " not in helped
    assert " list " not in helped
    assert "No such command 'run'" in adascale("run", "x.yaml", entry=kubectl_main).stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("adascale status --cluster d", ["digits", "dots"]),
        ("adascale status --cluster di", ["digits"]),
        ("adascale status -n team ", ["mine"]),
        ("adascale status --context absent ", []),
        ("adascale status --state-dir /absent d", []),
    ],
)
def test_names_of_jobs_are_completed_in_the_place_that_the_options_select(
    server: ApiServer, adascale: Adascale, words: str, completed: list[str]
) -> None:
    for name, namespace in (("digits", "default"), ("dots", "default"), ("mine", "team")):
        server.add_job(name, namespace)
    count = len(words.split(" ")) - 1
    shown = adascale(_ADASCALE_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
    assert shown.stdout.split() == completed


# -- status ---------------------------------------------------------------------------------------------


def test_the_json_of_a_job_has_the_members_of_a_job_on_one_machine(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = json.loads(adascale("status", "digits", "--cluster", "-o", "json").stdout)
    local = JobOverview("digits", "default", JobStateName.RUNNING, 0.0).to_json()
    assert list(shown) == list(local)
    assert shown["efficiency"] == 0.781
    assert shown["startTime"] == 1795752000.0


def test_the_namespace_of_the_context_is_the_default(server: ApiServer, tmp_path: Path) -> None:
    server.add_job("mine", "team")
    kubeconfig = server.write_kubeconfig(tmp_path / "other", namespace="team")
    shown = adascale_in_process("status", "mine", "--kubeconfig", kubeconfig)
    assert "team.mine" in shown.stdout


def test_status_shows_the_replicas_of_the_metrics_service(
    server: ApiServer, adascale: Adascale, service: Service
) -> None:
    server.service = service.url
    server.add_job("digits", status=RUNNING, scaleInvariantSteps=12_000)
    shown = adascale("status", "digits", "--cluster")
    assert shown.stderr == ""
    rows = dict(line.split("   ", 1) for line in shown.stdout.splitlines() if "   " in line)
    assert rows["state"].strip() == "Running (Training on 2 replicas)"
    assert rows["progress"].strip() == "4,512 of 12,000 (37%)"
    assert rows["checkpoint"].strip() == "PersistentVolumeClaim digits-checkpoints"


def test_status_without_the_metrics_service_is_that_of_the_object(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = adascale("status", "digits", "--cluster")
    assert shown.returncode == 0
    assert "Running (Training on 2 replicas)" in shown.stdout
    assert "the API server cannot reach service adascale-api in namespace adascale-system" in shown.stderr


# -- errors ---------------------------------------------------------------------------------------------


def test_an_unknown_job_names_those_that_exist(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits")
    failed = adascale("status", "absent", "--cluster")
    assert failed.returncode == 1
    assert failed.stderr == (
        "adascale: no job absent in namespace default of context prod: the jobs there are digits\n"
    )


@pytest.mark.parametrize(
    ("job", "options", "message"),
    [
        ("digits", ["--cluster", "--state-dir", "."], "--state-dir is for a run on this machine"),
        ("team.digits", ["-n", "default"], "is in namespace team, but --namespace is default"),
        ("digits", ["--context", "absent"], "has no context 'absent'; it has away, prod"),
    ],
)
def test_an_option_that_contradicts_another_or_the_kubeconfig_is_an_error(
    adascale: Adascale, job: str, options: list[str], message: str
) -> None:
    failed = adascale("status", job, *options)
    assert failed.returncode == 2
    assert message in failed.stderr


@pytest.mark.parametrize("content", [None, "", "a: [", "text", "[]", "contexts: [{name: prod}]"])
def test_a_file_that_is_missing_or_no_kubeconfig_is_an_error(
    adascale: Adascale, kubeconfig: Path, content: str | None
) -> None:
    kubeconfig.write_text(content) if content is not None else kubeconfig.unlink()
    failed = adascale("status", "digits", "--cluster")
    assert failed.returncode == 2, failed.stderr
    assert f"no cluster is configured in {kubeconfig}" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_an_option_names_the_context_of_a_kubeconfig_without_a_current_one(
    server: ApiServer, adascale: Adascale, kubeconfig: Path
) -> None:
    server.add_job("digits")
    kubeconfig.write_text(kubeconfig.read_text().replace("current-context: prod", "current-context: ''"))
    shown = adascale("status", "digits", "--context", "prod")
    assert shown.returncode == 0, shown.stderr
    assert "digits" in shown.stdout
    failed = adascale("status", "digits", "--cluster")
    assert failed.returncode == 2
    assert "has no current context: choose one of away, prod with --context" in failed.stderr


def test_a_cluster_that_does_not_answer_is_an_error(adascale: Adascale) -> None:
    failed = adascale("status", "digits", "--context", "away")
    assert failed.returncode == 69
    assert failed.stderr == (
        "adascale: the API server http://127.0.0.1:9 of context away does not answer: connection refused\n"
    )


def test_an_expired_credential_is_an_error(server: ApiServer, adascale: Adascale) -> None:
    server.token = "another"
    failed = adascale("status", "digits", "--cluster")
    assert failed.returncode == 1
    assert "does not accept the credentials of context prod: they are missing, not valid or have expired" in (
        " ".join(failed.stderr.split())
    )


def test_a_cluster_without_the_custom_resource_is_an_error(server: ApiServer, adascale: Adascale) -> None:
    server.installed = False
    failed = adascale("status", "digits", "--cluster")
    assert "context prod does not know AdaScaleJobs" in failed.stderr
    assert "kubectl apply -k deploy" in failed.stderr


@pytest.mark.parametrize(
    ("right", "command", "what", "binding"),
    [
        (
            ("get", "adascalejobs"), ["status", "digits", "-n", "team"],
            "jane may not get adascalejobs.adascale.dev in namespace team",
            "kubectl -n team create rolebinding adascale-view-jane --clusterrole=view --user=jane",
        ),
        (
            ("get", "services/proxy"), ["gain", "digits", "--cluster"],
            "jane may not get services/proxy in namespace adascale-system",
            "kubectl -n adascale-system create rolebinding adascale-metrics-reader-jane "
            "--role=adascale-metrics-reader --user=jane",
        ),
    ],
)  # fmt: skip
def test_a_missing_right_is_named_with_the_role_that_gives_it(
    server: ApiServer, adascale: Adascale, right: tuple[str, str], command: list[str], what: str, binding: str
) -> None:
    server.add_job("digits", status=RUNNING)
    server.denied.add(right)
    failed = adascale(*command)
    assert failed.returncode == 1
    assert what in failed.stderr
    assert binding in failed.stderr


@pytest.mark.parametrize(
    ("user", "binding", "subject"),
    [
        # the issuer of OpenID Connect is a prefix by default; a name of a binding has no slash
        ("https://idp.example#J", "adascale-view-https:--idp.example#J", "--user=https://idp.example#J"),
        (
            "system:serviceaccount:team:ci",
            "adascale-view-system:serviceaccount:team:ci", "--serviceaccount=team:ci",
        ),
        ("Jane Doe", "adascale-view-Jane-Doe", "--user=Jane Doe"),
    ],
)  # fmt: skip
def test_the_advice_about_a_right_is_a_command_for_any_user(user: str, binding: str, subject: str) -> None:
    command = shlex.split(advice(user, "get", "adascalejobs", "adascale.dev", "team").splitlines()[1])
    assert command == [
        "kubectl", "-n", "team", "create", "rolebinding", binding, "--clusterrole=view", subject,
    ]  # fmt: skip


# -- gain and explain -----------------------------------------------------------------------------------


def test_gain_and_explain_show_what_they_show_on_one_machine(
    server: ApiServer, adascale: Adascale, service: Service
) -> None:
    server.service = service.url
    server.add_job("digits", status=RUNNING)
    for command in ("gain", "explain"):
        here = adascale(command, "digits", "--url", service.url, "-o", "json")
        there = adascale(command, "digits", "--cluster", "-o", "json")
        assert there.returncode == 0, there.stderr
        assert json.loads(there.stdout) == json.loads(here.stdout)
    assert "gain 6.25 at scale 8" in " ".join(adascale("gain", "digits", "--cluster").stdout.split())
    assert "decision" in adascale("explain", "digits", "--cluster").stdout


def test_a_job_without_a_gain_is_an_error_of_the_service(
    server: ApiServer, adascale: Adascale, service: Service
) -> None:
    server.service = service.url
    server.add_job("silent")
    failed = adascale("gain", "silent", "--cluster")
    assert failed.returncode == 1
    assert failed.stderr.startswith("adascale: the metrics service answers 404: job default.silent ")


def test_another_namespace_of_the_installation_is_an_option(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits")
    adascale("gain", "digits", "--cluster", "--system-namespace", "training")
    assert server.requests[-1][1].startswith(
        "/api/v1/namespaces/training/services/https:adascale-api:8265/proxy/"
    )


def test_a_service_that_protects_reads_is_read_with_its_address_and_token(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits")
    proxy = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/services/https:adascale-api:8265/proxy"
    path = f"{proxy}/jobs/default.digits/gain"
    server.answers["GET", path] = (401, {"error": "missing token"})
    failed = adascale("gain", "digits", "--cluster")
    assert "the metrics service answers 401: missing token. Forward its port" in " ".join(
        failed.stderr.split()
    )
    assert "ADASCALE_TOKEN" in failed.stderr
    assert "ADASCALE_CA_FILE" in failed.stderr


def test_gain_reads_a_service_with_tls_through_the_api_server_and_at_its_address(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    files = tls_files(tmp_path / "tls")
    secure = Service(tmp_path, job="default.digits", tls=files)
    try:
        secure.call("POST", "/gain", {**REPORT, "time": time.time()})
        server.service = secure.url
        server.add_job("digits", status=RUNNING)
        shown = adascale("gain", "digits", "--cluster")
        assert "gain 6.25 at scale 8" in " ".join(shown.stdout.split()), shown.stderr
        assert "services/https:adascale-api:8265/proxy/" in server.requests[-1][1]
        direct = adascale("gain", "digits", "--url", secure.url, ADASCALE_CA_FILE=str(files.ca))
        assert "gain 6.25 at scale 8" in " ".join(direct.stdout.split()), direct.stderr
        refused = adascale("gain", "digits", "--url", secure.url)
        assert "Set ADASCALE_CA_FILE" in " ".join(refused.stderr.split())
    finally:
        secure.stop()


# -- export --------------------------------------------------------------------------------------------


def test_export_reads_the_object_store_of_a_job_and_refuses_a_claim(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits")
    failed = adascale("export", "digits", "model.safetensors", "--cluster")
    assert failed.returncode == 1
    assert "are in PersistentVolumeClaim digits-checkpoints, which only pods can read" in failed.stderr
