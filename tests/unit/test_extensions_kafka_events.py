"""Events from Kafka messages: the same for repeated messages, and none invented."""

import hashlib
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.events import NOON
from harness.spool import environment_bytes
from steward.archive.remote.destination import ArchivedDocument
from steward.capture.script_lookup import CapturedScripts
from steward.core.config import RedactSettings, Settings
from steward.core.events import (
    ARCHIVE_PURGE,
    JOB_END,
    JOB_IDENTITY,
    JOB_SCRIPT,
    JOB_SEEN,
    ArchivePurge,
    Event,
    IncomingFile,
    JobIdentity,
    JobScript,
    encode_event,
    make_script_key,
)
from steward.core.journal import Journal, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED, Redactor
from steward.core.script_stores import IncomingStore, IncomingStores, StoreUnavailable
from steward.extensions.kafka.events import MessageConverter, RecentPurges
from steward.extensions.kafka.messages import ScriptMessage, decode_script_message
from steward.extensions.kafka.messages import encode_script_message as encode_message
from steward.jobs import JobsConsumer

MTIME_NS = 1_772_366_400_123_456_789
VERSION = MTIME_NS // 1000
KEY = make_script_key(7, MTIME_NS)


class TopicTaking:
    """Kafka source with a store and the keys that the journal knows."""

    def __init__(self, directory: Path) -> None:
        self.known: set[tuple[str, str]] = set()
        self.purged: set[tuple[str, str]] = set()
        self.store = IncomingStore("state", str(directory / "incoming"))

    def take(self, message: ScriptMessage, *, environments: bool = True) -> list[Event]:
        (events,) = self.take_all(message, environments=environments)
        return events

    def take_all(self, *messages: ScriptMessage, environments: bool = True) -> list[list[Event]]:
        taking = MessageConverter(
            Redactor(RedactSettings()),
            lambda *key: key in self.known,
            lambda: self.purged,
            with_environments=environments,
        )
        return taking.convert_messages(messages, lambda: self.store)

    def files(self) -> dict[str, bytes]:
        return {
            path.name.rpartition(".")[2]: path.read_bytes()
            for path in Path(self.store.directory).iterdir()
        }


@pytest.fixture
def site(tmp_path: Path) -> TopicTaking:
    return TopicTaking(tmp_path)


def message(
    script: bytes | None = b"#!/bin/sh\n",
    environment: bytes | None = None,
    why: str = "bound",
    version: int = 5,
    changes: dict[str, Any] | None = None,
    **record: Any,
) -> ScriptMessage:
    def kept(data: bytes | None) -> IncomingFile | None:
        if data is None:
            return None
        return IncomingFile(path="p", length=len(data), sha256=hashlib.sha256(data).hexdigest())

    fields: dict[str, Any] = {"uid": 1000, "user": "ada", "submit": NOON, **record}
    document = ArchivedDocument(
        cluster="hpc1",
        key=KEY,
        version=version,
        body=JobScript(
            job_id=7, spool_mtime_ns=MTIME_NS, script=kept(script), environment=kept(environment)
        ),
        identity=JobIdentity(
            script_key=KEY,
            job_id=7,
            first_submit=NOON,
            record=JobRecord(job_id=7, **fields),
            why=why,
        ),
        script=script,
        environment=environment,
    )
    return decode_script_message(
        encode_message(msgspec.structs.replace(document, **(changes or {})))
    )


def test_a_script_and_whose_it_is(site: TopicTaking) -> None:
    environment = environment_bytes(b"A=1", b"RAW=\xff")
    script, facts = site.take(message(b"\xff#!", environment))
    assert (script.kind, script.cluster, script.key) == (JOB_SCRIPT, "hpc1", KEY)
    assert script.source == facts.source == "kafka"
    assert script.body.store == "state"
    assert site.files() == {"script": b"\xff#!", "env": environment}
    assert facts.kind == JOB_SEEN
    assert (facts.body.record.uid, facts.body.record.user) == (1000, "ada")


