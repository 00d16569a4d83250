"""Servers killed during a storm: every job is in every sink, with the files sink first.

``STEWARD_KILL_SEED`` repeats the instants of an earlier run; ``STEWARD_STORM_JOBS`` sets the number
of jobs, 20,000 in ``make soak``.
"""

import os
import time
from pathlib import Path
from random import Random

import pytest
from job_submission import PATIENCE
from sink_contents import documents_of, ids_of, messages_of
from spool_daemon import (
    Daemon,
    archived,
    ask,
    assert_kept,
    chance_of,
    filed,
    is_through,
    play,
    settings_in,
)

from servers.kafka import Kafka
from servers.search import Elasticsearch, OpenSearch
from servers.server import Server
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, Settings
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
)

_JOBS = int(os.environ.get("STEWARD_STORM_JOBS", "5000"))
_STORM_S = 20
_PATIENCE = {"socket.timeout.ms": "5000", "message.timeout.ms": "5000"}
_TOPIC = "storm"
_INDEX = "storm"


def sinks_at(
    directory: Path, kafka: Kafka, elasticsearch: Elasticsearch, opensearch: OpenSearch
) -> ArchiveSettings:
    """Return a files sink, and one for each server."""
    return ArchiveSettings(
        catalog=False,
        sink={
            "files": FilesSinkSettings(path=str(directory / "archive")),
            "kafka": KafkaSinkSettings(
                broker=KafkaSettings(servers=(kafka.bootstrap,), topic=_TOPIC, options=_PATIENCE)
            ),
            "elasticsearch": ElasticsearchSinkSettings(urls=(elasticsearch.url,), index=_INDEX),
            "opensearch": OpenSearchSinkSettings(urls=(opensearch.url,), index=_INDEX),
        },
    )


def kill_each(servers: list[Server], chance: Random) -> None:
    """Kill each server at some instant of the first seconds of the storm, in random order."""
    chance.shuffle(servers)
    for server in servers:
        time.sleep(chance.uniform(0.3, 2.0))
        server.kill()


@pytest.mark.timeout(2400)
def test_servers_killed_in_a_storm_lose_no_job_and_delay_no_file(
    fast: Path, kafka: Kafka, elasticsearch: Elasticsearch, opensearch: OpenSearch
) -> None:
    chance = chance_of("STEWARD_KILL_SEED")
    kafka.create_topic(_TOPIC, partitions=3)
    settings = settings_in(fast, archive=sinks_at(fast, kafka, elasticsearch, opensearch))
    servers: list[Server] = [kafka, elasticsearch, opensearch]
    jobs = range(1, _JOBS + 1)
    with Daemon(settings, fast) as daemon:
        generator = play(str(fast / "spool"), jobs, f"--rate={_JOBS // _STORM_S}", "--burst=50")
        try:
            kill_each(servers, chance)
            # The last one stays away until every file is filed: nothing waited for it.
            *back, absent = servers
            for server in back:
                server.start()
            assert generator.wait(PATIENCE * 120) == 0
            daemon.wait(lambda: filed(settings) == _JOBS, 120.0)
            assert not is_through(settings, absent.name.split("-")[0])
            absent.start()
        finally:
            generator.kill()
            generator.wait()
        remote = [name for name in settings.archive.sink if name != "files"]
        daemon.wait(lambda: all(is_through(settings, name) for name in remote), 240.0)
        assert daemon.stop() == 0
    assert_kept(settings, jobs)
    assert len(archived(settings)) == _JOBS
    assert ask(settings, "journal.db", "SELECT consumer, error FROM dead") == []
    wanted = {key_to_id(key) for key in keys(settings)}
    assert len(wanted) == _JOBS
    for server in (elasticsearch, opensearch):
        assert set(documents_of(server, _INDEX)) == wanted, server.name
    arrived = ids_of(messages_of(kafka, _TOPIC))
    assert set(arrived) == wanted
    print(f"{sum(arrived.values()) - len(arrived)} messages came twice, with the same version")


def keys(settings: Settings) -> list[str]:
    """Return the keys of all scripts in the files sink."""
    return [key for (key,) in ask(settings, "archive-files.db", "SELECT key FROM script")]


def key_to_id(key: str) -> str:
    """Return the id of a script of cluster c1 on the servers."""
    return f"c1/{key.removeprefix('script:')}"
