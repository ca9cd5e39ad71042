"""The certificates that the operator issues, verified by OpenSSL in handshakes."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from adascale_controller.operator.runtime.certificate_keeper import (
    AUTHORITY_LIFETIME,
    SERVER_LIFETIME,
    CertificateError,
    KeyPair,
    is_issued_for,
    issue_server_certificate,
    make_authority,
    needs_renewal,
)

NOW = datetime.now(UTC)
HOSTS = ("adascale-api.team.svc", "localhost", "127.0.0.1")


def handshake(server: KeyPair, authority: KeyPair, host: str, folder: Path) -> None:
    """Connect to a server, and raise an error unless its certificate is valid."""
    pem = folder / "server.pem"
    pem.write_bytes(server.certificate + server.key)
    served = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    served.load_cert_chain(pem)
    trusted = ssl.create_default_context(cadata=authority.certificate.decode())
    trusted.verify_flags |= ssl.VERIFY_X509_STRICT
    buffers = [ssl.MemoryBIO() for _ in range(2)]
    client = trusted.wrap_bio(buffers[0], buffers[1], server_hostname=host)
    other = served.wrap_bio(buffers[1], buffers[0], server_side=True)
    for _ in range(4):
        for side in (client, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
    assert other.version() == "TLSv1.3"


@pytest.mark.parametrize("host", HOSTS)
def test_a_certificate_is_valid_for_its_hosts(tmp_path: Path, host: str) -> None:
    authority = make_authority(NOW)
    handshake(issue_server_certificate(authority, HOSTS, NOW), authority, host, tmp_path)


def test_certificates_from_before_and_after_the_renewal_of_an_authority_are_valid_with_both(
    tmp_path: Path,
) -> None:
    earlier = make_authority(NOW - AUTHORITY_LIFETIME * 2 / 3)
    renewed = make_authority(NOW, earlier)
    assert renewed.certificate != earlier.certificate
    for issuer in (earlier, renewed):
        server = issue_server_certificate(issuer, HOSTS, NOW)
        for trusted in (earlier, renewed):
            handshake(server, trusted, HOSTS[0], tmp_path)
            assert is_issued_for(server.certificate, trusted.certificate, HOSTS)


@pytest.mark.parametrize(
    ("age", "expected"),
    [(timedelta(0), False), (timedelta(days=59), False), (timedelta(days=60), True), (SERVER_LIFETIME, True)],
)
def test_a_certificate_needs_renewal_after_two_thirds_of_its_lifetime(age: timedelta, expected: bool) -> None:
    server = issue_server_certificate(make_authority(NOW), HOSTS, NOW)
    assert needs_renewal(server.certificate, NOW + age) is expected


def test_a_certificate_outlives_no_authority() -> None:
    authority = make_authority(NOW)
    late = NOW + AUTHORITY_LIFETIME - timedelta(days=3)
    server = issue_server_certificate(authority, HOSTS, late)
    assert needs_renewal(server.certificate, late + timedelta(days=2, hours=1))


def test_a_certificate_of_another_authority_or_for_other_hosts_is_recognized() -> None:
    authority = make_authority(NOW)
    server = issue_server_certificate(authority, HOSTS, NOW)
    assert is_issued_for(server.certificate, authority.certificate, HOSTS)
    assert not is_issued_for(server.certificate, authority.certificate, HOSTS[:1])
    assert not is_issued_for(server.certificate, make_authority(NOW).certificate, HOSTS)


@pytest.mark.parametrize("broken", ["certificate", "key"])
def test_what_is_no_certificate_or_key_is_an_error(broken: str) -> None:
    authority = make_authority(NOW)
    pair = KeyPair(b"" if broken == "certificate" else authority.certificate, b"no key")
    with pytest.raises(CertificateError, match="in PEM"):
        issue_server_certificate(pair, HOSTS, NOW)
