"""A certificate authority, and the certificates that it issues, in PEM.

An authority is renewed with the same key and name. So a certificate that it issued before or after is valid
for who has its earlier certificate and for who has its new one, and nothing has to be renewed at the same
time as another.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

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


def create_authority(now: datetime) -> KeyPair:
    """Return a new certificate authority, with a new key."""
    return _authority(ec.generate_private_key(ec.SECP256R1()), now)


def renew_authority(authority: KeyPair, now: datetime) -> KeyPair:
    """Return an authority with the same key, valid from now."""
    return _authority(_read_key(authority.key), now)


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


def require_certificates(pem: bytes) -> None:
    """Return if this is one certificate in PEM or several, and text that a ConfigMap can have."""
    try:
        pem.decode("ascii")
        x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise CertificateError(f"it has no certificate in PEM ({error})") from error


def is_issued_for(certificate: bytes, authority: bytes, hosts: Sequence[str]) -> bool:
    """Whether a certificate is from an authority, and for these hosts."""
    read = _read_certificate(certificate)
    try:
        read.verify_directly_issued_by(_read_certificate(authority))
        names = read.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound):
        return False
    return list(names) == [_general_name(host) for host in hosts]


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> KeyPair:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "adascale-operator")])
    certificate = (
        _builder(name, name, key, now, now + AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return KeyPair(certificate.public_bytes(serialization.Encoding.PEM), _key_pem(key))


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
    try:
        return x509.load_pem_x509_certificate(pem)
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
