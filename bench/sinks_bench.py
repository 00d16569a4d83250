"""What a server that is away for a whole storm costs, and how fast its sink catches up after it.

    PYTHONPATH=tests:tests/integration python bench/sinks_bench.py [--jobs 100000] [kafka] [...]

For each: the server is down while the jobs come; then it is started, and the
time is taken until everything is in it. Beside that, the same server takes
as many bytes from a program that does nothing but send what it has ready.
"""

import argparse
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec
import spool_daemon

import storm
from bars import Bar, check, finish
from run import fresh_directory
from scale import scaled
from servers.kafka import Kafka
from servers.search import Elasticsearch, OpenSearch, SearchServer
from servers.server import Server
from steward.archive.settings import FilesSinkSettings
from steward.core.config import AnySinkSettings, ArchiveSettings, Settings
from steward.extensions.kafka.settings import KafkaSettings, KafkaSinkSettings
from steward.extensions.search_servers.settings import (
    ElasticsearchSinkSettings,
    OpenSearchSinkSettings,
)
from steward.slurm.environment import split_entries

_OPENSEARCH = Bar(
    "OpenSearch, catch-up: jobs a second", "/s", 2000, "a program that only sends", is_least=True
)
_MEMORY = Bar("OpenSearch, catch-up: peak memory of the sink", "MB", 200)
NAME = "away"
TOPIC = INDEX = "bench"
_PLAIN = scaled(20_000, 500)
"""How many documents the program sends that does nothing else."""
_BULK = 500
_RATE = 2000
_LIFE_S = 5
_PATIENCE_S = 1200.0


def main() -> None:
    """Measure what is asked for, and print a line of each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all")
    parser.add_argument("--jobs", type=int, default=scaled(100_000, 200))
    options = parser.parse_args()
    for kind in options.kinds or list(KINDS)[: scaled(len(KINDS), 2)]:
        with fresh_directory() as where:
            measure(kind, where, options.jobs)
    finish()


def measure(kind: str, where: Path, jobs: int) -> None:
    """One kind of server: down for the storm, then started."""
    make_server, make_sink, send_plainly = KINDS[kind]
    server = make_server(where / "server")
    try:
        server.start()
        if isinstance(server, Kafka):
            server.create_topic(TOPIC, partitions=3)
            server.create_topic("plain", partitions=3)
        plain_s = send_plainly(server) / _PLAIN
        server.kill()
        sinks: dict[str, AnySinkSettings] = {
            "files": FilesSinkSettings(path=str(where / "archive")),
            NAME: make_sink(server),
        }
        settings = spool_daemon.settings_in(
            where, archive=ArchiveSettings(catalog=False, sink=sinks)
        )
        with spool_daemon.Daemon(settings, where) as daemon:
            _storm(daemon, settings, where, jobs)
            down_bytes = _peak_bytes(daemon)
            server.start()
            began = time.monotonic()
            _wait(daemon, lambda: spool_daemon.is_through(settings, NAME))
            took_s = time.monotonic() - began
            up_bytes = _peak_bytes(daemon)
            assert daemon.stop() == 0
    finally:
        server.stop()
    print(f"{kind}: {jobs} jobs while it was down")
    _line("memory of its sink's process at the most, meanwhile", down_bytes / 1e6, "MB")
    _line("  and while it catches up", up_bytes / 1e6, "MB")
    _line("caught up after", took_s, "s")
    _line("  jobs a second", jobs / took_s, "/s")
    _line("  a program that only sends", 1 / plain_s, "/s")
    _line("  ratio to that", took_s / jobs / plain_s, "x")
    if kind == "opensearch":
        # The bar is the server's own limit, where that is less.
        limit = min(_OPENSEARCH.limit, 1 / plain_s)
        check(msgspec.structs.replace(_OPENSEARCH, limit=limit), jobs / took_s, 1 / plain_s)
        check(_MEMORY, max(down_bytes, up_bytes) / 1e6)


def _line(name: str, value: float, unit: str) -> None:
    print(f"  {name:54} {value:10.2f} {unit}", flush=True)


def _storm(daemon: spool_daemon.Daemon, settings: Settings, where: Path, jobs: int) -> None:
    rate = (f"--rate={_RATE}", "--burst=50", f"--live={_LIFE_S}")
    player = spool_daemon.play(str(where / "spool"), range(1, jobs + 1), *rate)
    try:
        if player.wait(_PATIENCE_S):
            raise SystemExit("the storm could not be played")
    finally:
        player.kill()
        player.wait()
    _wait(daemon, lambda: spool_daemon.filed(settings) >= jobs)


def _wait(daemon: spool_daemon.Daemon, ready: Callable[[], bool]) -> None:
    daemon.wait(ready, _PATIENCE_S)


def _peak_bytes(daemon: spool_daemon.Daemon) -> int:
    """The largest resident size that the sink's process has had."""
    for pid in daemon.parts():
        files = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        if any(path.endswith(f"/archive-{NAME}.db") for path in files):
            break
    else:
        raise SystemExit("the sink has no process")
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _search_plainly(server: Server) -> float:
    """Seconds in which a search server takes documents that are ready, with no mapping of ours."""
    assert isinstance(server, SearchServer)
    bodies = [
        b"".join(_action(job) for job in range(first, first + _BULK))
        for first in range(1, _PLAIN, _BULK)
    ]
    began = time.monotonic()
    for body in bodies:
        status, answer = server.request("POST", "/plain/_bulk", body)
        assert status == 200, answer
        assert not answer["errors"], answer
    return time.monotonic() - began


