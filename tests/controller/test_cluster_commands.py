"""The commands for jobs of a cluster, against an API server over HTTP."""

from __future__ import annotations

import io
import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import yaml
from rich.console import Console

from adascale_client import MetricsServiceClient
from adascale_controller.cli import kubectl_main
from adascale_controller.cluster.api import ClusterTarget, jobs_path
from adascale_controller.cluster.cluster_jobs import ClusterJobs, NoSuchJobError
from adascale_controller.cluster.job_follower import JobFollower
from adascale_controller.cluster.kubernetes_api import connect
from adascale_controller.cluster.metrics_service import metrics_client
from adascale_controller.cluster.pod_logs import PodLogs, since_time
from adascale_controller.cluster.rights import METRICS_READER, advice
from adascale_controller.job_summary import JobSummary
from adascale_controller.local.display import PlainDisplay
from adascale_core import names
from adascale_core.decision.decide import DecisionProblem, decide
from adascale_core.decision.explanation import explain
from adascale_core.messages.allocation import Allocation
from adascale_core.messages.job_spec import JobSpec
from adascale_core.views.job_state_name import JobStateName
from e2e.local_run import adascale_in_process, write_job
from support.api_server import ApiServer, Object, serving
from support.certificates import tls_files
from support.job_states import NOW
from support.job_states import job as job_state
from support.launch import wait_until
from support.service import TOKEN, Service

Adascale = Callable[..., "CompletedProcess[str]"]

RUNNING: Object = {
    "state": "Running", "replicas": 2, "desiredReplicas": 2, "batchSize": 32, "gain": 6.25,
    "efficiency": 0.781, "progress": 4512, "progressText": "37%", "restarts": 1,
    "conditions": [
        {"type": "Running", "status": "True", "reason": "Training", "message": "Training on 2 replicas"}
    ],
}  # fmt: skip
REPORT = {
    "generation": 1, "step": 1200, "progress": 4512.5, "epoch": 3, "replicas": 2, "local_bsz": 16,
    "accumulation": 1, "scale": 8.0, "gain": 6.25, "grad_sqr": 0.01, "grad_var": 0.25, "step_time": 0.004,
    "loss": 0.2134,
}  # fmt: skip