def test_the_same_message_gives_the_same_events(site: TopicTaking) -> None:
    first, again = (site.take(message(state="RUNNING")) for _ in range(2))
    assert [event.key for event in first] == [event.key for event in again]
    assert [encode_event(event) for event in first][1:] == [encode_event(event) for event in again][
        1:
    ]
    assert len(list(Path(site.store.directory).iterdir())) == 1


def test_other_versions_are_other_facts_in_their_order(site: TopicTaking) -> None:
    _, first = site.take(message(version=10, state="PENDING"))
    _, second = site.take(message(version=11, state="PENDING"))
    assert first.key != second.key
    assert first.seen_at < second.seen_at


def test_bytes_of_what_is_known_do_not_come_back(site: TopicTaking) -> None:
    site.known.add(("hpc1", KEY))
    (facts,) = site.take(message())
    assert facts.kind == JOB_SEEN
    assert not Path(site.store.directory).exists()


@pytest.mark.parametrize(
    ("why", "state", "kind"),
    [
        ("bound", "RUNNING", JOB_SEEN),
        ("bound", "FAILED", JOB_END),
        ("ended", "UNKNOWN", JOB_END),
        ("updated", "PENDING", JOB_SEEN),
    ],
)
def test_what_is_over_is_said_to_be(site: TopicTaking, why: str, state: str, kind: str) -> None:
    assert site.take(message(why=why, state=state))[-1].kind == kind


def test_a_requeued_jobs_first_run_is_told_too(site: TopicTaking) -> None:
    later = NOON + timedelta(days=1)
    _, first, last = site.take(message(restarts=2, submit=later, state="RUNNING", start=later))
    assert (first.body.record.restarts, first.body.record.submit) == (0, NOON)
    assert (first.body.record.state, first.body.record.start) == ("", None)
    assert (last.body.record.restarts, last.body.record.submit) == (2, later)


def test_a_record_without_submit_time_has_the_jobs(site: TopicTaking) -> None:
    assert site.take(message(submit=None))[-1].body.record.submit == NOON


def test_secrets_that_were_left_in_are_taken_out(site: TopicTaking) -> None:
    environment = environment_bytes(b"API_TOKEN=hunter2", b"A=1")
    line = "sbatch --export=API_TOKEN=hunter2 x"
    script, facts = site.take(message(b"x", environment, submit_line=line))
    assert site.files()["env"] == environment_bytes(b"API_TOKEN=" + REDACTED, b"A=1")
    assert script.body.redacted == ("API_TOKEN",)
    assert "hunter2" not in facts.body.record.submit_line


def test_what_was_taken_out_before_stays_as_it_is(site: TopicTaking) -> None:
    environment = environment_bytes(b"API_TOKEN=" + REDACTED, b"ghp_" + b"a" * 3, REDACTED)
    site.take(message(b"x", environment))
    assert site.files()["env"] == environment


def test_environments_are_not_kept_where_the_site_keeps_none(site: TopicTaking) -> None:
    script, _ = site.take(message(b"x", environment_bytes(b"A=1")), environments=False)
    assert script.body.environment is None
    assert site.files() == {"script": b"x"}


def test_a_purge_is_one_of_that_script_alone(site: TopicTaking) -> None:
    (event,) = site.take(message(changes={"deleted": True}))
    assert (event.kind, event.cluster, event.body.script_keys) == (ARCHIVE_PURGE, "hpc1", (KEY,))
    assert event.body.sink == ""
    assert event.key == site.take(message(changes={"deleted": True}))[0].key


PURGE: dict[str, Any] = {"changes": {"deleted": True}}


@pytest.mark.parametrize("is_first", [True, False])
def test_a_script_whose_purge_is_in_the_same_batch_is_not_taken(
    site: TopicTaking, is_first: bool
) -> None:
    batch = [message(version=9, **PURGE), message(version=5)]
    events = chain(*site.take_all(*(batch if is_first else batch[::-1])))
    assert sorted(event.kind for event in events) == [ARCHIVE_PURGE, JOB_SEEN]
    assert not Path(site.store.directory).exists()


