"""Keeps the certificate of the metrics service valid, and that of its authority in the namespaces of jobs.

All certificates are in PEM. An authority is renewed with the same key and name. So a certificate that it
issued before or after is valid for who has its earlier certificate and for who has its new one, and nothing
has to be renewed at the same time as another.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import tempfile
import time
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError, KubernetesCluster
from adascale_controller.operator.types.kubernetes import ApiObject, Manifest
from adascale_core import names
from adascale_core.errors import AdaScaleError

AUTHORITY_LIFETIME = timedelta(days=3650)
SERVER_LIFETIME = timedelta(days=90)
RENEWED_AFTER = 2 / 3
"""The part of its lifetime after which a certificate is renewed."""
CLOCK_SKEW = timedelta(minutes=5)
"""By which the clocks of nodes may differ."""


class CertificateError(AdaScaleError):
    """A certificate or its key can't be used."""


@dataclass(frozen=True)
class KeyPair:
    """A certificate and its private key, in PEM."""

    certificate: bytes
    key: bytes


def make_authority(now: datetime, known: KeyPair | None = None) -> KeyPair:
    """Return a certificate authority, valid from now: with a new key, or with the key of a known one."""
    key = ec.generate_private_key(ec.SECP256R1()) if known is None else _read_key(known.key)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "adascale-operator")])
    certificate = (
        _builder(name, name, key, now, now + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def issue_server_certificate(authority: KeyPair, hosts: Sequence[str], now: datetime) -> KeyPair:
    """Return a certificate of a server, with a new key."""
    issuer, issuer_key = _read_certificate(authority.certificate), _read_key(authority.key)
    key = ec.generate_private_key(ec.SECP256R1())
    # A name in the subject may have 64 characters only; clients read the alternative names.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "adascale-api")])
    certificate = (
        _builder(subject, issuer.subject, key, now, min(now + SERVER_LIFETIME, issuer.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False
        )
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


def needs_renewal(certificate: bytes, now: datetime) -> bool:
    """Whether a certificate has passed two thirds of its lifetime."""
    read = _read_certificate(certificate)
    begin, end = read.not_valid_before_utc, read.not_valid_after_utc
    return now >= begin + (end - begin) * RENEWED_AFTER


def is_issued_for(certificate: bytes, authority: bytes, hosts: Sequence[str]) -> bool:
    """Whether a certificate is from an authority, and for these hosts."""
    read = _read_certificate(certificate)
    try:
        read.verify_directly_issued_by(_read_certificate(authority))
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return list(names) == [_general_name(host) for host in hosts]


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before((now - CLOCK_SKEW).astimezone(UTC))
        .not_valid_after(end.astimezone(UTC))
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _read_certificate(pem: bytes) -> x509.Certificate:
    """Return the first certificate in a text that a ConfigMap can have, with one in PEM or several."""
    try:
        pem.decode("ascii")
        return x509.load_pem_x509_certificates(pem)[0]
    except ValueError as error:
        raise CertificateError(f"it has no certificate in PEM ({error})") from error


def _read_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"it has no private key in PEM ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError("its private key is not of an elliptic curve")
    return key


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


@dataclass(eq=False)
class CertificateKeeper:
    """Makes and renews certificates, and publishes the authority.

    The authority is in the Secret `names.AUTHORITY` beside that of the service, and its certificate in the
    ConfigMap of that name of each namespace with jobs, from which the kubelet gives it to pods.
    """

    cluster: KubernetesCluster
    secret: tuple[str, str]  # namespace and name of the Secret of the service
    hosts: Sequence[str]
    namespaces: Callable[[], Collection[str]]
    is_external: bool = False  # whether another program makes the Secret
    clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._namespace, self._name = self.secret
        self._folder = tempfile.TemporaryDirectory(prefix="adascale-ca-")
        self.ca_file = Path(self._folder.name) / names.AUTHORITY_FILE
        """A file with the certificate of the authority, for the operator's own client."""
        self._authority = b""
        self._publish_at: dict[str, float] = {}
        """When the authority is written to a namespace again."""

    async def run(self) -> None:
        """Keep the certificates until cancelled."""
        refresh_at = self.clock() + REFRESH_INTERVAL
        while True:
            if not 0 < refresh_at - self.clock() <= REFRESH_INTERVAL:
                refresh_at = self.clock() + REFRESH_INTERVAL
                try:
                    await self.refresh()
                except ApiServerError as error:
                    logger.warning("The certificate of the metrics service is not renewed: %s", error)
            await self.publish()
            await asyncio.sleep(INTERVAL)

    def close(self) -> None:
        """Delete the file."""
        self._folder.cleanup()

    async def refresh(self) -> None:
        """Make or renew the certificates that need it, and read that of the authority."""
        authority = await (self._read_external() if self.is_external else self._keep())
        if authority != self._authority:
            new = self.ca_file.with_suffix(".new")
            new.write_bytes(authority)
            new.replace(self.ca_file)
            self._authority = authority
            self._publish_at.clear()

    async def publish(self) -> None:
        """Write the certificate of the authority to the namespaces that may lack it."""
        wanted = {self._namespace, *self.namespaces()}
        self._publish_at = {each: at for each, at in self._publish_at.items() if each in wanted}
        for namespace in sorted(wanted):
            await self.publish_to(namespace)

    async def publish_to(self, namespace: str) -> None:
        """Write the certificate of the authority to a namespace, if it may lack it.

        If that fails, it is tried again later: pods wait for it.
        """
        now = self.clock()
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
            await self.cluster.apply_config_map(manifest)
        except ApiServerError as error:
            delay = RETRY_INTERVAL
            logger.warning(
                "Pods in namespace %s wait for ConfigMap %s: %s", namespace, names.AUTHORITY, error
            )
        self._publish_at[namespace] = now + delay

    async def _read_external(self) -> bytes:
        secret = await self.cluster.get("secrets", self._namespace, self._name)
        if secret is None:
            raise ApiServerError(
                f"there is no Secret {self._name} in namespace {self._namespace}, which --tls-external "
                "expects"
            )
        authority = _value(secret, names.AUTHORITY_FILE)
        if not authority:
            raise ApiServerError(
                f"Secret {self._name} in namespace {self._namespace} has no {names.AUTHORITY_FILE}: choose "
                "an issuer that adds it, such as one of the type CA"
            )
        try:
            _read_certificate(authority)
        except CertificateError as error:
            raise ApiServerError(
                f"{names.AUTHORITY_FILE} of Secret {self._name} in namespace {self._namespace} can't be "
                f"used: {error}"
            ) from error
        return authority

    async def _keep(self) -> bytes:
        """Return the certificate of the authority, after making or renewing what needs it."""
        now = datetime.fromtimestamp(self.clock(), UTC)
        secret = await self._own(names.AUTHORITY)
        known = _pair(secret) if secret is not None else None
        try:
            if known is not None and not needs_renewal(known.certificate, now):
                authority = known
            else:
                authority = make_authority(now, known)
                await self._write(names.AUTHORITY, secret, authority, authority)
            secret = await self._own(self._name)
            if secret is None or not self._is_usable(secret, authority, now):
                server = issue_server_certificate(authority, self.hosts, now)
                await self._write(self._name, secret, server, authority)
        except CertificateError as error:
            raise ApiServerError(
                f"Secret {names.AUTHORITY} in namespace {self._namespace} can't be used: {error}; delete it, "
                "and another authority is made"
            ) from error
        return authority.certificate

    def _is_usable(self, secret: ApiObject, authority: KeyPair, now: datetime) -> bool:
        server = _pair(secret)
        try:
            return (
                is_issued_for(server.certificate, authority.certificate, self.hosts)
                and not needs_renewal(server.certificate, now)
                and _value(secret, names.AUTHORITY_FILE) == authority.certificate
            )
        except CertificateError:
            return False

    async def _own(self, name: str) -> ApiObject | None:
        secret = await self.cluster.get("secrets", self._namespace, name)
        if secret is None:
            return None
        if (secret["metadata"].get("labels") or {}).get(_MANAGED_BY) != names.FIELD_MANAGER:
            raise ApiServerError(
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
        write = self.cluster.create if old is None else self.cluster.replace
        if await write("secrets", manifest) is None:
            raise ApiServerError(f"Secret {name} in namespace {self._namespace} has changed meanwhile")
        logger.info("%s Secret %s", "Created" if old is None else "Renewed", name)


def _pair(secret: ApiObject) -> KeyPair:
    return KeyPair(_value(secret, _CERTIFICATE), _value(secret, _KEY))


def _value(secret: ApiObject, key: str) -> bytes:
    """Return a value of a Secret; empty if it has none."""
    try:
        return b64decode((secret.get("data") or {}).get(key) or "")
    except (Base64Error, ValueError):
        return b""
