"""Fixtures of the integration tests: a real Slurm cluster and real servers, removed afterwards."""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from job_submission import Submit, submit_to

from servers.kafka import Kafka
from servers.postgresql import PostgreSQL
from servers.search import Elasticsearch, OpenSearch, SearchServer
from servers.server import Server
from steward.sandbox import Sandbox, SandboxSpec

# Tests in the background ignore Ctrl-C, and child processes inherit that; some of these tests are
# about Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

SLURM = os.environ.get("STEWARD_SLURM", "")
"""Version of Slurm to test on; the installed one if empty."""

ELASTICSEARCH = int(os.environ.get("STEWARD_ELASTICSEARCH", "9"))
OPENSEARCH = int(os.environ.get("STEWARD_OPENSEARCH", "3"))
"""Major versions to test on."""

_SEARCH = {"elasticsearch", "opensearch", "search_server"}
Kind = TypeVar("Kind", bound=Server)
_started = pytest.StashKey[list[Server]]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that need a server."""
    for item in items:
        asked = set(getattr(item, "fixturenames", ()))
        if asked & {"kafka", *_SEARCH}:
            item.add_marker(pytest.mark.servers)
        if asked & _SEARCH:
            item.add_marker(pytest.mark.search)
        if asked & {"booked_sandbox", "postgresql"}:
            item.add_marker(pytest.mark.database)


@pytest.fixture(scope="session")
def slurm_version() -> str:
    """Return the Slurm version of the tests' clusters, for ``slurm`` of a SandboxSpec."""
    return SLURM


@pytest.fixture(scope="session")
def sandbox(slurm_version: str) -> Iterator[Sandbox]:
    """Bring up a cluster that all tests share: leave its daemons running and its nodes up."""
    with Sandbox.up(SandboxSpec(slurm=slurm_version), report=print) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def booked_sandbox(slurm_version: str) -> Iterator[Sandbox]:
    """Bring up a cluster with slurmdbd that all tests share."""
    with Sandbox.up(SandboxSpec(slurm=slurm_version, accounting=True), report=print) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def submitter(sandbox: Sandbox) -> str:
    """Return one of the cluster's ordinary users."""
    return next(iter(sandbox.users))


@pytest.fixture(scope="session")
def submit(sandbox: Sandbox, submitter: str) -> Submit:
    """Return a function that submits a batch script to the shared cluster; it returns the id."""

    def call(script: str | bytes, *, user: str = submitter, **options: Any) -> int:
        return submit_to(sandbox, script, user=user, **options)

    return call


@pytest.fixture
def fast() -> Iterator[Path]:
    """Return a directory on tmpfs if there is one, for tests that do not depend on the disk."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=base) as where:
        yield Path(where)


@pytest.fixture(scope="session")
def kafka(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """Start a broker that all tests share: use a separate topic and consumer group in each."""
    yield from _shared(pytestconfig, Kafka(tmp_path_factory.mktemp("kafka")))


@pytest.fixture(scope="session")
def postgresql(pytestconfig: pytest.Config) -> Iterator[PostgreSQL]:
    """Start a server that all tests share: make a database for each with `new_database`."""
    yield from _shared(pytestconfig, PostgreSQL())


@pytest.fixture(scope="session")
def majors() -> dict[str, int]:
    """Return the major versions to test, for servers that a test starts."""
    return {"elasticsearch": ELASTICSEARCH, "opensearch": OPENSEARCH}


@pytest.fixture(scope="session")
def elasticsearch(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Elasticsearch]:
    """Start a node that all tests share: use separate names of indices and templates in each."""
    directory = tmp_path_factory.mktemp("elasticsearch")
    yield from _shared(pytestconfig, Elasticsearch(ELASTICSEARCH, directory))


@pytest.fixture(scope="session")
def opensearch(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OpenSearch]:
    """Start a node that all tests share: use separate names of indices and templates in each."""
    yield from _shared(pytestconfig, OpenSearch(OPENSEARCH, tmp_path_factory.mktemp("opensearch")))


@pytest.fixture(scope="session", params=["elasticsearch", "opensearch"])
def search_server(request: pytest.FixtureRequest) -> SearchServer:
    """Run the test on each of the two servers."""
    server: SearchServer = request.getfixturevalue(request.param)
    return server


def _shared(config: pytest.Config, server: Kind) -> Iterator[Kind]:
    started = config.stash.setdefault(_started, [])
    started.append(server)
    with server:
        yield server
    started.remove(server)


@pytest.fixture(autouse=True)
def servers_up(pytestconfig: pytest.Config) -> None:
    """Restart servers that a failed test killed."""
    for server in pytestconfig.stash.get(_started, []):
        if not server.pid:
            server.start()
