"""Consumers of a topic: ``steward archive consume`` with an archive, and a member of a group."""

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from file_tree import files_below
from job_submission import PATIENCE
from kafka_jobs import Topic

from steward.core.config import RedactSettings
from steward.core.consumers import Append
from steward.core.events import JOB_SCRIPT, Event
from steward.core.redaction import Redactor
from steward.core.script_stores import IncomingStore, IncomingStores
from steward.core.waits import Stop
from steward.extensions.kafka.events import MessageConverter
from steward.extensions.kafka.settings import ConsumeSettings
from steward.extensions.kafka.source import CHECK_EVERY_S, KafkaSource

_TIMEOUT_S = PATIENCE * 60


class Consumer:
    """``steward archive consume`` into an archive, and queries of it."""

    def __init__(self, topic: Topic, home: Path) -> None:
        self.topic = topic
        self.group = str(uuid.uuid4())
        self.archive = home / "archive"
        self.place = ("--archive", str(self.archive))
        self.log_path = home / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def _words(self, *more: str) -> list[str]:
        return [
            *(sys.executable, "-m", "steward", "archive", "consume", "--from", "kafka"),
            *("--server", self.topic.kafka.bootstrap, "--topic", self.topic.name),
            *("--group", self.group, "--archive", str(self.archive), *more),
        ]

    def once(self, *more: str, code: int = 0) -> str:
        """Archive the messages in the topic now; return the output."""
        done = subprocess.run(
            self._words("--once", *more), capture_output=True, timeout=_TIMEOUT_S, check=False
        )
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == code, said
        return said

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._words(), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE * 20)
            self._process = None

    def ask(self, *words: str) -> Any:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "steward", "archive", *words),
                *(*self.place, "--json"),
            ],
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout)

    def jobs(self, *words: str) -> dict[tuple[str, int], dict[str, Any]]:
        """Return the jobs that ``archive list`` shows; fail if one is listed twice."""
        lines = self.ask("list", "-S", "2026-01-01", *words)["jobs"]
        found = {(line["cluster"], line["job_id"]): line for line in lines}
        assert len(found) == len(lines)
        return found

    def files(self, suffix: str = "sh") -> dict[int, bytes]:
        """Return the archive's files by job; fail if a job has two."""
        found: dict[int, bytes] = {}
        for path in files_below(self.archive, f"*.{suffix}"):
            if path.relative_to(self.archive).parts[0] not in {".steward", ".incoming"}:
                job_id = int(path.name.split("-")[0])
                assert job_id not in found, path
                found[job_id] = path.read_bytes()
        return found

    def committed(self) -> dict[int, int]:
        """Return the committed offsets of its group, by partition."""
        from confluent_kafka import Consumer as Client
        from confluent_kafka import TopicPartition

        client = Client({"bootstrap.servers": self.topic.kafka.bootstrap, "group.id": self.group})
        try:
            places = [TopicPartition(self.topic.name, number) for number in range(3)]
            found = client.committed(places, timeout=20)
            return {place.partition: max(0, place.offset) for place in found}
        finally:
            client.close()


def make_source(
    topic: Topic,
    group: str,
    directory: Path,
    append: Append,
    *,
    own: str = "",
    check_every_s: float = CHECK_EVERY_S,
    options: Mapping[str, str] | None = None,
) -> KafkaSource:
    """Make a member of a group, with options of librdkafka's."""
    converter = MessageConverter(
        Redactor(RedactSettings()), lambda cluster, key: False, set, with_environments=True
    )
    return KafkaSource(
        "all",
        ConsumeSettings(broker=topic.broker(options={"group.id": group, **(options or {})})),
        {own},
        IncomingStores([IncomingStore("state", str(directory))]),
        converter,
        append,
        check_every_s=check_every_s,
    )


class Source:
    """Member of a group, in a thread, that keeps its events in a list."""

    def __init__(self, topic: Topic, group: str, directory: Path, **more: Any) -> None:
        self.events: list[Event] = []
        self.stop = Stop()
        self.source = make_source(topic, group, directory, self.append, **more)
        self._thread = threading.Thread(
            target=self.source.run, args=(self.stop, lambda: None), daemon=True
        )
        self._thread.start()

    def append(self, events: Sequence[Event]) -> None:
        time.sleep(0.02)
        self.events += events

    def scripts(self) -> list[str]:
        return [event.key for event in self.events if event.kind == JOB_SCRIPT]

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def end(self) -> None:
        self.stop.set()
        self._thread.join(PATIENCE * 30)
        assert not self._thread.is_alive()
