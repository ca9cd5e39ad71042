"""Any pod template: everything that it sets is kept, and the operator's fields are added."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from adascale_controller.operator.apply.manifests import TOKEN_FOLDER
from adascale_controller.operator.schedule.nodes import eligible_nodes, pod_request
from adascale_controller.operator.types.settings import CHECKPOINT_FOLDER
from adascale_core import names
from support.pod_templates import container, pod, template, worker, workload

words = st.text("abcxyz", min_size=1, max_size=3)
scalars = st.one_of(words, st.integers(0, 99), st.booleans(), st.none())


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects in which each field is there, null, or absent."""
    return st.fixed_dictionaries({}, optional={key: st.none() | value for key, value in fields.items()})


labels = st.dictionaries(
    st.one_of(words, st.sampled_from([names.LABEL_JOB, "app.kubernetes.io/name"])), words
)
places = st.sampled_from(["/dev/shm", "/dev/shm/", "/tmp", "/data", TOKEN_FOLDER, CHECKPOINT_FOLDER])
security = maybe(
    runAsUser=st.integers(0, 2),
    runAsNonRoot=st.booleans(),
    readOnlyRootFilesystem=st.booleans(),
    privileged=st.booleans(),
    allowPrivilegeEscalation=st.booleans(),
    capabilities=maybe(
        add=st.lists(st.sampled_from(["SYS_ADMIN", "NET_RAW"])), drop=st.lists(st.just("ALL"))
    ),
    fsGroup=st.integers(0, 9),
    seccompProfile=st.just({"type": "Localhost"}),
)
containers = st.builds(
    lambda name, fields: {"name": name, "image": "i"} | fields,
    st.sampled_from(["worker", "logs", "main"]),
    maybe(
        command=st.lists(st.sampled_from(["python", "adascale-agent", "--"]), max_size=3),
        args=st.lists(words, max_size=2),
        env=st.lists(
            st.fixed_dictionaries(
                {"name": st.sampled_from(["A", "HOME", names.ENV_REPLICA, names.ENV_BATCH_SIZE])},
                optional={"value": words},
            ),
            unique_by=lambda item: item["name"],
        ),
        envFrom=st.just([{"secretRef": {"name": "s"}}]),
        volumeMounts=st.lists(
            st.fixed_dictionaries({"name": st.just("v"), "mountPath": places}),
            unique_by=str,
        ),
        securityContext=security,
        resources=st.just({"limits": {"cpu": "1"}}),
        terminationMessagePolicy=st.just("File"),
        ports=scalars,
    ),
)
templates = st.builds(
    lambda metadata, spec, mains: {"metadata": metadata, "spec": spec | {"containers": mains}},
    st.none() | maybe(labels=labels, annotations=st.dictionaries(words, words)),
    maybe(
        initContainers=st.lists(containers, max_size=2),
        volumes=st.just([{"name": "v", "emptyDir": {}}]),
        tolerations=st.lists(
            maybe(
                key=st.sampled_from(["gpu", "node.kubernetes.io/not-ready"]),
                effect=st.sampled_from(["NoSchedule", "NoExecute"]),
            ),
            max_size=3,
        ),
        affinity=maybe(podAffinity=maybe(requiredDuringSchedulingIgnoredDuringExecution=st.just([{"a": 1}]))),
        restartPolicy=st.sampled_from(["Never", "Always"]),
        automountServiceAccountToken=st.booleans(),
        enableServiceLinks=st.booleans(),
        terminationGracePeriodSeconds=st.integers(0, 99),
        securityContext=security,
        hostname=words,
        nodeSelector=st.dictionaries(words, words),
    ),
    st.lists(containers, min_size=1, max_size=3),
)

OURS = ("restartPolicy", "automountServiceAccountToken")
"""What is never the template's."""


def kept(theirs: Any, made: Any, place: str = "") -> None:
    """That `made` has all that is in `theirs`: members of objects, items of lists in order."""
    if theirs is None:
        return
    if isinstance(theirs, dict):
        for key, value in theirs.items():
            kept(value, made.get(key), f"{place}.{key}")
    elif isinstance(theirs, list):
        assert len(made) >= len(theirs), place
        rest = iter(made)
        for item in theirs:
            assert any(holds(item, item) for item in rest), (place, item, made)
    else:
        assert made == theirs, place


def holds(theirs: Any, made: Any) -> bool:
    try:
        kept(theirs, made)
    except (AssertionError, KeyError, TypeError):
        return False
    return True


