"""The API server through the Python client of Kubernetes, which reads the kubeconfig and obtains credentials.

The client's documented methods return typed objects, which drop unknown fields.
`ApiClient.param_serialize` adds the credentials to a request, and renews them; the request itself is made
with the client's pool of connections, which has its certificates and proxies. Both are undocumented; all use
of them is in this module. Tried with kubernetes 37.0.1.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import urllib3.exceptions
from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException
from kubernetes.config.kube_config import KubeConfigMerger
from yaml import YAMLError

from adascale_controller.cluster.api import (
    CALL_TIMEOUT,
    ApiServerUnreachableError,
    ClusterAccessError,
    ClusterTarget,
    KubeconfigError,
    Query,
    RejectedError,
)
from adascale_core import names

METRICS_READER = "adascale-metrics-reader"
"""The Role, in the namespace of the metrics service, with the right to read it through the API server."""

_NOT_IN_NAMES = re.compile(r"[/%\s]")
"""Characters of users that the name of a binding can't have."""


CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection."""
MAX_EXCERPT = 2000
"""Characters of an answer without a message that an error quotes."""
SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_ANONYMOUS = "system:anonymous"
_FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\S+) resource "(?P<resource>[^"]*)" '
    r'in API group "(?P<group>[^"]*)"(?: in the namespace "(?P<namespace>[^"]*)")?'
)


def advice(user: str, verb: str, resource: str, group: str, namespace: str | None) -> str:
    """Return a message about a missing right, with the command that gives it."""
    what = f"{resource}.{group}" if group else resource
    where = f"in namespace {namespace}" if namespace else "in all namespaces"
    return (
        f"{user} may not {verb} {what} {where}. An administrator allows it with\n"
        f"  {_command(user, resource, namespace)}"
    )


def _command(user: str, resource: str, namespace: str | None) -> str:
    subject = f"--user={user}"
    if user.startswith("system:serviceaccount:"):
        subject = f"--serviceaccount={user.removeprefix('system:serviceaccount:')}"
    kind, role = "clusterrole", "view"
    binding = f"adascale-{role}"
    if resource == "services/proxy":
        kind, role, binding = "role", METRICS_READER, METRICS_READER
        namespace = namespace or names.SYSTEM_NAMESPACE
    # The subjects of a binding that exists are not changed, so each user has one.
    name = f"{binding}-{_NOT_IN_NAMES.sub('-', user)}"
    scope = ["kubectl", "create", "clusterrolebinding"]
    if namespace is not None:
        scope = ["kubectl", "-n", namespace, "create", "rolebinding"]
    return shlex.join([*scope, name, f"--{kind}={role}", subject])


class KubernetesApi:
    """The API server of a kubeconfig, with the rights of its user."""

    def __init__(self, api: client.ApiClient, context: str, namespace: str) -> None:
        self._api = api
        self.context = context  # of the kubeconfig, for messages; empty inside a pod
        self.namespace = namespace  # of jobs that are named without one

    def close(self) -> None:
        """Close the connections."""
        self._api.close()

    def get(self, path: str, query: Query = (), timeout: float = CALL_TIMEOUT) -> Any:
        """Return the parsed JSON of the answer; None if it has no body."""
        try:
            _, url, headers, _, _ = self._api.param_serialize(
                "GET",
                path,
                query_params=list(query),
                header_params={"Accept": "application/json"},
                auth_settings=["BearerToken"],
            )
            answer = self._api.rest_client.pool_manager.request(
                "GET",
                url,
                headers=headers,
                timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT, read=timeout),
                retries=False,
                redirect=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unreachable(error) from error
        except ConfigException as error:
            raise ClusterAccessError(
                f"the credentials of {self._place} cannot be renewed: {error}"
            ) from error
        data = answer.data
        if answer.status >= 300:
            raise self._error(path, answer.status, data)
        try:
            return json.loads(data) if data else None
        except ValueError:
            raise ApiServerUnreachableError(
                f"{self._api.configuration.host} is not the address of an API server: its answer is not JSON"
            ) from None

    @property
    def _place(self) -> str:
        return f"context {self.context}" if self.context else "this pod's service account"

    def _unreachable(self, error: Exception) -> ClusterAccessError:
        cause: BaseException = error
        while (inner := cause.__cause__ or cause.__context__) is not None:
            cause = inner
        reason = cause.strerror.lower() if isinstance(cause, OSError) and cause.strerror else str(cause)
        return ApiServerUnreachableError(
            f"the API server {self._api.configuration.host} of {self._place} does not answer: {reason}"
        )

    def _error(self, path: str, status: int, data: bytes) -> ClusterAccessError:
        answer = _parsed(data)
        if answer.get("kind") != "Status":
            # Of a service behind the API server, or of the API server about a path that it does not know.
            if status == 404 and path.startswith(f"/apis/{names.API_GROUP}/"):
                return ClusterAccessError(
                    f"the cluster of {self._place} does not know {names.KIND}s: an administrator "
                    "installs them with `kubectl apply -k deploy` in a clone of the repository"
                )
            text = data[:MAX_EXCERPT].decode(errors="replace").strip() or "no reason is given"
            return RejectedError(text, status)
        message = str(answer.get("message", ""))
        if status == 401 or (status == 403 and _ANONYMOUS in message):
            return ClusterAccessError(
                f"the API server does not accept the credentials of {self._place}: they are missing, not "
                "valid or have expired. Log in again, as for kubectl"
            )
        if status == 403 and (denied := _FORBIDDEN.search(message)) is not None:
            return ClusterAccessError(advice(**denied.groupdict()))
        return RejectedError(message, status)


@contextmanager
def connect(target: ClusterTarget) -> Iterator[KubernetesApi]:
    """Yield the API server that `target` selects."""
    settings = client.Configuration()
    try:
        context, namespace = _load(target, settings)
    except (ConfigException, YAMLError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise KubeconfigError(_without_cluster(target, error)) from error
    api = KubernetesApi(client.ApiClient(settings), context, target.namespace or namespace)
    try:
        yield api
    finally:
        api.close()


def _load(target: ClusterTarget, settings: client.Configuration) -> tuple[str, str]:
    """Load the configuration of the client, and return the names of its context and its namespace."""
    files = str(target.kubeconfig or os.environ.get("KUBECONFIG") or Path.home() / ".kube" / "config")
    given = target.kubeconfig or os.environ.get("KUBECONFIG") or target.context
    if not given and not Path(files).exists() and SERVICE_ACCOUNT_NAMESPACE.exists():
        config.load_incluster_config(client_configuration=settings)
        return "", SERVICE_ACCOUNT_NAMESPACE.read_text().strip()
    # `list_kube_config_contexts` refuses a file without a current context, although another one is chosen.
    found = KubeConfigMerger(files).config
    if found is None:
        raise ConfigException("the file does not exist, or is empty")
    contexts = {str(each.value["name"]): each.value["context"] for each in found["contexts"]}
    name = target.context or found.value.get("current-context")
    known = ", ".join(sorted(contexts)) or "none"
    if not name:
        raise KubeconfigError(f"the kubeconfig has no current context: choose one of {known} with --context")
    if name not in contexts:
        raise KubeconfigError(f"the kubeconfig has no context {name!r}; it has {known}")
    config.load_kube_config(config_file=files, context=name, client_configuration=settings)
    return name, str(contexts[name].get("namespace") or names.DEFAULT_NAMESPACE)


def _without_cluster(target: ClusterTarget, error: Exception) -> str:
    place = target.kubeconfig or os.environ.get("KUBECONFIG") or "~/.kube/config"
    return (
        f"no cluster is configured in {place}: {error}. Set KUBECONFIG or --kubeconfig to the file with "
        "which kubectl works"
    )


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(data)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}
