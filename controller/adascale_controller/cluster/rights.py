"""What to do about a right that a user lacks."""

from __future__ import annotations

import re
import shlex

from adascale_core import names

METRICS_READER = "adascale-metrics-reader"
"""The Role, in the namespace of the metrics service, with the right to read it through the API server."""

_NOT_IN_NAMES = re.compile(r"[/%\s]")
"""Characters of users that the name of a binding can't have."""


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
