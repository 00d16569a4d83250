"""Reader of job logs from any source, and queries of Steward's own."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import NOON
from harness.jobacct import LogSite, run, usage
from harness.site import ADA, ROOT
from steward.accounting.errors import AccountingUsage
from steward.cli.accounting import print_dump, print_purge
from steward.cli.commands import print_reply
from steward.cli.output import Style
from steward.core.access import Caller
from steward.core.config import AccessSettings
from steward.core.errors import PermissionRefused
from steward.core.events import ACCOUNTING_EXPIRE, RUN_START, Event
from steward.core.records import UsageLine
from steward.extensions.jobacct_plugins.actions import PluginInfo, PluginsAnswer
from steward.extensions.jobacct_plugins.log.actions import (
    DumpAnswer,
    DumpChunk,
    PurgeAnswer,
    PurgedDay,
)
from steward.extensions.jobacct_plugins.log.files import JobLogError
from steward.extensions.jobacct_plugins.log.reader import read_lines
from steward.extensions.jobacct_plugins.log.records import encode_log_lines
from steward.extensions.jobacct_plugins.state import HookFailure, PluginState, plugin_state_path


def written(path: Path, *events: Event | bytes) -> str:
    path.write_bytes(
        b"".join(one if isinstance(one, bytes) else encode_log_lines(one) for one in events)
    )
    return str(path)


def read(path: str) -> tuple[list[UsageLine], list[tuple[int, str]]]:
    """Read a log; return its lines, and the skipped line numbers with the reasons."""
    odd: list[tuple[int, str]] = []
    lines = list(read_lines(path, lambda _, number, why: odd.append((number, why))))
    return lines, odd


def good() -> list[Event]:
    return [run(1, RUN_START), usage(1, "0", 2), run(1)]


HOSTILE = [
    b"\n",
    b"{}\n",
    b"[]\n",
    b"null\n",
    b"not json\n",
    b"\xff\xfe\n",
    b'{"record":"JOB_DANCE","cluster":"c1"}\n',
    b"\x00" * 100 + b"\n",
    b"[" * 100_000 + b"\n",
    encode_log_lines(run(1)).replace(b'"job_id":1', b'"job_id":"1"'),
    encode_log_lines(run(1)).replace(b"2026-03-01T12:00:00Z", b"yesterday"),
    encode_log_lines(run(1)).replace(b"Z", b""),
    encode_log_lines(run(1))[:-40],
]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_hostile_line_is_counted_and_harms_no_other(tmp_path: Path, line: bytes) -> None:
    line = line if line.endswith(b"\n") else line + b"\n"
    start, used, end = good()
    lines, odd = read(written(tmp_path / "log.jsonl", start, line, used, line, end))
    assert [(one.job_id, one.step, one.state) for one in lines] == [
        (1, "", "COMPLETED"),
        (1, "0", "COMPLETED"),
    ]
    assert [number for number, _ in odd] == [2, 6]


def test_records_that_are_nothing_together_are_passed_over(tmp_path: Path) -> None:
    mad = usage(2, "0", status=1 << 70)
    lines, odd = read(written(tmp_path / "log.jsonl", *good(), mad, run(2), *good()[2:]))
    assert {one.job_id for one in lines} == {1}
    assert odd


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        for one in good():
            file.write(encode_log_lines(one))
        file.truncate(200 << 20)
    lines, odd = read(str(path))
    assert len(lines) == 2
    assert len(odd) == 1


def test_the_order_of_records_does_not_matter_to_what_they_say(tmp_path: Path) -> None:
    start, used, end = good()
    usual = read(written(tmp_path / "a.jsonl", start, used, end))[0]
    for number, order in enumerate(([end, used, start], [used, end, start], [start, end, used])):
        assert read(written(tmp_path / f"{number}.jsonl", *order))[0] == usual
    assert read(written(tmp_path / "twice.jsonl", start, used, used, end, end, start))[0] == usual


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=400), st.integers(0, 2000), st.sampled_from(["cut", "put", "set"]))
def test_whatever_is_broken_what_is_read_are_lines(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, place: int, how: str
) -> None:
    data = b"".join(map(encode_log_lines, [*good(), run(2), usage(2, "batch", 3)]))
    place %= len(data)
    end = {"cut": place + len(junk), "put": place, "set": place + 1}[how]
    put = b"" if how == "cut" else junk
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    for one in read(written(path, data[:place] + put + data[end:]))[0]:
        assert isinstance(one, UsageLine)


def test_what_is_no_log_is_told(tmp_path: Path) -> None:
    with pytest.raises(JobLogError, match="no such job log"):
        list(read_lines(str(tmp_path / "nowhere")))
    with pytest.raises(JobLogError, match="contains no job log"):
        list(read_lines(str(tmp_path)))
    (tmp_path / "x.jsonl.zst").write_bytes(b"no zstd at all")
    with pytest.raises(JobLogError, match="cannot decompress"):
        list(read_lines(str(tmp_path / "x.jsonl.zst")))


def make_site(directory: Path, *events: Event, **accounting: Any) -> LogSite:
    """Make the Site of a job log with events that came at noon, nine days later."""
    site = LogSite(directory, **accounting)
    site.reopen(access=AccessSettings(operators=("op",)))
    site.write(*events)
    site.now = NOON + timedelta(days=9)
    return site


def dumped(site: LogSite, **request: str) -> tuple[list[dict[str, Any]], DumpAnswer]:
    chunks, answer = site.stream("accounting.dump", zone="UTC", **request)
    assert isinstance(answer, DumpAnswer)
    text = "".join(one.text for one in chunks if isinstance(one, DumpChunk))
    return [json.loads(line) for line in text.splitlines()], answer


def expire(site: LogSite, asker: Caller = ROOT, **request: Any) -> Any:
    return site.ask("accounting.purge", asker, zone="UTC", **request)


def apply_orders(site: LogSite) -> list[Event]:
    """Let the log apply the ordered expiries, at noon; return their events."""
    ordered, _ = site.reader.read(0, frozenset({ACCOUNTING_EXPIRE}), 100)
    site.now = NOON
    site.write()
    return list(ordered)


def test_dump_gives_out_what_happened_within_a_time(tmp_path: Path) -> None:
    site = make_site(tmp_path, *good(), run(2, RUN_START, seconds=86400.0), run(2, seconds=86400.0))
    (site.location / "2026-03-02.late.jsonl").write_bytes(b"garbage\n")
    records, answer = dumped(site)
    assert [one["record"] for one in records] == [
        *("JOB_START", "JOB_STEP", "JOB_TASK", "JOB_TASK", "JOB_TERMINATED"),
        *("JOB_START", "JOB_TERMINATED"),
    ]
    assert (answer.records, answer.skipped) == (7, 1)
    assert "2026-03-02.late.jsonl:1:" in answer.examples[0]
    assert [one["job_id"] for one in dumped(site, since="2026-03-02T00:00")[0]] == [2, 2]
    assert {one["job_id"] for one in dumped(site, until="2026-03-02T00:00")[0]} == {1}


def test_expire_says_what_would_go_and_orders_it(tmp_path: Path) -> None:
    site = make_site(tmp_path, *good(), run(2, seconds=86400.0))
    answer = expire(site, before="2026-03-02T12:00")
    assert [day.day for day in answer.days] == ["2026-03-01"]
    assert not answer.done
    assert apply_orders(site) == []
    site.now = NOON + timedelta(days=9)
    answer = expire(site, Caller(uid=7, user="op"), before="2026-03-02T12:00", yes=True)
    assert answer.done
    ordered = apply_orders(site)
    assert [event.cluster for event in ordered] == ["c1", "far"]
    assert ordered[0].body.asked_by == "op"
    assert [path.name for path in site.location.iterdir()] == ["2026-03-02.jsonl"]


def test_what_the_log_keeps_leaves_jobs_db_alone(tmp_path: Path) -> None:
    site = make_site(tmp_path, *good())
    request: dict[str, Any] = {"before": "2026-03-04T12:00", "keep_log": True, "yes": True}
    assert expire(site, **request).days == ()
    assert apply_orders(site)
    assert [path.name for path in site.location.iterdir()] == ["2026-03-01.jsonl"]
    site.now = NOON + timedelta(days=9)
    for before, why in (("2026-03-09", "are closed after 3 days"), ("now+1day", "in the future")):
        with pytest.raises(AccountingUsage, match=why):
            expire(site, before=before, keep_log=True)
    other = make_site(tmp_path / "other", type="jobacct/none")
    with pytest.raises(AccountingUsage, match="no job log is configured"):
        expire(other, **request)


def test_only_operators_may_ask(tmp_path: Path) -> None:
    site = make_site(tmp_path)
    requests: list[tuple[str, dict[str, str]]] = [
        ("dump", {}),
        ("purge", {"before": "now"}),
        ("plugins", {}),
    ]
    for name, request in requests:
        with pytest.raises(PermissionRefused, match="only operators"):
            site.ask(f"accounting.{name}", ADA, **request)


def test_plugins_are_listed_with_those_that_are_configured(tmp_path: Path) -> None:
    site = make_site(tmp_path, type="jobacct/log,jobacct/gone")
    found = {one.type: one for one in site.ask("accounting.plugins").plugins}
    assert found["jobacct/log"].used
    assert not found["jobacct/none"].used
    assert found["jobacct/gone"].used
    assert found["jobacct/gone"].package == ""
    assert found["jobacct/none"].package.startswith("slurm-steward ")


def test_a_plugin_that_is_refused_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = make_site(tmp_path, type="jobacct/old")
    state = PluginState(plugin_state_path(site.settings.state_dir, "jobacct/old"))
    state.record_refusal("jobacct/old requires version 9 of the plugin API")
    state.database.close()
    answer = site.ask("accounting.plugins")
    (line,) = [one for one in answer.plugins if one.type == "jobacct/old"]
    assert line.reason == "jobacct/old requires version 9 of the plugin API"
    print_reply(answer, Style(parsable=True), "plugins")
    assert "jobacct/old|rejected|" in capsys.readouterr().out


def test_a_plugin_that_fails_says_when_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    failure = HookFailure("job_start", "ValueError", 3, 1704700800, 1704704400, "no such thing")
    plugin = PluginInfo(type="jobacct/mine", used=True, errors=(failure,))
    print_reply(PluginsAnswer(plugins=(plugin,)), Style(), "plugins")
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["Type", "Used", "Package", "Errors", "Failed", "LastError"]
    assert row.split(maxsplit=3) == [
        *("jobacct/mine", "yes", "3"),
        "2024-01-08T09:00:00  job_start: ValueError: no such thing",
    ]


def test_a_dump_of_lines_that_are_no_records_ends_with_exit_code_1_and_names_them(
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    answer = DumpAnswer(records=1, skipped=2, examples=("a.jsonl:1: no JSON",))
    assert print_dump(iter([DumpChunk("{}\n"), answer])) is answer
    assert capsysbinary.readouterr().out == b"{}\n"
    assert answer.exit_code == 1
    assert list(answer.list_warnings()) == [
        "not a record: a.jsonl:1: no JSON",
        "2 lines of the log are not records",
    ]
    assert DumpAnswer(records=1).exit_code == 0


def test_an_expiry_says_what_went_or_would(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    day = PurgedDay(day="2026-02-01", length=2048)
    asked = PurgeAnswer(done=False, before=NOON, jobs=3, days=(day,))
    summary = "3 jobs of jobs.db and 1 day of the job log, 2.0K bytes"
    assert list(asked.list_warnings()) == [f"nothing removed yet: --yes removes {summary}"]
    print_purge(asked)
    assert capsys.readouterr() == ("", "")
    for days, went in (((day,), summary), ((), "3 jobs of jobs.db")):
        done = PurgeAnswer(done=True, before=NOON, jobs=3, days=days)
        print_purge(done)
        line = f"Removed: {went}, from before 2026-03-01T12:00:00.\n"
        assert capsys.readouterr() == (line, "")
        assert list(done.list_warnings()) == []


def test_a_task_of_a_launch_whose_own_words_are_lost_counts(tmp_path: Path) -> None:
    lost = encode_log_lines(usage(1, "0", 2)).splitlines(keepends=True)[1:]
    lines, _ = read(written(tmp_path / "log.jsonl", *lost, run(1)))
    assert [(one.step, one.user_us) for one in lines] == [("", 200_000), ("0", 200_000)]