def test_a_script_whose_purge_came_before_is_not_taken_in_any_version(site: TopicTaking) -> None:
    site.purged.add(("hpc1", KEY))
    assert [event.kind for event in site.take(message(version=99))] == [JOB_SEEN]
    assert not Path(site.store.directory).exists()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_of_several_versions_in_a_batch_the_highest_ones_bytes_are_kept(
    site: TopicTaking, order: tuple[int, ...]
) -> None:
    versions = [
        message(b"#!/bin/sh\nAAAA\n", environment_bytes(b"A=1"), version=5),
        message(b"#!/bin/sh\nBBBB\n", environment_bytes(b"A=2"), version=6),
        message(version=7, changes={"body": None, "script": None, "partial": True}),
    ]
    events = [*chain(*site.take_all(*(versions[number] for number in order)))]
    (script,) = (event for event in events if event.kind == JOB_SCRIPT)
    assert site.files() == {"script": b"#!/bin/sh\nBBBB\n", "env": environment_bytes(b"A=2")}
    assert script.body.script.sha256 == hashlib.sha256(b"#!/bin/sh\nBBBB\n").hexdigest()
    assert sum(event.kind == JOB_SEEN for event in events) == 3


def test_a_message_that_comes_twice_in_a_batch_is_kept_once(site: TopicTaking) -> None:
    first, again = site.take_all(message(), message())
    assert [event.kind for event in first] == [JOB_SCRIPT, JOB_SEEN]
    assert [event.key for event in again] == [first[1].key]


def test_what_a_purge_leaves_is_known_before_jobs_db_has_it(tmp_path: Path) -> None:
    state = str(tmp_path)
    journal = Journal(state)
    lately = RecentPurges(state, JournalReader(state))
    assert not lately.read_purges()
    purge = TopicTaking(tmp_path).take(message(**PURGE))
    journal.append(encode_rows(purge))
    assert ("hpc1", KEY) in lately.read_purges()
    assert ("hpc1", KEY) in RecentPurges(state, JournalReader(state)).read_purges()
    of_one_sink = ArchivePurge(script_keys=(make_script_key(8, 1),), sink="files")
    journal.append(encode_rows([msgspec.structs.replace(purge[0], key="k", body=of_one_sink)]))
    assert ("hpc1", make_script_key(8, 1)) not in lately.read_purges()
    jobs = JobsConsumer(Settings(state_dir=state))
    jobs.apply(purge, journal.head(), lambda _: None)
    assert not RecentPurges(state, JournalReader(state)).read_purges()
    known = CapturedScripts(state, JournalReader(state))
    assert known.was_captured("hpc1", KEY)
    known.close()
    jobs.close()
    journal.close()


def test_a_correction_without_bytes_is_facts_alone(site: TopicTaking) -> None:
    (facts,) = site.take(
        message(changes={"body": None, "script": None, "partial": True}, state="RUNNING")
    )
    assert facts.kind == JOB_SEEN


def test_the_first_store_that_can_be_written_is_used(tmp_path: Path) -> None:
    away = IncomingStore(
        "archive.a", str(tmp_path / "gone" / ".incoming"), str(tmp_path / "gone" / "mark")
    )
    here = IncomingStore("state", str(tmp_path / "incoming"))
    assert IncomingStores([away, here]).find_usable() is here
    with pytest.raises(StoreUnavailable, match="gone"):
        IncomingStores([away]).find_usable()


def test_a_script_that_was_written_late_is_still_its_jobs(
    site: TopicTaking, tmp_path: Path
) -> None:
    (tmp_path / "state").mkdir()
    jobs = JobsConsumer(Settings(state_dir=str(tmp_path / "state")))
    submit = NOON - timedelta(minutes=10)
    taken = site.take(message(submit=submit, state="RUNNING", version=VERSION))
    later = site.take(message(submit=submit, state="COMPLETED", end=NOON, version=VERSION + 1))
    said: list[Event] = []
    for position, events in enumerate((taken, later), start=1):
        jobs.apply(events, position, said.extend)
    jobs.close()
    identities = [event.body for event in said if event.kind == JOB_IDENTITY]
    assert [identity.why for identity in identities] == ["bound", "ended"]
    assert said[0].body.script_key == KEY
    assert said[0].body.first_submit == submit
