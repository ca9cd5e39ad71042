"""Certificates of a metrics service, from the operator's own authority."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from adascale_controller.operator.runtime.certificate_keeper import (
    KeyPair,
    issue_server_certificate,
    make_authority,
)

HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class TlsFiles:
    """The files of a service with TLS and of its clients.

    Args:
        folder: the folder of the files.
    """

    folder: Path

    @property
    def ca(self) -> Path:
        """The certificate of the authority."""
        return self.folder / "ca.crt"

    @property
    def options(self) -> tuple[str, ...]:
        """The options of `adascale-api`."""
        return "--tls-cert", str(self.folder / "tls.crt"), "--tls-key", str(self.folder / "tls.key")

    def issue(self, authority: KeyPair, *hosts: str, now: datetime | None = None) -> None:
        """Write a certificate from an authority, as the kubelet replaces files: each by a new one."""
        pair = issue_server_certificate(authority, hosts or HOSTS, now or datetime.now(UTC))
        for name, content in (("tls.crt", pair.certificate), ("tls.key", pair.key)):
            new = self.folder / f"{name}.new"
            new.write_bytes(content)
            new.replace(self.folder / name)

    def trust(self, authority: KeyPair) -> None:
        """Write the certificate of the authority for clients."""
        new = self.folder / "ca.crt.new"
        new.write_bytes(authority.certificate)
        new.replace(self.ca)


def tls_files(folder: Path, authority: KeyPair | None = None) -> TlsFiles:
    """Return the files of a service, whose certificate is from `authority`, or from a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TlsFiles(folder)
    authority = authority or make_authority(datetime.now(UTC))
    files.issue(authority)
    files.trust(authority)
    return files