def _action(job_id: int) -> bytes:
    action = {"create": {"_id": str(job_id)}}
    return msgspec.json.encode(action) + b"\n" + _plain_document(job_id) + b"\n"


def _plain_document(job_id: int) -> bytes:
    entries = split_entries(storm.environment_of(job_id))
    text = "\n".join(f"{name.decode()}={(value or b'').decode()}" for name, value in entries)
    script = storm.script_of(job_id).decode()
    return msgspec.json.encode({"job_id": job_id, "script": script, "environment": text})


def _kafka_plainly(server: Server) -> float:
    from confluent_kafka import Producer

    assert isinstance(server, Kafka)
    values = [_plain_document(job_id) for job_id in range(1, _PLAIN + 1)]
    producer = Producer(
        {
            "bootstrap.servers": server.bootstrap,
            "acks": "all",
            "enable.idempotence": True,
            "compression.type": "zstd",
        }
    )
    began = time.monotonic()
    for value in values:
        while True:
            try:
                producer.produce("plain", value, key=uuid.uuid4().bytes)
            except BufferError:
                producer.poll(0.1)
            else:
                break
    assert producer.flush(60.0) == 0
    return time.monotonic() - began


def _search_sink(
    server: Server, kind: type[ElasticsearchSinkSettings] | type[OpenSearchSinkSettings]
) -> AnySinkSettings:
    assert isinstance(server, SearchServer)
    return kind(urls=(server.url,), index=INDEX)


def _kafka_sink(server: Server) -> AnySinkSettings:
    assert isinstance(server, Kafka)
    return KafkaSinkSettings(broker=KafkaSettings(servers=(server.bootstrap,), topic=TOPIC))


KINDS: dict[
    str,
    tuple[Callable[[Path], Server], Callable[[Server], AnySinkSettings], Callable[[Server], float]],
] = {
    "kafka": (Kafka, _kafka_sink, _kafka_plainly),
    "elasticsearch": (
        lambda where: Elasticsearch(9, where),
        lambda server: _search_sink(server, ElasticsearchSinkSettings),
        _search_plainly,
    ),
    "opensearch": (
        lambda where: OpenSearch(3, where),
        lambda server: _search_sink(server, OpenSearchSinkSettings),
        _search_plainly,
    ),
}


if __name__ == "__main__":
    main()
