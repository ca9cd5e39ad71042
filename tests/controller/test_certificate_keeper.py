"""The operator makes, renews and publishes certificates, with an API server in memory."""

from __future__ import annotations

import asyncio
import ssl
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from adascale_controller.operator.apply.kubernetes_cluster import ApiServerError
from adascale_controller.operator.runtime.certificate_keeper import (
    PUBLISH_INTERVAL,
    REFRESH_INTERVAL,
    RETRY_INTERVAL,
    SERVER_LIFETIME,
    CertificateKeeper,
    is_issued_for,
    make_authority,
    server_hosts,
)
from adascale_core import names
from support.fake_api_server import FakeApiServer

SYSTEM = "adascale-system"
HOSTS = server_hosts("https://adascale-api.adascale-system.svc:8265", "https://10.0.0.7:8265")
DAY = 86400.0
SERVER, AUTHORITY = (SYSTEM, names.CERTIFICATE_SECRET), (SYSTEM, names.AUTHORITY)


class Fixture:
    """A keeper, its cluster, the namespaces with jobs, and the clock."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0
        self.cluster = FakeApiServer()
        self.namespaces = {"team"}
        self.keeper = self.start()

    def start(self, *, is_external: bool = False) -> CertificateKeeper:
        """Start a keeper without any memory."""
        return CertificateKeeper(
            *(self.cluster, SERVER, HOSTS, lambda: self.namespaces),
            is_external=is_external,
            clock=lambda: self.now,
        )

    def refresh(self) -> None:
        asyncio.run(self.keeper.refresh())

    def publish(self, authority: bytes | None = None) -> set[str]:
        """Publish the authority, by default that of the Secret, and return the namespaces with it."""
        self.cluster.config_maps.clear()
        asyncio.run(self.keeper.publish())
        authority = authority or self.secret(SERVER, names.AUTHORITY_FILE)
        for (_, name), config_map in self.cluster.config_maps.items():
            assert name == names.AUTHORITY
            assert config_map["data"] == {names.AUTHORITY_FILE: authority.decode()}
        return {namespace for namespace, _ in self.cluster.config_maps}

    def secret(self, key: tuple[str, str], name: str) -> bytes:
        return b64decode(self.cluster.secrets[key]["data"][name])

    def put_external(self, **data: bytes) -> None:
        """Write the Secret as another program does."""
        self.cluster.secrets[SERVER] = {
            "metadata": {"namespace": SYSTEM, "name": SERVER[1], "resourceVersion": "7"},
            "data": {name.replace("_", "."): b64encode(value).decode() for name, value in data.items()},
        }


@pytest.fixture
def made() -> Iterator[Fixture]:
    fixture = Fixture()
    yield fixture
    fixture.keeper.close()


def test_the_hosts_are_those_of_the_urls_and_of_a_forwarded_port() -> None:
    assert HOSTS == ["adascale-api.adascale-system.svc", "10.0.0.7", "localhost", "127.0.0.1", "::1"]
    assert server_hosts("https://[fd00::1]:8265", "https://[fd00::1]:8265")[0] == "fd00::1"


def test_missing_certificates_are_made(made: Fixture) -> None:
    made.refresh()
    authority = made.secret(AUTHORITY, "tls.crt")
    assert is_issued_for(made.secret(SERVER, "tls.crt"), authority, HOSTS)
    assert made.secret(SERVER, names.AUTHORITY_FILE) == authority == made.keeper.ca_file.read_bytes()
    assert {secret["type"] for secret in made.cluster.secrets.values()} == {"kubernetes.io/tls"}
    assert made.secret(AUTHORITY, "tls.key") not in made.secret(SERVER, "tls.key")


def test_the_authority_is_published_to_a_namespace_once(made: Fixture) -> None:
    made.refresh()
    for expected in ({("new", names.AUTHORITY)}, set()):
        made.cluster.config_maps.clear()
        asyncio.run(made.keeper.publish_to("new"))
        assert set(made.cluster.config_maps) == expected


def test_certificates_that_are_valid_are_kept_also_by_the_next_operator(made: Fixture) -> None:
    made.refresh()
    before = dict(made.cluster.secrets)
    made.now += 50 * DAY
    made.refresh()
    made.keeper.close()
    made.keeper = made.start()
    made.refresh()
    assert made.cluster.secrets == before


def test_a_certificate_is_renewed_long_before_its_end_and_its_authority_is_kept(made: Fixture) -> None:
    made.refresh()
    authority, before = made.cluster.secrets[AUTHORITY], made.secret(SERVER, "tls.crt")
    made.now += SERVER_LIFETIME.total_seconds() * 0.67
    made.refresh()
    assert made.secret(SERVER, "tls.crt") != before
    assert made.cluster.secrets[AUTHORITY] == authority


def test_an_authority_is_renewed_with_its_key(made: Fixture) -> None:
    made.refresh()
    earlier, key = made.secret(AUTHORITY, "tls.crt"), made.secret(AUTHORITY, "tls.key")
    made.publish()
    made.now += 7 * 365 * DAY
    made.refresh()
    renewed = made.secret(AUTHORITY, "tls.crt")
    assert renewed != earlier
    assert made.secret(AUTHORITY, "tls.key") == key
    for trusted in (earlier, renewed):
        assert is_issued_for(made.secret(SERVER, "tls.crt"), trusted, HOSTS)
    assert made.keeper.ca_file.read_bytes() == renewed
    assert made.publish() == {SYSTEM, "team"}


@pytest.mark.parametrize("missing", [SERVER, AUTHORITY])
def test_a_deleted_secret_is_made_again(made: Fixture, missing: tuple[str, str]) -> None:
    made.refresh()
    before = made.secret(AUTHORITY, "tls.crt")
    del made.cluster.secrets[missing]
    made.refresh()
    authority = made.secret(AUTHORITY, "tls.crt")
    assert is_issued_for(made.secret(SERVER, "tls.crt"), authority, HOSTS)
    assert made.keeper.ca_file.read_bytes() == authority
    assert (authority == before) == (missing == SERVER)


@pytest.mark.parametrize("key", ["tls.crt", "ca.crt"])
def test_a_damaged_certificate_is_replaced(made: Fixture, key: str) -> None:
    made.refresh()
    made.cluster.secrets[SERVER]["data"][key] = b64encode(b"nonsense").decode()
    made.refresh()
    assert is_issued_for(made.secret(SERVER, "tls.crt"), made.secret(AUTHORITY, "tls.crt"), HOSTS)
    assert made.secret(SERVER, "ca.crt") == made.secret(AUTHORITY, "tls.crt")


def test_a_damaged_authority_is_an_error_that_says_what_to_do(made: Fixture) -> None:
    made.refresh()
    made.cluster.secrets[AUTHORITY]["data"]["tls.crt"] = "!"
    with pytest.raises(ApiServerError, match=r"Secret adascale-ca .* can't be used: .* delete it") as error:
        made.refresh()
    assert error.value.status == 0


def test_a_certificate_for_other_hosts_is_replaced(made: Fixture) -> None:
    made.refresh()
    made.keeper.close()
    made.keeper = CertificateKeeper(made.cluster, SERVER, ["other"], set, clock=lambda: made.now)
    made.refresh()
    assert is_issued_for(made.secret(SERVER, "tls.crt"), made.secret(AUTHORITY, "tls.crt"), ["other"])


def test_a_secret_of_another_program_is_not_replaced(made: Fixture) -> None:
    made.put_external(tls_crt=b"theirs", tls_key=b"theirs")
    with pytest.raises(ApiServerError, match="is not of this operator: delete it, or add --tls-external"):
        made.refresh()
    assert made.secret(SERVER, "tls.crt") == b"theirs"


def test_an_external_secret_is_read_only_and_followed(made: Fixture) -> None:
    made.keeper.close()
    made.keeper = made.start(is_external=True)
    with pytest.raises(ApiServerError, match="there is no Secret adascale-api-tls"):
        made.refresh()
    made.put_external(tls_crt=b"theirs", tls_key=b"theirs")
    with pytest.raises(ApiServerError, match=r"has no ca\.crt: choose an issuer"):
        made.refresh()
    first, second = (make_authority(datetime.fromtimestamp(made.now, UTC)).certificate for _ in range(2))
    for authority in (first, second, first + second):
        made.put_external(tls_crt=b"theirs", tls_key=b"theirs", ca_crt=authority)
        made.refresh()
        assert made.keeper.ca_file.read_bytes() == authority
        assert made.publish() == {SYSTEM, "team"}
    assert set(made.cluster.secrets) == {SERVER}


@pytest.mark.parametrize("form", ["DER", "text", "PEM with a comment of other bytes"])
def test_an_external_authority_that_is_no_certificate_replaces_none(made: Fixture, form: str) -> None:
    made.keeper.close()
    made.keeper = made.start(is_external=True)
    authority = make_authority(datetime.fromtimestamp(made.now, UTC)).certificate
    made.put_external(ca_crt=authority)
    made.refresh()
    damaged = {"DER": ssl.PEM_cert_to_DER_cert(authority.decode()), "text": b"nonsense"}
    made.put_external(ca_crt=damaged.get(form, b"\xff\n" + authority))
    with pytest.raises(
        ApiServerError, match=r"ca\.crt of Secret adascale-api-tls .* it has no certificate in PEM"
    ):
        made.refresh()
    assert made.keeper.ca_file.read_bytes() == authority
    assert made.publish(authority) == {SYSTEM, "team"}


def test_the_authority_is_published_once_to_each_namespace_and_again_after_an_interval(
    made: Fixture,
) -> None:
    made.refresh()
    assert made.publish() == {SYSTEM, "team"}
    made.now += RETRY_INTERVAL
    assert made.publish() == set()
    made.namespaces = {"team", "new"}
    assert made.publish() == {"new"}
    made.now += PUBLISH_INTERVAL
    assert made.publish() == {SYSTEM, "team", "new"}


def test_a_namespace_that_refuses_it_is_tried_again_and_stops_no_other(
    made: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply: Callable[[Any], Any] = made.cluster.apply_config_map
    refusing = {"team"}

    async def refuse(manifest: Any) -> None:
        if manifest["metadata"]["namespace"] in refusing:
            raise ApiServerError("namespace team is being terminated", 403)
        await apply(manifest)

    monkeypatch.setattr(made.cluster, "apply_config_map", refuse)
    made.namespaces.add("zone")
    made.refresh()
    assert made.publish() == {SYSTEM, "zone"}
    refusing.clear()
    assert made.publish() == set()
    made.now += RETRY_INTERVAL
    assert made.publish() == {"team"}


def test_it_goes_on_after_failures_of_the_api_server(made: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    made.refresh()
    before = made.secret(SERVER, "tls.crt")
    failures = 0
    get = made.cluster.get

    async def fail_once(plural: str, namespace: str, name: str) -> Any:
        nonlocal failures
        failures += 1
        if failures == 1:
            raise ApiServerError("the API server does not answer")
        return await get(plural, namespace, name)

    async def sleep(_seconds: float) -> None:
        made.now += REFRESH_INTERVAL
        if made.secret(SERVER, "tls.crt") != before:
            raise asyncio.CancelledError

    monkeypatch.setattr(made.cluster, "get", fail_once)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    made.now += 61 * DAY
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(made.keeper.run())
    assert failures > 1