def suspended(reason: str) -> Object:
    condition = {"type": "Suspended", "status": "True", "reason": reason, "message": ""}
    return {"state": "Suspended", "replicas": 0, "desiredReplicas": 0, "conditions": [condition]}


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


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A metrics service with a job that has a report and a decision."""
    started = Service(tmp_path_factory.mktemp("service"), job="default.digits")
    client = MetricsServiceClient(started.url, TOKEN)
    client.declare_job("default.digits", JobSpec(4, 256, (4, 64), 1, 4, 12_000))
    client.allocate("default.digits", Allocation(1, 2))
    started.call("POST", "/gain", {**REPORT, "time": time.time()})
    job = job_state("default.digits", 2)
    decisions = decide([job], 8, NOW)
    problem = DecisionProblem.of([job], 8)
    client.put_decision(explain(problem, NOW, decisions=decisions, time=time.time())["default.digits"])
    client.close()
    yield started
    started.stop()


def changed(server: ApiServer) -> list[str]:
    """The methods of the requests that change something."""
    return [method for method, _, _ in server.requests if method != "GET"]


# -- which place a command is for -----------------------------------------------------------------------


def test_a_command_without_an_option_for_a_cluster_is_for_this_machine(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    server.add_job("digits", status=RUNNING)
    for command in (
        ["list"],
        ["status", "digits"],
        ["stop", "digits"],
        ["scale", "digits", "-r", 1],
        ["rm", "digits"],
    ):
        shown = adascale(*command, "--state-dir", tmp_path)
        assert "digits" not in shown.stdout
    assert server.requests == []


@pytest.mark.parametrize(
    "options",
    [["--cluster"], ["-n", "default"], ["--context", "prod"], ["-A"]],
    ids=lambda each: str(each[0]),
)
def test_each_option_for_a_cluster_selects_the_cluster(
    server: ApiServer, adascale: Adascale, options: list[str]
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = adascale("list", *options)
    assert shown.returncode == 0, shown.stderr
    assert "digits" in shown.stdout


def test_the_plugin_of_kubectl_is_for_the_cluster_and_has_no_commands_for_one_machine(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits", status=RUNNING)
    shown = adascale("list", entry=kubectl_main)
    assert shown.returncode == 0, shown.stderr
    assert "digits" in shown.stdout
    server.add_job("mine", "team")
    everywhere = adascale("list", "-A", entry=kubectl_main)
    assert "team.mine" in everywhere.stdout, everywhere.stderr
    here = adascale("list", "--state-dir", ".", entry=kubectl_main)
    assert "No such option: --state-dir" in here.stderr
    helped = adascale("--help", entry=kubectl_main).stdout
    assert "Usage: kubectl adascale" in helped
    assert " submit " in helped
    assert " operator " not in helped
    assert "No such command 'run'" in adascale("run", "x.yaml", entry=kubectl_main).stderr


def test_a_state_folder_and_a_cluster_are_an_error(adascale: Adascale, tmp_path: Path) -> None:
    failed = adascale("list", "--cluster", "--state-dir", tmp_path)
    assert failed.returncode == 2
    assert "--state-dir is for a run on this machine" in failed.stderr


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("adascale stop --cluster d", ["digits", "dots"]),
        ("adascale stop --cluster di", ["digits"]),
        ("adascale stop -n team ", ["mine"]),
        ("adascale stop --context absent ", []),
        ("adascale stop --state-dir /absent d", []),
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


# -- list and status ------------------------------------------------------------------------------------


def test_list_has_the_columns_of_jobs_on_one_machine(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    waits = {"type": "Running", "status": "False", "reason": "InsufficientCapacity", "message": "needs 1 GPU"}
    server.add_job("waiting", status={"state": "Pending", "conditions": [waits]})
    server.add_job("new", "team")
    shown = adascale("list", "--cluster").stdout.splitlines()
    assert shown[0].split() == [
        "NAME", "STATE", "REPLICAS", "DESIRED", "BATCH", "GAIN", "EFFICIENCY", "PROGRESS", "RESTARTS", "AGE",
        "REASON",
    ]  # fmt: skip
    assert shown[1].split()[:9] == ["digits", "Running", "2", "2", "32", "6.25", "78%", "37%", "1"]
    assert shown[2].endswith("InsufficientCapacity: needs 1 GPU")
    assert len(shown) == 3
    everywhere = [line.split()[0] for line in adascale("list", "-A").stdout.splitlines()[1:]]
    assert everywhere == ["default.digits", "default.waiting", "team.new"]


def test_the_json_of_a_job_has_the_members_of_a_job_on_one_machine(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits", status=RUNNING)
    (listed,) = json.loads(adascale("list", "--cluster", "-o", "json").stdout)
    local = JobSummary("digits", "default", "digits", JobStateName.RUNNING, 0, 0, 0.0).to_json()
    assert list(listed) == list(local)
    assert listed["efficiency"] == 0.781
    assert listed["startTime"] == 1795752000.0
    assert json.loads(adascale("status", "digits", "--cluster", "-o", "json").stdout) == listed


def test_no_jobs_is_no_error(server: ApiServer, adascale: Adascale) -> None:
    shown = adascale("list", "-n", "team")
    assert (shown.returncode, shown.stdout) == (0, "")
    assert shown.stderr == "No jobs in namespace team: start one with `adascale submit FILE`.\n"


def test_the_namespace_of_the_context_is_the_default(server: ApiServer, tmp_path: Path) -> None:
    server.add_job("mine", "team")
    kubeconfig = server.write_kubeconfig(tmp_path / "other", namespace="team")
    shown = adascale_in_process("list", "--kubeconfig", kubeconfig)
    assert "mine" in shown.stdout


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


def test_a_job_with_another_namespace_than_the_option_is_an_error(adascale: Adascale) -> None:
    failed = adascale("stop", "team.digits", "-n", "default")
    assert failed.returncode == 2
    assert "job team.digits is in namespace team, but --namespace is default" in failed.stderr


def test_without_a_kubeconfig_the_error_names_the_file(adascale: Adascale, tmp_path: Path) -> None:
    failed = adascale("list", "--cluster", KUBECONFIG=str(tmp_path / "absent"))
    assert failed.returncode == 2
    assert f"no cluster is configured in {tmp_path / 'absent'}" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize("content", ["", "a: [", "text", "[]", "contexts: [{name: prod}]"])
def test_a_file_that_is_no_kubeconfig_is_an_error(adascale: Adascale, kubeconfig: Path, content: str) -> None:
    kubeconfig.write_text(content)
    failed = adascale("list", "--context", "prod")
    assert failed.returncode == 2, failed.stderr
    assert f"no cluster is configured in {kubeconfig}" in failed.stderr


def test_an_unknown_context_names_those_that_exist(adascale: Adascale) -> None:
    failed = adascale("list", "--context", "absent")
    assert failed.returncode == 2
    assert "has no context 'absent'; it has away, prod" in failed.stderr


def test_an_option_names_the_context_of_a_kubeconfig_without_a_current_one(
    server: ApiServer, adascale: Adascale, kubeconfig: Path
) -> None:
    server.add_job("digits")
    kubeconfig.write_text(kubeconfig.read_text().replace("current-context: prod", "current-context: ''"))
    shown = adascale("list", "--context", "prod")
    assert shown.returncode == 0, shown.stderr
    assert "digits" in shown.stdout
    failed = adascale("list", "--cluster")
    assert failed.returncode == 2
    assert "has no current context: choose one of away, prod with --context" in failed.stderr


def test_a_cluster_that_does_not_answer_is_an_error(adascale: Adascale) -> None:
    failed = adascale("list", "--context", "away")
    assert failed.returncode == 69
    assert failed.stderr == (
        "adascale: the API server http://127.0.0.1:9 of context away does not answer: connection refused\n"
    )


def test_an_expired_credential_is_an_error(server: ApiServer, adascale: Adascale) -> None:
    server.token = "another"
    failed = adascale("list", "--cluster")
    assert failed.returncode == 1
    assert "does not accept the credentials of context prod: they are missing, not valid or have expired" in (
        " ".join(failed.stderr.split())
    )


def test_a_cluster_without_the_custom_resource_is_an_error(server: ApiServer, adascale: Adascale) -> None:
    server.installed = False
    for command in (["list", "--cluster"], ["status", "digits", "--cluster"]):
        failed = adascale(*command)
        assert "context prod does not know AdaScaleJobs" in failed.stderr
        assert "kubectl apply -k deploy" in failed.stderr


@pytest.mark.parametrize(
    ("right", "command", "what", "binding"),
    [
        (
            ("list", "adascalejobs"), ["list", "-n", "team"],
            "jane may not list adascalejobs.adascale.dev in namespace team",
            "kubectl -n team create rolebinding adascale-view-jane --clusterrole=view --user=jane",
        ),
        (
            ("list", "adascalejobs"), ["list", "-A"],
            "jane may not list adascalejobs.adascale.dev in all namespaces",
            "kubectl create clusterrolebinding adascale-view-jane --clusterrole=view --user=jane",
        ),
        (
            ("patch", "adascalejobs"), ["stop", "digits", "--cluster"],
            "jane may not patch adascalejobs.adascale.dev in namespace default",
            "kubectl -n default create rolebinding adascale-edit-jane --clusterrole=edit --user=jane",
        ),
        (
            ("patch", "adascalejobs/scale"), ["scale", "digits", "-r", "2", "--cluster"],
            "jane may not patch adascalejobs/scale.adascale.dev in namespace default",
            "--clusterrole=edit",
        ),
        (
            ("list", "pods"), ["logs", "digits", "--cluster"],
            "jane may not list pods in namespace default", "--clusterrole=view",
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
    command = shlex.split(advice(user, "list", "pods", "", "team").splitlines()[1])
    assert command == [
        "kubectl", "-n", "team", "create", "rolebinding", binding, "--clusterrole=view", subject,
    ]  # fmt: skip


def test_the_role_that_the_advice_names_allows_reads_of_the_metrics_service_alone() -> None:
    users = Path(__file__).parents[2] / "deploy" / "base" / "users.yaml"
    (role,) = [each for each in yaml.safe_load_all(users.read_text()) if each["kind"] == "Role"]
    assert role["metadata"]["name"] == METRICS_READER
    (rule,) = role["rules"]
    assert rule["resources"] == ["services/proxy"]
    assert rule["verbs"] == ["get"]
    address = f"{names.API_SERVICE}:{names.DEFAULT_API_PORT}"
    assert rule["resourceNames"] == [f"https:{address}", address]


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


def test_the_role_of_an_installation_without_tls_allows_gain(
    server: ApiServer, adascale: Adascale, service: Service
) -> None:
    server.service = service.url
    server.add_job("digits", status=RUNNING)
    proxy = f"/api/v1/namespaces/{names.SYSTEM_NAMESPACE}/services/https:adascale-api:8265/proxy"
    message = (
        'services "https:adascale-api:8265" is forbidden: User "jane" cannot get resource "services/proxy" '
        f'in API group "" in the namespace "{names.SYSTEM_NAMESPACE}"'
    )
    server.answers["GET", f"{proxy}/jobs/default.digits/gain"] = (403, {"kind": "Status", "message": message})
    shown = adascale("gain", "digits", "--cluster")
    assert "gain 6.25 at scale 8" in " ".join(shown.stdout.split()), shown.stderr


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


# -- submit ---------------------------------------------------------------------------------------------


def test_submit_sends_nothing_of_a_file_with_errors(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"], maxBatchSize=2)
    failed = adascale("submit", job)
    assert failed.returncode == 2
    assert failed.stderr == adascale("validate", job).stderr
    assert server.requests == []


def test_submit_creates_changes_and_resumes_a_job(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"])
    assert adascale("submit", job, "-n", "team").stdout == "test created in namespace team of context prod\n"
    assert server.jobs["team", "test"]["spec"]["batchSize"] == 4
    again = adascale("submit", job, "-n", "team")
    assert again.stdout == "test unchanged in namespace team of context prod\n"
    write_job(tmp_path / "job.yaml", ["python"], maxReplicas=2)
    assert adascale("submit", job, "-n", "team").stdout == "test changed in namespace team of context prod\n"
    spec = server.jobs["team", "test"]["spec"]
    spec.update(suspend=True, replicaLimit=0)
    assert adascale("submit", job, "-n", "team").stdout == "test resumed in namespace team of context prod\n"
    spec = server.jobs["team", "test"]["spec"]
    assert "suspend" not in spec
    assert "replicaLimit" not in spec


def test_a_date_is_sent_as_the_text_that_kubectl_sends(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"])
    content = yaml.safe_load(job.read_text())
    content["spec"]["template"]["spec"]["nodeSelector"] = {"bought": date(2026, 11, 27)}
    job.write_text(yaml.safe_dump(content))
    submitted = adascale("submit", job)
    assert submitted.returncode == 0, submitted.stderr
    sent = server.jobs["default", "test"]["spec"]["template"]["spec"]
    assert sent["nodeSelector"] == {"bought": "2026-11-27"}


def test_a_file_that_suspends_its_job_does_not_resume_it(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"], suspend=True)
    adascale("submit", job)
    assert server.jobs["default", "test"]["spec"]["suspend"] is True


def test_the_namespace_of_the_file_holds_and_another_option_is_an_error(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"])
    job.write_text(job.read_text().replace("  name: test", "  name: test\n  namespace: team"))
    assert adascale("submit", job).returncode == 0
    assert ("team", "test") in server.jobs
    failed = adascale("submit", job, "-n", "default")
    assert failed.returncode == 2
    assert "metadata.namespace is team, but --namespace is default" in failed.stderr


def test_a_job_without_a_command_runs_the_entry_point_of_its_image(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", [])
    assert adascale("submit", job).returncode == 0
    assert ("default", "test") in server.jobs


def test_errors_of_the_api_server_have_the_lines_of_their_fields(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"])
    path = f"/apis/{names.GROUP_VERSION}/namespaces/default/{names.PLURAL}/test"
    causes = [{"field": "spec.batchSize", "message": "field is immutable", "reason": "FieldValueInvalid"}]
    body = {"kind": "Status", "message": "AdaScaleJob is invalid", "details": {"causes": causes}}
    server.answers["PATCH", path] = (422, body)
    failed = adascale("submit", job)
    assert failed.returncode == 2
    assert failed.stderr == f"adascale: {job}:6: spec.batchSize: field is immutable\n"


def test_a_conflict_names_the_fields_and_their_owners(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"])
    path = f"/apis/{names.GROUP_VERSION}/namespaces/default/{names.PLURAL}/test"
    causes = [
        {"field": ".spec.maxReplicas", "message": 'conflict with "kubectl-edit" using adascale.dev/v1alpha1'}
    ]
    body = {"kind": "Status", "message": "Apply failed with 1 conflict", "details": {"causes": causes}}
    server.answers["PATCH", path] = (409, body)
    failed = adascale("submit", job)
    assert failed.returncode == 1
    assert 'spec.maxReplicas: conflict with "kubectl-edit"' in failed.stderr
    assert "--force-conflicts" in failed.stderr
    del server.answers["PATCH", path]
    assert adascale("submit", job, "--force-conflicts").returncode == 0
    assert [query["force"] for method, _, query in server.requests if method == "PATCH"] == ["false", "true"]


def test_what_scale_and_stop_have_set_is_no_conflict(
    server: ApiServer, adascale: Adascale, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.yaml", ["python"], replicaLimit=1)
    path = f"/apis/{names.GROUP_VERSION}/namespaces/default/{names.PLURAL}/test"
    causes = [{"field": ".spec.replicaLimit", "message": 'conflict with "adascale" with subresource "scale"'}]
    body = {"kind": "Status", "message": "Apply failed with 1 conflict", "details": {"causes": causes}}
    server.answers["PATCH", path] = (409, body)
    adascale("submit", job)
    assert [query["force"] for method, _, query in server.requests if method == "PATCH"] == ["false", "true"]


# -- scale, stop, resume, rm ----------------------------------------------------------------------------


def test_scale_sets_the_limit_and_names_a_lower_one(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    assert adascale("scale", "digits", "-r", 2, "--cluster").stdout == "digits scaled to at most 2 replicas\n"
    assert server.jobs["default", "digits"]["spec"]["replicaLimit"] == 2
    lowered = adascale("scale", "digits", "-r", 8, "--cluster").stdout
    assert lowered == "digits scaled to at most 4 replicas (spec.maxReplicas is 4)\n"


def act(server: ApiServer, when: Callable[[Object], object], status: Object) -> threading.Thread:
    """Write the status of the job `digits` once its spec is such, as the operator does."""

    def run() -> None:
        wait_until(lambda: when(server.jobs["default", "digits"]["spec"]), "the request")
        server.set_status("digits", **status)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_stop_saves_and_stops_and_resume_continues(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    operator = act(server, lambda spec: spec.get("suspend"), suspended("Suspended"))
    assert adascale("stop", "digits", "--cluster").stdout == "digits stopped, saved at progress 4,512\n"
    operator.join()
    assert adascale("resume", "digits", "--cluster").stdout == "digits resumed\n"
    assert "suspend" not in server.jobs["default", "digits"]["spec"]
    server.set_status("digits", **RUNNING)
    assert adascale("resume", "digits", "--cluster").stdout == "digits is not stopped: it is running\n"


def test_scale_to_0_stops(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    operator = act(server, lambda spec: spec.get("replicaLimit") == 0, suspended("ScaledToZero"))
    assert (
        adascale("scale", "digits", "-r", 0, "--cluster").stdout
        == "digits stopped, saved at progress 4,512\n"
    )
    operator.join()


def test_a_status_of_an_earlier_spec_is_not_the_answer_to_stop(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status={**RUNNING, **suspended("Suspended")})
    failed = adascale("stop", "digits", "--cluster", "--timeout", 0)
    assert failed.returncode == 1
    assert "has not stopped within 0 s (the operator has not read the request yet)" in " ".join(
        failed.stderr.split()
    )


def test_a_job_that_has_ended_is_not_changed(server: ApiServer, adascale: Adascale) -> None:
    condition = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
    server.add_job("digits", status={"state": "Complete", "conditions": [condition]})
    server.jobs["default", "digits"]["spec"]["suspend"] = True
    for command in (["stop", "digits"], ["scale", "digits", "-r", 2], ["resume", "digits"]):
        failed = adascale(*command, "--cluster")
        assert failed.returncode == 1
        assert "job digits has ended (Complete)" in failed.stderr
    assert changed(server) == []


def test_rm_deletes_a_job_that_does_not_run(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    refused = adascale("rm", "digits", "--cluster", "--yes")
    assert refused.returncode == 1
    assert "job digits in namespace default is running: stop it first" in refused.stderr
    server.set_status("digits", **suspended("Suspended"))
    unconfirmed = adascale("rm", "digits", "--cluster")
    assert unconfirmed.returncode == 2
    assert "checkpoints (claim digits-checkpoints)? Confirm it with --yes" in " ".join(
        unconfirmed.stderr.split()
    )
    assert changed(server) == []
    assert adascale("rm", "digits", "--cluster", "--yes").stdout == "digits deleted\n"
    assert server.jobs == {}


def test_rm_keeps_checkpoints_that_are_not_in_the_jobs_own_claim(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("own", status=suspended("Suspended"))
    refused = adascale("rm", "own", "--cluster", "--yes", "--keep-checkpoints")
    assert refused.returncode == 2
    assert "the claim own-checkpoints of job own is deleted with it" in refused.stderr
    server.add_job("digits", status=suspended("Suspended"), checkpoint={"url": "s3://bucket/prefix/"})
    deleted = adascale("rm", "digits", "--cluster", "--yes", "--keep-checkpoints")
    assert deleted.stdout == "digits deleted; its checkpoints stay in s3://bucket/prefix/default.digits\n"


def test_export_reads_the_object_store_of_a_job_and_refuses_a_claim(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits")
    failed = adascale("export", "digits", "model.safetensors", "--cluster")
    assert failed.returncode == 1
    assert "are in PersistentVolumeClaim digits-checkpoints, which only pods can read" in failed.stderr


# -- logs -----------------------------------------------------------------------------------------------


def at(second: float, text: str) -> str:
    return f"2026-11-27T04:00:{second:012.9f}Z {text}"


def test_logs_merges_the_output_of_the_replicas_by_time(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    server.add_pod("digits", 0, [at(1, "starts"), at(3, "loss 0.5 "), at(3.5, "")])
    server.add_pod("digits", 1, [at(2, "starts"), at(4, "joins")])
    server.add_pod("digits", 2, [], "waiting")
    shown = adascale("logs", "digits", "--cluster")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == "[0] starts\n[1] starts\n[0] loss 0.5 \n[0] \n[1] joins\n"
    assert adascale("logs", "digits", "--cluster", "--replica", 1, "--tail", 1).stdout == "joins\n"


def test_the_replicas_of_extra_pods_are_counted_after_those_of_the_core(
    server: ApiServer, adascale: Adascale
) -> None:
    server.add_job("digits", status=RUNNING)
    server.add_pod("digits", 1, [at(1, "core")])
    extra = server.add_pod("digits", 1, [at(2, "extra")])
    extra["metadata"]["annotations"][names.ANNOTATION_FIRST_REPLICA] = "2"
    assert adascale("logs", "digits", "--cluster").stdout == "[1] core\n[3] extra\n"
    assert adascale("logs", "digits", "--cluster", "--replica", 3).stdout == "extra\n"
    assert adascale("logs", "digits", "--cluster", "--replica", 1).stdout == "core\n"


def test_lines_are_read_again_from_a_time_in_the_zone_of_the_api_server() -> None:
    assert since_time(b"2026-11-27T05:00:01.123456789+01:00") == b"2026-11-27T04:00:01Z"
    assert since_time(b"2026-11-27T04:00:01.123456789Z") == b"2026-11-27T04:00:01Z"
    assert since_time(b"") == b""


def test_a_job_without_output_is_an_error(server: ApiServer, adascale: Adascale) -> None:
    server.add_job("digits", status=RUNNING)
    assert "job digits in namespace default has no pods" in adascale("logs", "digits", "--cluster").stderr
    server.add_pod("digits", 0, [], "waiting")
    assert "has no output: no container has started" in adascale("logs", "digits", "--cluster").stderr
    failed = adascale("logs", "digits", "--cluster", "--replica", 3)
    assert "replica 3 of job digits in namespace default has no output; the replicas with pods are 0" in (
        " ".join(failed.stderr.split())
    )


def test_followed_logs_go_on_with_later_pods_and_end_with_the_job(
    server: ApiServer, kubeconfig: Path
) -> None:
    server.add_job("digits", status=RUNNING)
    first = server.add_pod("digits", 0, [at(1, "starts")])
    output = io.StringIO()
    with connect(ClusterTarget(kubeconfig=kubeconfig)) as api:
        logs = PodLogs(api, "default", "digits", output, None, None)
        jobs = ClusterJobs(api)
        following = threading.Thread(target=logs.follow, args=(lambda: jobs.find("digits"),))
        following.start()
        wait_until(lambda: output.getvalue() == "[0] starts\n", "the first line")
        server.print_line(first, at(2, "steps"))
        wait_until(lambda: output.getvalue().endswith("[0] steps\n"), "the second line")
        second = server.add_pod("digits", 1, [at(3, "joins")])
        wait_until(lambda: output.getvalue().endswith("[1] joins\n"), "the line of the other pod")
        server.end(second)
        server.print_line(first, at(4, "ends"))
        server.end(first)
        condition = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
        server.set_status("digits", state="Complete", conditions=[condition])
        following.join(20)
        assert not following.is_alive()
    assert output.getvalue() == "[0] starts\n[0] steps\n[1] joins\n[0] ends\n"


# -- submit --follow ------------------------------------------------------------------------------------


def follow(server: ApiServer, kubeconfig: Path, steps: list[Callable[[], object]]) -> tuple[int, str]:
    """Follow the job `digits`, with a step at each pause. Returns exit code and output."""
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    with connect(ClusterTarget(kubeconfig=kubeconfig)) as api:
        jobs = ClusterJobs(api)
        remaining = iter(steps)

        def pause(_: float) -> None:
            next(remaining)()

        client = metrics_client(api, names.SYSTEM_NAMESPACE)
        code = JobFollower(api, jobs, client, display, pause).follow(jobs.find("digits"))
    return code, output.getvalue()


def test_a_followed_job_shows_its_events_until_it_is_complete(
    server: ApiServer, kubeconfig: Path, service: Service
) -> None:
    server.service = service.url
    job = server.add_job("digits", scaleInvariantSteps=12_000)
    waits = {"type": "Running", "status": "False", "reason": "Starting", "message": "Starting on 1 replica"}
    complete = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
    code, shown = follow(
        server,
        kubeconfig,
        [
            lambda: server.set_status("digits", state="Starting", conditions=[waits]),
            lambda: server.set_status("digits", **RUNNING),
            lambda: server.add_event(job, "Rescaling 1 -> 2: predicted gain 1.0 -> 3.6"),
            lambda: server.set_status("digits", state="Complete", progress=12_000, conditions=[complete]),
        ],
    )
    assert code == 0
    lines = [line.split(maxsplit=1)[1] for line in shown.splitlines()]
    assert lines[:2] == ["Starting on 1 replica", "Rescaling 1 -> 2: predicted gain 1.0 -> 3.6"]
    assert lines[2].startswith("Finished at progress 12,000 in ")


def test_a_followed_job_that_fails_or_is_deleted_is_an_error(server: ApiServer, kubeconfig: Path) -> None:
    server.add_job("digits", status=RUNNING)
    failed = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "exit code 3"}
    code, shown = follow(
        server, kubeconfig, [lambda: server.set_status("digits", state="Failed", conditions=[failed])]
    )
    assert code == 1
    assert "BackoffLimitExceeded: exit code 3" in shown
    server.add_job("digits", status=RUNNING)
    code, shown = follow(server, kubeconfig, [lambda: server.jobs.clear()])
    assert code == 1
    assert "digits was deleted" in shown


def test_rights_that_only_the_display_needs_are_noted_once(server: ApiServer, kubeconfig: Path) -> None:
    server.add_job("digits", status=RUNNING, suspend=True)
    server.denied |= {("list", "events"), ("get", "services/proxy")}
    code, shown = follow(
        server, kubeconfig, [lambda: None, lambda: server.set_status("digits", **suspended("Suspended"))]
    )
    assert code == 0
    assert shown.count("Events are not shown: jane may not list events in namespace default") == 1
    assert shown.count("The gain is not shown: jane may not get services/proxy") == 1
    assert "Stopped at progress 4,512; submit the same file to resume" in shown


def test_a_followed_job_is_followed_on_after_the_api_server_was_overloaded(
    server: ApiServer, kubeconfig: Path
) -> None:
    server.add_job("digits", status=RUNNING)
    request = "GET", f"{jobs_path('default')}/digits"
    status = {"kind": "Status", "code": 503, "message": "etcdserver: leader changed"}
    complete = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
    code, shown = follow(
        server,
        kubeconfig,
        [
            lambda: server.answers.update({request: (503, status)}),
            lambda: server.answers.clear(),
            lambda: server.set_status("digits", state="Complete", conditions=[complete]),
        ],
    )
    assert code == 0
    assert "the API server answers 503: etcdserver: leader changed" in shown


def test_a_followed_job_that_others_have_suspended_is_followed_on(
    server: ApiServer, kubeconfig: Path
) -> None:
    server.add_job("digits", status=RUNNING)
    others = suspended("JobSuspended")
    why = "spec.suspend of Job digits was set, and not by the operator"
    waits = {"type": "Running", "status": "False", "reason": "JobSuspended", "message": why}
    others["conditions"].append(waits)
    complete = {"type": "Complete", "status": "True", "reason": "Finished", "message": ""}
    code, shown = follow(
        server,
        kubeconfig,
        [
            lambda: server.set_status("digits", **others),
            lambda: server.set_status("digits", **RUNNING),
            lambda: server.set_status("digits", state="Complete", conditions=[complete]),
        ],
    )
    assert code == 0
    assert f"JobSuspended: {why}" in shown
    assert "Finished" in shown


def test_a_job_of_another_uid_is_not_changed(server: ApiServer, kubeconfig: Path) -> None:
    server.add_job("digits", status=RUNNING)
    with connect(ClusterTarget(kubeconfig=kubeconfig)) as api:
        jobs = ClusterJobs(api)
        found = jobs.find("digits")
        server.add_job("digits", status=RUNNING)
        with pytest.raises(Exception, match="UID"):
            jobs.suspend(found)
        del server.jobs["default", "digits"]
        with pytest.raises(NoSuchJobError, match="it has no jobs"):
            jobs.find("digits")
