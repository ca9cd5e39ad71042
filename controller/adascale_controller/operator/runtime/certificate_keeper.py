"""Keeps the certificate of the metrics service valid, and that of its authority in the namespaces of jobs."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from adascale_controller.operator.apply.certificates import (
    CertificateError,
    KeyPair,
    create_authority,
    is_issued_for,
    issue_server_certificate,
    needs_renewal,
    renew_authority,
    require_certificates,
)
from adascale_controller.operator.apply.cluster import Cluster, ClusterError
from adascale_controller.operator.types.kubernetes import ApiObject, Manifest
from adascale_core import names

logger = logging.getLogger(__name__)

INTERVAL = 1.0
"""Seconds between two looks for namespaces that have their first job."""
REFRESH_INTERVAL = 60.0
"""Seconds between two looks whether certificates are there, and have to be renewed."""
RETRY_INTERVAL = 10.0
"""Seconds after a failure."""
PUBLISH_INTERVAL = 600.0
"""Seconds after which the authority is written to a namespace again, where somebody may have deleted it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
"""The hosts of a forwarded port."""

_CERTIFICATE, _KEY = "tls.crt", "tls.key"
_MANAGED_BY = "app.kubernetes.io/managed-by"
_LABELS = {"app.kubernetes.io/part-of": names.FIELD_MANAGER, _MANAGED_BY: names.FIELD_MANAGER}