def without_ours(made_of: dict[str, Any]) -> dict[str, Any]:
    """The template less what may be replaced."""
    rest = copy.deepcopy(made_of)
    for field in OURS:
        rest["spec"].pop(field, None)
    ((rest.get("metadata") or {}).get("labels") or {}).pop(names.LABEL_JOB, None)
    mains = rest["spec"]["containers"]
    main = next((item for item in mains if item["name"] == "worker"), mains[0])
    command, args = main.pop("command", None), main.pop("args", None)
    started = main | {"command": ["adascale-agent", "--", *command, *(args or [])]} if command else main
    if command and command[0] == "adascale-agent":
        started = main | {"command": command, "args": args}
    main.update(started)
    for variable in list(main.get("env") or []):
        if variable["name"] in (names.ENV_REPLICA, names.ENV_BATCH_SIZE):
            main["env"].remove(variable)
    for mount in list(main.get("volumeMounts") or []):
        if mount["mountPath"] in (TOKEN_FOLDER, CHECKPOINT_FOLDER):
            main["volumeMounts"].remove(mount)
    return rest


@given(templates, st.booleans())
def test_everything_that_a_template_sets_is_kept(made_of: dict[str, Any], single_node: bool) -> None:
    before = copy.deepcopy(made_of)
    made = workload(made_of)
    manifest = pod(made, single_node)
    assert made_of == before
    assert json.loads(json.dumps(manifest)) == manifest
    kept(without_ours(made_of), manifest)


@given(templates, st.booleans())
def test_every_template_gets_the_operators_fields(made_of: dict[str, Any], single_node: bool) -> None:
    made = pod(workload(made_of), single_node)
    spec = made["spec"]
    assert made["metadata"]["labels"][names.LABEL_JOB] == "digits"
    assert (spec["restartPolicy"], spec["automountServiceAccountToken"]) == ("Never", False)
    volumes = [item["name"] for item in spec["volumes"]]
    assert len(set(volumes)) == len(volumes)
    found = worker(workload(made_of))
    places = [item["mountPath"].rstrip("/") for item in found["volumeMounts"]]
    assert {TOKEN_FOLDER, CHECKPOINT_FOLDER, "/dev/shm"} <= set(places)
    variables = [item["name"] for item in found["env"]]
    assert len(set(variables)) == len(variables)


NODE = {
    "metadata": {"name": "node1", "labels": {"a": "1"}},
    "spec": {"taints": [{"key": "gpu", "effect": "NoSchedule"}]},
    "status": {"conditions": [{"type": "Ready", "status": "True"}]},
}
junk = st.one_of(
    st.integers(), words, st.just([1]), st.just([["a"]]), st.just([{}]), st.just({"a": 1}), st.just({})
)
open_places = [
    ("securityContext",), ("tolerations",), ("affinity",), ("affinity", "podAffinity"), ("volumes",),
    ("initContainers",), ("terminationGracePeriodSeconds",), ("restartPolicy",), ("nodeSelector",),
    ("resources",), ("overhead",), ("affinity", "nodeAffinity"), ("nodeName",),
    ("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    ("affinity", "podAffinity", "requiredDuringSchedulingIgnoredDuringExecution"),
    ("securityContext", "runAsUser"), ("securityContext", "capabilities"),
]  # fmt: skip
of_containers = [
    ("securityContext",), ("securityContext", "capabilities"), ("securityContext", "capabilities", "add"),
    ("volumeMounts",), ("resources",), ("resources", "requests"), ("envFrom",), ("terminationMessagePath",),
]  # fmt: skip


def put(section: dict[str, Any], place: tuple[str, ...], value: Any) -> None:
    for key in place[:-1]:
        if not isinstance(section.get(key), dict):
            section[key] = {}
        section = section[key]
    section[place[-1]] = copy.deepcopy(value)


@given(
    st.lists(st.tuples(st.sampled_from(open_places), junk), max_size=3),
    st.lists(st.tuples(st.sampled_from(of_containers), junk), max_size=3),
)
def test_an_invalid_pod_template_is_left_for_the_api_server_to_reject(
    of_pod: list[tuple[tuple[str, ...], Any]], of_worker: list[tuple[tuple[str, ...], Any]]
) -> None:
    """The schema leaves most of a PodSpec open, and no mistake in it may stop the operator."""
    made_of = template(container(command=["python"]))
    for place, value in of_pod:
        put(made_of["spec"], place, value)
    for place, value in of_worker:
        put(made_of["spec"]["containers"][0], place, value)
    before = copy.deepcopy(made_of)
    manifest = pod(workload(made_of), single_node=True)
    assert made_of == before
    json.dumps(manifest)
    pod_request(made_of["spec"])
    eligible_nodes(made_of["spec"], [NODE])
