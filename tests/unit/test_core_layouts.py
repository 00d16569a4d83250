"""Columns that are declared once, in every view of a reply."""

import csv
import io
import re
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.documentation import run_example
from steward.cli.output import Style, print_table
from steward.core.actions import Answer
from steward.core.layouts import (
    Column,
    TimeBound,
    choose_columns,
    describe_scope,
    format_for_programs,
    write_csv,
)
from steward.reports.requests import Period, WaitRow, WaitsReply
from steward.web.formats import format_cell, format_scope_html
from steward.web.pages.reports import REPORT_KINDS
from steward.web.renderer import Renderer, download_reply

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
STYLE = Style(has_header=False)


def waits(**fields: Any) -> WaitsReply:
    row = WaitRow(cluster="c1", partition="main", started=2, median_s=60, p90_s=80, longest_s=90)
    period = Period(since=NOON, until=NOON + timedelta(days=1))
    return WaitsReply(periods=(period,), zone="UTC", rows=(row,), **fields)


def test_a_column_that_the_documentation_adds_is_in_every_view(
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = run_example("Add a column to a report")
    reply = example["WaitsWithSpread"](
        **{name: getattr(waits(), name) for name in ("periods", "zone", "rows")}
    )
    print_table(reply.layout, reply.rows, Style(), reply)
    heading, line = capsys.readouterr().out.splitlines()
    assert heading.split()[-1] == "Spread"
    assert line.split()[-1] == "1.3"
    print_table(reply.layout, reply.rows, Style(parsable=True, columns=("spread",)), reply)
    assert capsys.readouterr().out == "Spread\n1.3\n"
    print_table(reply.layout, reply.rows, Style(csv=True), reply)
    for text in (
        capsys.readouterr().out,
        download_reply(reply, reply.rows, "waits", "csv").content,
    ):
        assert next(csv.DictReader(io.StringIO(text)))["Spread"] == "1.3"
    page = Renderer("").render_text(
        "_report_table.html",
        answer=reply,
        rows=reply.rows,
        asked={"since": "", "until": ""},
        kind=REPORT_KINDS["waits"],
        plot=None,
        more=0,
    )
    assert "P90 over median</th>" in page
    assert ">1.3</td>" in page


COLUMNS = (
    Column("Always", "a"),
    Column("Filled", "b", show="filled"),
    Column("Several", "c", show="several"),
    Column("Pages", "a", show="pages"),
    Column("Requested", "a", show="requested"),
    Column("Reply", "a", show=lambda reply: reply is not None),
)


class Row(Answer, frozen=True, kw_only=True):
    a: Any = 1
    b: Any = None
    c: Any = "x"


@pytest.mark.parametrize(
    ("rows", "reply", "on_page", "names"),
    [
        ([Row()], None, False, ["Always"]),
        ([Row()], None, True, ["Always", "Pages"]),
        ([Row(), Row(b=2)], None, False, ["Always", "Filled"]),
        ([Row(), Row(c="y")], Row(), False, ["Always", "Several", "Reply"]),
        ([], None, False, ["Always"]),
    ],
)
def test_when_people_see_a_column(
    rows: list[Row], reply: Row | None, on_page: bool, names: list[str]
) -> None:
    chosen = choose_columns(COLUMNS, rows, reply, on_page=on_page)
    assert [column.name for column in chosen] == names


class Money(Answer, frozen=True, kw_only=True):
    decimals: int = 1
    zone: str = "Europe/Berlin"
    value: Any = None


@pytest.mark.parametrize(
    ("name", "value", "terminal", "programs", "page"),
    [
        ("text", ("a", "b"), "a,b", "a,b", "a, b"),
        ("text", True, "yes", "yes", "yes"),
        ("text", None, "", "", ""),
        ("text", "<b>\x1b", "<b>\\x1b", "<b>\\x1b", "<b>\\x1b"),
        ("prose", "<b>", "<b>", "<b>", "<b>"),
        ("code", "a <b>", "a <b>", "a <b>", "<code>a &lt;b&gt;</code>"),
        ("code", ("a", "<b>"), "a,<b>", "a,<b>", '<pre tabindex="0">a\n&lt;b&gt;</pre>'),
        ("code", (), "", "", ""),
        ("seconds", 320.5, "5m 20s", "320.5", "5m 20s"),
        ("count", 12345, "12345", "12345", "12\N{NARROW NO-BREAK SPACE}345"),
        ("decimal", 1.25, "1.2", "1.2", "1.2"),
        ("bytes", 2048, "2.0K", "2048", "2.0 KiB"),
        ("duration", 90061, "1-01:01:01", "90061", "1-01:01:01"),
        ("duration", 0.1 + 0.2, "00:00:00", "0.3", "00:00:00"),
        ("node_state", "DOWN\x1b", "DOWN\\x1b", "DOWN\\x1b", "DOWN\\x1b"),
        ("hours", 5400, "1.5", "1.500", "1.5"),
        ("percent", 0.1234, "12.3", "12.34", "12\N{NARROW NO-BREAK SPACE}%"),
        ("bar", 0.5, "[############------------]", "", "50\N{NARROW NO-BREAK SPACE}%"),
        ("money", None, "-", "", "\N{EN DASH}"),
        ("money", 1_250_000_001, "1,250.0", "1250.000001", "1,250.0"),
        ("money", "none", "none", "none", "none"),
        ("money", -1, "-0.000001", "-0.000001", '<span class="debt">-0.000001</span>'),
        ("time", NOON, "2026-11-22T13:00:00", "2026-11-22T13:00:00", "2026-11-22 13:00:00"),
        ("time", "set aside", "set aside", "set aside", "set aside"),
        ("state", {"RUNNING": 2}, "2 RUNNING", "2 RUNNING", "state-running"),
    ],
)
def test_how_each_view_shows_a_format(
    name: Any,
    value: Any,
    terminal: str,
    programs: str,
    page: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TZ", raising=False)
    monkeypatch.delenv("SLURM_TIME_FORMAT", raising=False)
    column, reply = Column("Value", "value", name), Money(value=value)
    print_table([column], [reply], STYLE, reply)
    assert capsys.readouterr().out.removesuffix("\n") == terminal
    print_table([column], [reply], Style(parsable=True, has_header=False), reply)
    assert capsys.readouterr().out.removesuffix("\n") == programs
    assert page in str(format_cell(column, reply, reply))


def test_pages_draw_a_low_percentage_and_say_what_is_unknown() -> None:
    column = Column("Used%", "value", "percent", title="Used", absent="not measured", low=0.25)
    meter = '<meter min="0" max="1" low="0.25" value="{}" aria-label="Used">{}</meter> {}'
    for value, drawn, text in ((0.125, "0.125", "12"), (1.5, "1.000", "150")):
        shown = f"{text}\N{NARROW NO-BREAK SPACE}%"
        reply = Money(value=value)
        assert str(format_cell(column, reply, reply)) == meter.format(drawn, shown, shown)
    assert str(format_cell(column, Money(), None)) == '<em class="faint">not measured</em>'


class LinkedRow(Row, frozen=True, kw_only=True):
    cluster: str = "c1"
    user: str = "ada"
    account: str = "physics"
    value: str = "a/b"
    row_class: str = "differs"


AUTH: Any = SimpleNamespace(me=SimpleNamespace(bank=True), is_operator=False)


@pytest.mark.parametrize(
    ("link", "address"),
    [
        ("user", "/users/a%2Fb"),
        ("account", "/accounts/a%2Fb"),
        ("node", "/nodes/c1/a%2Fb?at=x"),
        ("partition", "/jobs?at=x&amp;partitions=a%2Fb"),
        ("nodes", "/cluster/c1?partition=a%2Fb&amp;at=x"),
        ("jobs", "/jobs?accounts=physics&amp;users=ada&amp;at=x"),
        ("rule", ""),
        (lambda row: "user" if row.user == "ada" else "", "/users/a%2Fb"),
    ],
)
def test_cells_link_to_pages(link: Any, address: str) -> None:
    columns = (Column("Key", "value", is_key=True), Column("Value", "value", link=link))
    page = Renderer("").render_text(
        "_cluster_nodes.html",
        AUTH,
        layout=columns,
        listed=[LinkedRow()],
        role=None,
        more=0,
        asked={"at": "x"},
    )
    assert '<tr class="differs"><th scope="row">a/b</th>' in page
    cell = f'<a href="{address}">a/b</a>' if address else "a/b"
    assert f"<td>{cell}</td>" in page


def test_a_time_that_is_only_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    column = Column("Since", "value", "time", exact=lambda row, _: row.value.moment)
    reply = Money(value=TimeBound(NOON))
    print_table([column], [reply], STYLE, reply)
    assert capsys.readouterr().out == "<2026-11-22T13:00:00\n"
    assert str(format_cell(column, reply, reply)).startswith("before <time")
    assert format_for_programs(column, reply, reply) == "2026-11-22T13:00:00+01:00"


@given(st.lists(st.text(), min_size=1))
def test_no_cell_of_a_csv_file_is_a_formula_or_breaks_a_line(cells: list[str]) -> None:
    columns = [Column(f"c{index}", "a") for index in range(len(cells))]
    text = write_csv(columns, [cells], header=False)
    (row,) = csv.reader(io.StringIO(text))
    assert len(row) == len(cells)
    assert not any(cell.startswith(("=", "@", "\t", "\r")) for cell in row)


class _Money(NamedTuple):
    period: tuple[datetime, datetime] | None
    unit: str = "SU"
    zone: str = "UTC"


def test_the_scope_of_rows_is_their_period_and_unit() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    money, text = Column("Amount", "amount", "money"), Column("User", "user")
    hours = Column("CPU", "cpu_s", "hours")

    def describe(reply: object, *columns: Column, hours_unit: str = "hours") -> str:
        return describe_scope(reply, columns, lambda at, _: f"{at:%H:%M}", hours_unit)

    later = noon + timedelta(hours=1)
    assert describe(_Money((noon, later)), money, text) == "From 12:00 to 13:00, in SU"
    assert describe(_Money((noon, noon)), text) == "At 12:00"
    assert describe(_Money(None), money) == "In SU"
    assert describe(_Money(None), hours, hours_unit="minutes") == "In minutes"
    assert describe(None, text) == ""
    page = str(format_scope_html(_Money((noon, noon), "<b>"), (money,)))
    assert re.fullmatch(r"At <time datetime=.*</time>, in &lt;b&gt;", page)
