"""The AdaScaleJobs of a namespace, as the API server stores or rejects them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, cast

from kubernetes import client

from adascale_core import names

TEMPLATE: dict[str, Any] = {
    "spec": {"containers": [{"name": "worker", "image": "example.invalid/worker:1", "command": ["python"]}]}
}
VALID: dict[str, Any] = {"batchSize": 32, "maxReplicas": 8, "template": TEMPLATE}
MERGE = "application/merge-patch+json"
GROUP_VERSION = (names.API_GROUP, names.API_VERSION)


def document(spec: Any, name: str = "digits") -> dict[str, Any]:
    return {
        "apiVersion": names.GROUP_VERSION,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": spec,
    }


def valid(**changes: Any) -> dict[str, Any]:
    """A valid spec, with changes."""
    return {**copy.deepcopy(VALID), **changes}


class RejectedError(Exception):
    """The API server's answer to an invalid job."""

    def __init__(self, error: client.ApiException) -> None:
        answer = json.loads(error.body or "")
        super().__init__(answer["message"])
        self.message: str = answer["message"]
        self.reason: str = answer["reason"]
        causes = answer.get("details", {}).get("causes", [])
        self.errors: list[tuple[str, str]] = [
            (cause["field"], cause["message"]) for cause in causes if cause["field"] != "<nil>"
        ]
        """Fields and their messages."""


class Jobs:
    """The AdaScaleJobs of a namespace."""

    def __init__(self, api_client: client.ApiClient, namespace: str) -> None:
        self._api = client.CustomObjectsApi(api_client)
        self._path = (*GROUP_VERSION, namespace, names.PLURAL)

    def submit(self, manifest: Mapping[str, Any]) -> None:
        self._api.create_namespaced_custom_object(*self._path, dict(manifest))

    def get(self, name: str) -> dict[str, Any]:
        return cast(dict[str, Any], self._api.get_namespaced_custom_object(*self._path, name))

    def all(self) -> list[dict[str, Any]]:
        """All jobs, by name."""
        found = cast(dict[str, Any], self._api.list_namespaced_custom_object(*self._path))
        return sorted(found["items"], key=lambda raw: str(raw["metadata"]["name"]))

    def edit(self, name: str, **spec: Any) -> None:
        """Change fields of the spec, by their names in YAML."""
        self._api.patch_namespaced_custom_object(*self._path, name, {"spec": spec}, _content_type=MERGE)

    def delete(self, name: str) -> None:
        self._api.delete_namespaced_custom_object(*self._path, name)

    def create(self, document: dict[str, Any], *, dry_run: bool = True) -> dict[str, Any]:
        """The job as the API server would store it, or, without `dry_run`, has stored it."""
        try:
            created = self._api.create_namespaced_custom_object(
                *self._path, document, field_validation="Strict", dry_run="All" if dry_run else None
            )
        except client.ApiException as error:
            raise RejectedError(error) from None
        return cast(dict[str, Any], created)

    def patch(self, name: str, change: dict[str, Any]) -> dict[str, Any]:
        """The job as it would be stored with some fields changed."""
        try:
            patched = self._api.patch_namespaced_custom_object(
                *self._path, name, change, field_validation="Strict", dry_run="All", _content_type=MERGE
            )
        except client.ApiException as error:
            raise RejectedError(error) from None
        return cast(dict[str, Any], patched)