def server_hosts(*urls: str) -> list[str]:
    """Return the hosts of a metrics service, which is reached at these URLs and by a forwarded port."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return [host for host in dict.fromkeys([*hosts, *LOOPBACK]) if host]


class CertificateKeeper:
    """Makes and renews certificates, and publishes the authority.

    The authority is in the Secret `names.AUTHORITY` beside that of the service, and its certificate in the
    ConfigMap of that name of each namespace with jobs, from which the kubelet gives it to pods.
    """

    def __init__(
        self,
        cluster: Cluster,
        secret: tuple[str, str],
        hosts: Sequence[str],
        namespaces: Callable[[], Collection[str]],
        *,
        is_external: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = cluster
        self._namespace, self._name = secret
        self._hosts = hosts
        self._namespaces = namespaces
        self._is_external = is_external
        self._clock = clock
        self._folder = tempfile.TemporaryDirectory(prefix="adascale-ca-")
        self.ca_file = Path(self._folder.name) / names.AUTHORITY_FILE
        """A file with the certificate of the authority, for the operator's own client."""
        self._authority = b""
        self._publish_at: dict[str, float] = {}
        """When the authority is written to a namespace again."""

    async def run(self) -> None:
        """Keep the certificates until cancelled."""
        refresh_at = self._clock() + REFRESH_INTERVAL
        while True:
            if not 0 < refresh_at - self._clock() <= REFRESH_INTERVAL:
                refresh_at = self._clock() + REFRESH_INTERVAL
                try:
                    await self.refresh()
                except ClusterError as error:
                    logger.warning("The certificate of the metrics service is not renewed: %s", error)
            await self.publish()
            await asyncio.sleep(INTERVAL)

    def close(self) -> None:
        """Delete the file."""
        self._folder.cleanup()

    async def refresh(self) -> None:
        """Make or renew the certificates that need it, and read that of the authority."""
        authority = await (self._read_external() if self._is_external else self._keep())
        if authority != self._authority:
            new = self.ca_file.with_suffix(".new")
            new.write_bytes(authority)
            new.replace(self.ca_file)
            self._authority = authority
            self._publish_at.clear()

    async def publish(self) -> None:
        """Write the certificate of the authority to the namespaces that may lack it."""
        wanted = {self._namespace, *self._namespaces()}
        self._publish_at = {each: at for each, at in self._publish_at.items() if each in wanted}
        for namespace in sorted(wanted):
            await self.publish_to(namespace)

    async def publish_to(self, namespace: str) -> None:
        """Write the certificate of the authority to a namespace, if it may lack it.

        If that fails, it is tried again later: pods wait for it.
        """
        now = self._clock()
        if 0 < self._publish_at.get(namespace, now) - now <= PUBLISH_INTERVAL:
            return
        manifest = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": names.AUTHORITY, "namespace": namespace, "labels": _LABELS},
            "data": {names.AUTHORITY_FILE: self._authority.decode()},
        }
        delay = PUBLISH_INTERVAL
        try:
            await self._cluster.apply_config_map(manifest)
        except ClusterError as error:
            delay = RETRY_INTERVAL
            logger.warning(
                "Pods in namespace %s wait for ConfigMap %s: %s", namespace, names.AUTHORITY, error
            )
        self._publish_at[namespace] = now + delay

    async def _read_external(self) -> bytes:
        secret = await self._cluster.get_secret(self._namespace, self._name)
        if secret is None:
            raise ClusterError(
                f"there is no Secret {self._name} in namespace {self._namespace}, which --tls-external "
                "expects"
            )
        authority = _value(secret, names.AUTHORITY_FILE)
        if not authority:
            raise ClusterError(
                f"Secret {self._name} in namespace {self._namespace} has no {names.AUTHORITY_FILE}: choose "
                "an issuer that adds it, such as one of the type CA"
            )
        try:
            require_certificates(authority)
        except CertificateError as error:
            raise ClusterError(
                f"{names.AUTHORITY_FILE} of Secret {self._name} in namespace {self._namespace} can't be "
                f"used: {error}"
            ) from error
        return authority

    async def _keep(self) -> bytes:
        """Return the certificate of the authority, after making or renewing what needs it."""
        now = datetime.fromtimestamp(self._clock(), UTC)
        secret = await self._own(names.AUTHORITY)
        authority = _pair(secret) if secret is not None else create_authority(now)
        try:
            is_old = secret is not None and needs_renewal(authority.certificate, now)
            if is_old:
                authority = renew_authority(authority, now)
            if secret is None or is_old:
                await self._write(names.AUTHORITY, secret, authority, authority)
            secret = await self._own(self._name)
            if secret is None or not self._is_usable(secret, authority, now):
                server = issue_server_certificate(authority, self._hosts, now)
                await self._write(self._name, secret, server, authority)
        except CertificateError as error:
            raise ClusterError(
                f"Secret {names.AUTHORITY} in namespace {self._namespace} can't be used: {error}; delete it, "
                "and another authority is made"
            ) from error
        return authority.certificate

    def _is_usable(self, secret: ApiObject, authority: KeyPair, now: datetime) -> bool:
        server = _pair(secret)
        try:
            return (
                is_issued_for(server.certificate, authority.certificate, self._hosts)
                and not needs_renewal(server.certificate, now)
                and _value(secret, names.AUTHORITY_FILE) == authority.certificate
            )
        except CertificateError:
            return False

    async def _own(self, name: str) -> ApiObject | None:
        secret = await self._cluster.get_secret(self._namespace, name)
        if secret is None:
            return None
        if (secret["metadata"].get("labels") or {}).get(_MANAGED_BY) != names.FIELD_MANAGER:
            raise ClusterError(
                f"Secret {name} in namespace {self._namespace} is not of this operator: delete it, or add "
                "--tls-external if another program makes it"
            )
        return secret

    async def _write(self, name: str, old: ApiObject | None, pair: KeyPair, authority: KeyPair) -> None:
        metadata: Manifest = {"name": name, "namespace": self._namespace, "labels": _LABELS}
        if old is not None:
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        contents = {
            _CERTIFICATE: pair.certificate,
            _KEY: pair.key,
            names.AUTHORITY_FILE: authority.certificate,
        }
        manifest = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "kubernetes.io/tls",
            "data": {key: b64encode(content).decode() for key, content in contents.items()},
        }
        write = self._cluster.create_secret if old is None else self._cluster.replace_secret
        await write(manifest)
        logger.info("%s Secret %s", "Created" if old is None else "Renewed", name)


def _pair(secret: ApiObject) -> KeyPair:
    return KeyPair(_value(secret, _CERTIFICATE), _value(secret, _KEY))


def _value(secret: ApiObject, key: str) -> bytes:
    """Return a value of a Secret; empty if it has none."""
    try:
        return b64decode((secret.get("data") or {}).get(key) or "")
    except (Base64Error, ValueError):
        return b""
