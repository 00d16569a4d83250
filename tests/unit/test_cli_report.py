"""``steward report`` and ``steward node``: output and errors."""

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from harness import history
from harness.events import NOON
from harness.events import at as after_noon
from harness.history import GIB
from harness.site import Site
from steward.cli import app
from steward.core.actions import ActionError, decode_request
from steward.daemon.registry import get_action

TIME = ["-S", "2024-01-08T12:00:00", "-E", "2024-01-08T16:00:00"]
HOUR = 3600
THEN = (datetime(2024, 1, 8, 12, tzinfo=UTC) - NOON).total_seconds()
"""Offset of the command line's times, which are in the past of every clock."""


def at(seconds: float) -> datetime:
    return after_noon(THEN + seconds)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (tmp_path / "spool").mkdir()
    config = tmp_path / "steward.toml"
    config.write_text(
        f'state_dir = "{state}"\nrun_dir = "{tmp_path}/none"\n'
        f'[cluster.c1]\nspool = "{tmp_path}/spool"\ntimezone = "UTC"\n'
        "[sensor]\nenabled = true\nhelper = ''\n"
    )
    monkeypatch.setenv("STEWARD_CONFIG", str(config))
    monkeypatch.setenv("TZ", "UTC")
    for name in ("STEWARD_SOCKET", "SLURM_TIME_FORMAT"):
        monkeypatch.delenv(name, raising=False)
    made = history.make_site(tmp_path)
    made.feed(
        history.node(THEN - HOUR, "n1", "IDLE", source="start"),
        history.node(
            THEN + HOUR, "n1", "DOWN", old_state="IDLE", reason="a fan", reason_user="root"
        ),
        history.node(THEN - HOUR, "n2", "IDLE", source="start", cpus=16),
    )
    history.add_run(
        made, 1, THEN, THEN + 2 * HOUR, cpus=4, user="=cmd|x", user_us=HOUR * 1_000_000, name="fit"
    )
    other = {"nodelist": "n2", "tres_allocated": "cpu=1,mem=1G", "peak_bytes": GIB}
    history.add_run(made, 2, THEN, THEN + 30, eligible=THEN - 90, **other)
    yield made
    made.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_why_a_report_has_no_rows_is_said_to_people(
    terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steward.cli.output.is_terminal", lambda: terminal)
    assert app.run(["report", "users", *TIME, "-A", "nobody"]) == 0
    assert "No jobs in this period." in capsys.readouterr().err
    assert app.run(["report", "users", "-A", "nobody"]) == 0
    assert (
        "The default period is yesterday; choose another with --starttime."
        in capsys.readouterr().err
    )


def said(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert app.run(list(words)) == 0
    return capsys.readouterr().out.splitlines()


def test_a_table_for_people_in_hours(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "report", "users", *TIME)
    assert [line.split() for line in lines] == [
        ["User", "Accounts", "Jobs", "CPU", "Completed", "Failed"],
        ["=cmd|x", "physics", "1", "8.0", "1", "0"],
        ["ada", "physics", "1", "0.0", "1", "0"],
    ]


def test_a_spreadsheet_computes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(said(capsys, "report", "users", *TIME, "--csv", "-t", "seconds"))
    first, _ = csv.DictReader(io.StringIO(text))
    assert (first["User"], first["CPU"], first["Cluster"]) == ("'=cmd|x", str(8 * HOUR), "c1")


def test_each_day_for_itself(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["report", "cluster", "-S", "2024-01-08", "-E", "2024-01-10", "--by", "day"]
    lines = said(capsys, *words, "-P", "-o", "period,start,reported", "-t", "min")
    assert lines == [
        "Period|Start|Reported",
        f"2024-01-08|2024-01-08T00:00:00|{13 * 60 * 20:.3f}",
        f"2024-01-09|2024-01-09T00:00:00|{24 * 60 * 20:.3f}",
    ]


@pytest.mark.parametrize(
    "name", ["cluster", "accounts", "users", "partitions", "waits", "jobs", "waste"]
)
def test_json_is_the_answer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = said(capsys, "report", name, *TIME, "--json")
    answer = json.loads(line)
    assert answer["version"] == 1
    assert answer["rows"]
    assert [one["since"] for one in answer["periods"]] == ["2024-01-08T12:00:00Z"]
    assert len(said(capsys, "report", name, *TIME, "-n", "-P")) == len(answer["rows"])


def test_waits_and_waste(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "report", "waits", *TIME, "-n", "-o", "partition,started,longestwait")
    assert [line.split() for line in lines] == [["main", "2", "00:01:30"]]
    waste = said(capsys, "report", "waste", *TIME, "-n", "-L", "1", "-o", "user,used%,memory%")
    assert [line.split() for line in waste] == [["=cmd|x", "12.5"]]
    sizes = said(capsys, "report", "waits", *TIME, "-n", "--group", "size", "-o", "cpus")
    assert [line.strip() for line in sizes] == ["0-1", "2-7"]


@pytest.mark.parametrize(
    "words",
    [
        ["users", "--by", "year"],
        ["users", "-t", "days"],
        ["users", "--csv", "--json"],
        ["waits", "--group", "colour"],
        ["users", "-S", "whenever"],
        ["users", "-M", "nowhere"],
        ["users", "-o", "nothing"],
        ["users", "-S", "2024-01-08", "-E", "2024-01-07"],
    ],
)
def test_wrong_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["report", *words]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_nodes_then_and_now(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "node", "-P", "-o", "node,state,since,reason,cpus")
    assert lines == [
        "Node|State|Since|Reason|CPUs",
        f"n1|DOWN|{at(HOUR):%Y-%m-%dT%H:%M:%S}|a fan|4",
        f"n2|IDLE|{at(-HOUR):%Y-%m-%dT%H:%M:%S}||16",
    ]
    assert said(capsys, "node", "n1", "--at", "2024-01-08T12:30", "-n", "-o", "state,reason") == [
        "IDLE"
    ]
    assert said(capsys, "node", "--state", "down", "-n", "-o", "node") == ["n1"]


def test_what_ran_on_a_node_and_what_happened_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("node", "n1", "--jobs", "--at", "2024-01-08T13:00", "-n", "-o", "jobid,name")
    jobs = said(capsys, *words)
    assert [line.split() for line in jobs] == [["1", "fit"]]
    events = said(capsys, "node", "n1", "--events", "-n", "-P", "-o", "node,event,reason")
    assert events[-1].startswith("n1|IDLE -> DOWN|a fan")
    assert len(events) == 2
    assert json.loads(said(capsys, "node", "n1", "--jobs", "--json")[0])["jobs"] == []


def test_runs_of_a_node_past_the_limit_are_told_of(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in range(1000):
        history.add_run(site, 10 + job, THEN, THEN + 2 * HOUR, nodelist="n1")
    words = ["node", "n1", "--jobs", "--at", "2024-01-08T13:00", "-n", "-o", "jobid"]
    assert app.run(words) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1000
    assert "only the 1000 runs that started last are shown, of 1001" in shown.err


def test_nodes_and_events_for_spreadsheets(capsys: pytest.CaptureFixture[str]) -> None:
    nodes = list(csv.DictReader(said(capsys, "node", "n2", "--csv")))
    assert [(row["Cluster"], row["Node"], row["CPUs"]) for row in nodes] == [("c1", "n2", "16")]
    words = ("events", "list", "--history", "-w", "n1", "--csv")
    events = list(csv.DictReader(said(capsys, *words)))
    assert [(row["Kind"], row["Subject"], row["Event"]) for row in events] == [
        ("node.state", "n1", "IDLE"),
        ("node.state", "n1", "IDLE -> DOWN"),
    ]
    happened = list(csv.DictReader(said(capsys, "node", "n1", "--events", "--csv")))
    assert [(row["Node"], row["Event"]) for row in happened] == [
        ("n1", "IDLE"),
        ("n1", "IDLE -> DOWN"),
    ]


@pytest.mark.parametrize("limit", ["0", "10001"])
def test_a_list_has_a_number_of_events_that_one_answer_holds(
    limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["events", "list", "--history", "-L", limit]) == 2
    assert "'--limit'" in capsys.readouterr().err
    for name in ("events.list", "history.events"):
        with pytest.raises(ActionError, match="limit"):
            decode_request(get_action(name), {"limit": int(limit)})


def test_events_that_the_journal_has_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("events", "list", "--history", "-w", "n1", "--since", "2024-01-08T11:30", "-n", "-P")
    assert said(capsys, *words, "-o", "subject,event") == ["n1|IDLE -> DOWN"]
    document = json.loads(said(capsys, *words[:3], "--json", "-L", "1")[0])
    assert (len(document["events"]), bool(document["older"])) == (1, True)
