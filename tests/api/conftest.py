"""A service that the tests in this folder share; each test uses jobs of its own."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from api.client import Client, ServiceProcess
from support.postgresql import PostgresqlServer, postgresql_server


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with ServiceProcess(tmp_path_factory.mktemp("service")) as running:
        yield running
        assert "Traceback" not in running.log()


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    with postgresql_server() as server:
        yield server


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[Client]:
    with Client(service.port) as client:
        yield client


@pytest.fixture
def job() -> str:
    """The id of a job that only this test uses."""
    return f"tests.job-{uuid4().hex}"
