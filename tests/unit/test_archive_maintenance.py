"""Sink states and refill; purged scripts do not come back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import archive
from harness.events import NOVEMBER
from harness.jobs import open_jobs
from harness.sinks import RemoteSite
from harness.site import ADA, BELA
from steward.core.config import ArchiveSettings
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    JOB_IDENTITY,
    JOB_SEEN,
    Event,
)
from steward.core.journal.server import limit_size


@pytest.fixture
def site(tmp_path: Path) -> RemoteSite:
    site = RemoteSite(tmp_path)
    site.open(open_jobs, archive.open_sink)
    archive.sink_of(site).prepare()
    return site


def filed_jobs(site: RemoteSite) -> set[int]:
    """Return the jobs whose script is in the archive of files."""
    names = [Path(path).name for path in archive.files(site) if path.endswith(".sh")]
    return {int(name.split("-")[0]) for name in names}


# ---------------------------------------------------------------- sinks


def test_a_sink_that_is_away_delays_only_itself_and_says_why(site: RemoteSite) -> None:
    site.elsewhere.is_away = True
    for job_id in (1, 2, 3):
        site.job(job_id)
    site.run()
    found = site.sinks()
    there = found["there"]
    assert (there.kind, there.state, there.backlog) == ("kafka", "waiting", 3)
    assert there.error == there.detail == "the other end is away"
    assert there.error_at is not None
    assert there.oldest_s is not None
    assert (found["files"].kind, found["files"].state) == ("files", "running")
    assert (found["files"].backlog, found["files"].oldest_s) == (0, None)
    assert found["files"].rate > 0
    site.elsewhere.is_away = False
    site.run()
    there = site.sinks()["there"]
    assert (there.state, there.backlog, there.lag, there.oldest_s) == ("running", 0, 0, None)
    assert there.error == "the other end is away", "it is told also when it is over"
    assert site.sent_ids() == [1, 2, 3]


def test_scripts_that_wait_for_an_owner_are_still_to_be_archived(site: RemoteSite) -> None:
    site.submit(1)
    site.run()
    found = site.sinks()
    assert (found["files"].backlog, found["there"].backlog) == (1, 1)
    assert found["files"].oldest_s is not None
    assert found["there"].position == 0


def test_what_was_set_aside_is_counted(site: RemoteSite) -> None:
    site.elsewhere.refuses = {2}
    for job_id in (1, 2):
        site.job(job_id)
    site.run()
    there = site.sinks()["there"]
    assert (there.dead_letters, there.backlog) == (1, 0)
    assert there.error == "job 2 is not taken"


def test_sinks_come_and_go(site: RemoteSite) -> None:
    sinks = site.settings.archive.sink
    fresh = msgspec.structs.replace(
        site.settings,
        archive=ArchiveSettings(sink={"there": sinks["there"], "new": sinks["files"]}),
    )
    site.job(1)
    site.run()
    site.context("archive").settings = fresh
    found = site.sinks()
    assert list(found) == ["there", "new", "files"]
    assert {name: (line.kind, line.state) for name, line in found.items()} == {
        "there": ("kafka", "running"),
        "new": ("files", "new"),
        "files": ("", "removed"),
    }
    assert found["new"].backlog == 1, "it begins with the oldest event that is kept"


def test_only_operators_look_at_sinks_and_have_them_filled(site: RemoteSite) -> None:
    with pytest.raises(PermissionRefused):
        site.ask("archive.sinks", ADA)
    with pytest.raises(PermissionRefused):
        site.ask("archive.resend", ADA, sink="there")


# ---------------------------------------------------------------- resend


def test_a_new_sink_is_filled_from_the_archive_of_files(site: RemoteSite) -> None:
    scripts = [site.job(job_id, b"script %d" % job_id) for job_id in (1, 2, 3)]
    site.run("jobs", "archive.files")
    archive.trim(site, "state")
    site.trim()
    answer = site.order()
    sizes = sum(script.body.script.length for script in scripts)
    assert (answer.scripts, answer.total_bytes) == (3, sizes + 3 * len(archive.ENVIRONMENT))
    assert site.sinks()["there"].backlog == 3
    site.run()
    assert sorted(site.sent_ids()) == [1, 2, 3]
    assert {sent.script for sent in site.elsewhere.sent} == {b"script 1", b"script 2", b"script 3"}
    assert set(site.elsewhere.users()) == {"ada"}
    assert site.sinks()["there"].backlog == 0


def test_a_closed_sink_leaves_the_archive_that_it_read(site: RemoteSite) -> None:
    site.job(1)
    site.run("jobs", "archive.files")
    archive.trim(site, "state")
    site.trim()
    site.order()
    site.run()
    assert site.sent_ids() == [1]
    archive.sink_of(site).close()
    site.context("archive").close()

    def list_databases() -> list[str]:
        return [path for path in archive.list_open_files(site.state) if "archive-" in path]

    assert any("archive-files.db" in path for path in list_databases())
    site.sink.close()
    assert list_databases() == []


def test_an_order_says_of_each_script_what_was_said_before(site: RemoteSite) -> None:
    site.job(1)
    unknown = site.submit(2)
    site.run()
    site.order()
    events, _ = site.reader.read(0, {JOB_IDENTITY, ARCHIVE_RESEND}, 10)
    (said,) = [event.body for event in events if event.kind == JOB_IDENTITY]
    (order,) = [event.body for event in events if event.kind == ARCHIVE_RESEND]
    assert (order.sink, order.asked_by) == ("there", "root")
    resent = {one.script_key: one for one in order.scripts}
    assert resent[said.script_key].identity == said
    assert resent[unknown.key].identity is None
    assert resent[unknown.key].script == unknown.body


def test_an_arrays_script_is_sent_once_and_is_its_arrays(site: RemoteSite) -> None:
    script = site.job(10)
    (leader,) = site.reader.read(0, {JOB_SEEN}, 1)[0]
    for task in (1, 2):
        record = msgspec.structs.replace(
            leader.body.record, job_id=10 + task, array_job_id=10, array_task=str(task)
        )
        body = msgspec.structs.replace(leader.body, record=record)
        site.append([msgspec.structs.replace(leader, key=f"seen:{record.job_id}", body=body)])
    site.run()
    assert site.order().scripts == 1
    (order,) = site.reader.read(0, {ARCHIVE_RESEND}, 10)[0]
    (one,) = order.body.scripts
    assert (one.script_key, one.identity.record.job_id) == (script.key, 10)


def test_an_order_is_for_the_jobs_that_are_named(site: RemoteSite) -> None:
    for job_id, who in ((1, ADA), (2, BELA), (3, ADA)):
        site.job(job_id, who=who)
    site.run()
    assert site.order(users=["ada"]).scripts == 2
    assert site.order(jobs=["2", "3"]).scripts == 2
    assert site.order(accounts=["chemistry"]).scripts == 0
    assert site.order(since=NOVEMBER.isoformat()).scripts == 3
    assert site.order(until=NOVEMBER.isoformat()).scripts == 0
    assert site.order(users=["bela"], sink="files").scripts == 1


def test_many_scripts_are_several_orders(site: RemoteSite) -> None:
    site.append([site.submit(job_id, environment=None, append=False) for job_id in range(1, 452)])
    site.run("jobs")
    items = list(site.ask("archive.resend", sink="there"))
    assert [item.done for item in items[:-1]] == [200, 400, 451]
    assert items[-1].scripts == 451
    orders, _ = site.reader.read(451, {ARCHIVE_RESEND}, 10)
    keys = {one.script_key for order in orders for one in order.body.scripts}
    assert (len(orders), len(keys)) == (3, 451)
    assert len({order.key for order in orders}) == 3


def test_what_a_sink_has_can_be_left_out(site: RemoteSite) -> None:
    for job_id in (1, 2):
        site.job(job_id)
    site.run()
    site.job(3)
    site.run("jobs")
    answer = site.order(missing=True)
    assert (answer.scripts, answer.present) == (1, 2)
    answer = site.order(missing=True, sink="files")
    assert (answer.scripts, answer.present) == (1, 2)
    site.run()
    assert site.order(missing=True).scripts == 0


@pytest.mark.parametrize(
    ("sink", "said"),
    [("tape", "use one of files, there"), ("catalog", "steward archive reindex"), ("", "`sink`")],
)
def test_only_a_sink_that_there_is_can_be_filled(site: RemoteSite, sink: str, said: str) -> None:
    site.job(1)
    site.run()
    with pytest.raises(UsageError, match=said):
        site.order(sink=sink)


def test_a_detached_sink_says_what_fills_it_and_is_filled_by_that(site: RemoteSite) -> None:
    site.elsewhere.is_away = True
    for job_id in (1, 2, 3):
        site.job(job_id)
    site.run()
    while limit_size(site.writer, site.stores, max_bytes=1):
        pass
    there = site.sinks()["there"]
    assert (there.state, there.missed) == ("detached", site.reader.head())
    assert there.refill.startswith("steward archive resend --sink there --since 2026-")
    site.elsewhere.is_away = False
    site.sink.close()
    site.reopen()
    site.run()
    since = there.refill.rpartition(" ")[2]
    assert site.order(since=since, users=["bela"]).scripts == 0
    assert site.sinks()["there"].missed, "that was not all that it missed"
    assert site.order(since=since).scripts == 3
    site.run()
    there = site.sinks()["there"]
    assert (there.state, there.missed, there.refill, there.backlog) == ("running", 0, "", 0)
    assert set(site.sent_ids()) == {1, 2, 3}


def test_a_catalog_that_was_made_again_has_missed_nothing(site: RemoteSite) -> None:
    site.job(1)
    site.writer.record_position("catalog", 0, "waiting", "")
    site.run()
    while limit_size(site.writer, site.stores, max_bytes=1):
        pass

    def missed() -> int:
        return sum(one.missed for one in site.reader.list_consumers() if one.name == "catalog")

    assert missed() > 0
    *_, answer = site.ask("archive.reindex")
    assert answer.scripts == 1
    assert missed() == 0


# ---------------------------------------------------------------- purge


@pytest.mark.parametrize("wanted", [{"jobs": ["1"]}, {"users": ["ada"]}])
def test_a_purge_reaches_every_sink_also_one_that_was_away(
    site: RemoteSite, wanted: dict[str, Any]
) -> None:
    site.job(1)
    site.job(2, who=BELA)
    site.run()
    site.elsewhere.is_away = True
    said = site.ask("archive.erase", **wanted)
    assert (said.done, said.sinks) == (False, ("files", "there"))
    site.ask("archive.erase", **wanted, yes=True)
    site.run()
    assert filed_jobs(site) == {2}
    assert site.sent_ids() == [1, 2]
    assert site.sinks()["there"].lag == 1
    site.elsewhere.is_away = False
    site.run()
    assert site.sent_ids() == [1, 2, -1]
    assert site.order().scripts == 1


@pytest.mark.parametrize(
    ("sink", "filed", "sent"), [("files", set(), [1]), ("there", {1}, [1, -1])]
)
def test_a_purge_of_one_sink_leaves_the_others(
    site: RemoteSite, sink: str, filed: set[int], sent: list[int]
) -> None:
    site.job(1)
    site.run()
    done = site.ask("archive.erase", jobs=["1"], sink=sink, yes=True)
    assert done.sinks == (sink,)
    assert [bool(line.script.path) for line in done.scripts] == [sink == "files"]
    site.run()
    assert filed_jobs(site) == filed
    assert site.sent_ids() == sent


def test_a_purge_that_jobs_has_not_heard_of_is_heeded_by_an_order(site: RemoteSite) -> None:
    site.job(1)
    site.job(2)
    site.run()
    site.ask("archive.erase", jobs=["1"], yes=True)
    assert site.order().scripts == 1
    site.run()
    assert site.sent_ids() == [1, 2, -1, 2]


def test_a_purge_in_the_moment_of_an_order_has_the_last_word(site: RemoteSite) -> None:
    script = site.job(1)
    site.run()

    def late(new: Sequence[Event]) -> None:
        if new[0].kind == ARCHIVE_RESEND:
            site.purge(script)
        site.append([*new])

    site.context("archive").order = late
    assert site.order().scripts == 0
    site.run()
    assert site.sent_ids()[-1] == -1
    assert filed_jobs(site) == set()
    events, _ = site.reader.read(0, {ARCHIVE_PURGE}, 10)
    assert [event.body.sink for event in events] == ["", "there"]


def test_no_dead_letter_brings_back_what_was_purged(site: RemoteSite) -> None:
    site.elsewhere.refuses = {1}
    site.job(1)
    site.run()
    site.order()
    site.run()
    kinds = sorted(letter.kind for letter in site.reader.list_dead_letters("archive.there"))
    assert kinds == [ARCHIVE_RESEND, "job.script"]
    site.ask("archive.erase", jobs=["1"], yes=True)
    # The archive of files has not come to it yet: the bytes could still be read.
    site.elsewhere.refuses = set()
    site.run("jobs", "archive.there")
    site.writer.mark_for_retry("archive.there")
    site.run("archive.there")
    assert [sent.script for sent in site.elsewhere.sent if not sent.deleted] == []
    site.run()
    assert site.sent_ids()[-1] == -1


def test_no_late_identity_brings_back_what_was_purged(site: RemoteSite) -> None:
    script = site.job(1)
    site.run()
    site.ask("archive.erase", jobs=["1"], yes=True)
    site.identify(script, "ada", "ended")
    site.run()
    assert site.sent_ids() == [1, -1]
    assert filed_jobs(site) == set()


def test_an_order_after_a_purge_of_one_sink_sends_it_there_again(site: RemoteSite) -> None:
    site.job(1)
    site.run()
    site.ask("archive.erase", jobs=["1"], sink="there", yes=True)
    site.run()
    assert site.order(missing=True).scripts == 1
    site.run()
    assert site.sent_ids() == [1, -1, 1]
