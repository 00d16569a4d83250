"""Job list pages: views and addresses, colours, differences, columns."""

import html
import re
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import pytest
from litestar import Request
from litestar.testing import RequestFactory
from markupsafe import escape

from harness.job_page import answer_of, launch, run_line, run_of, task
from steward.accounting.job_list_requests import JobRow, JobsAnswer
from steward.archive.contents import EncodedContent
from steward.archive.requests import DiffReply, HitLine, JobLine
from steward.core.errors import UsageError
from steward.web.formats import (
    MOST_LETTERS,
    MOST_LINES,
    format_cell,
    highlight_script,
    mark_matches,
    truncate_script,
)
from steward.web.job_list import (
    COLUMNS,
    DEFAULT_COLUMNS,
    MOST_ROWS,
    JobListView,
    make_cost_column,
    split_terms,
)
from steward.web.pages.comparison import render_diff
from steward.web.pages.job import make_exact_pattern, plot_steps

NOW = datetime(2026, 7, 1, 12, tzinfo=UTC)
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e&\"'"


def asked(*pairs: tuple[str, str]) -> Request[Any, Any, Any]:
    given: dict[str, str | list[str]] = {}
    for name, value in pairs:
        given[name] = [*given.get(name, []), value]
    found: Request[Any, Any, Any] = RequestFactory().get("/jobs", query_params=given)
    return found


def view(*pairs: tuple[str, str]) -> JobListView:
    return JobListView.parse(asked(*pairs))


def tagless(text: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", text))


@pytest.mark.parametrize(
    "pairs",
    [
        [],
        [("users", "ada,bob"), ("states", "FAILED"), ("order", "end"), ("arrays", "apart")],
        [("names", "a,b"), ("names", "c*"), ("columns", "exit,name"), ("rows", "150")],
        [("text", "'two words' one"), ("case", "1"), ("words", "1"), ("page", "W10")],
        [("jobs", "1_2,3+1"), ("clusters", "c1"), ("since", "now-1day"), ("until", "now")],
    ],
)
def test_a_view_is_its_address(pairs: list[tuple[str, str]]) -> None:
    first = view(*pairs)
    query = {
        name: value if isinstance(value, tuple) else str(value)
        for name, value in first.query().items()
        if value
    }
    again = [
        (name, one)
        for name, value in query.items()
        for one in (value if isinstance(value, tuple) else (value,))
    ]
    assert view(*again) == first


def test_an_address_says_only_what_is_not_as_usual() -> None:
    assert not any(JobListView().query().values())
    assert urlencode({k: v for k, v in JobListView(states=("FAILED",)).query().items() if v}) == (
        "states=FAILED"
    )
    assert not JobListView(columns=DEFAULT_COLUMNS).query()["columns"]


def test_what_an_address_cannot_say() -> None:
    for wrong in (("order", "x"), ("rows", "-5"), ("rows", "many"), ("users", "u" * 2000)):
        with pytest.raises(UsageError):
            view(wrong)
    assert view(("rows", "99999999")).rows == MOST_ROWS
    assert view(("columns", "exit,nonsense,cost")).columns == ("exit", "cost")


def test_columns_stand_in_their_order_and_of_a_bank_only_with_one() -> None:
    chosen = JobListView(columns=("cost", "exit", "name"))
    keys = [one.name.lower() for one in chosen.choose_columns(several_clusters=True, has_bank=True)]
    assert keys == ["name", "exit", "cost"]
    keys = [
        one.name.lower() for one in chosen.choose_columns(several_clusters=True, has_bank=False)
    ]
    assert keys == ["name", "exit"]
    usual = [
        one.name.lower()
        for one in JobListView().choose_columns(several_clusters=True, has_bank=True)
    ]
    assert usual == ["cluster", *DEFAULT_COLUMNS]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("srun", ("srun",)),
        ("srun  gpu", ("srun", "gpu")),
        ("'srun -n 4' gpu", ("srun -n 4", "gpu")),
        ("it's", ("it's",)),
        ("''", ("''",)),
    ],
)
def test_words_to_look_for(text: str, terms: tuple[str, ...]) -> None:
    assert split_terms(text) == terms


def test_no_cell_lets_markup_through() -> None:
    texts = ("cluster", "name", "user", "account", "partition", "qos", "state", "reason")
    words: dict[str, Any] = dict.fromkeys(texts, HOSTILE)
    row = JobRow(job="1", job_id=1, nodelist=HOSTILE, tres=HOSTILE, **words)
    for column in COLUMNS.values():
        shown = str(escape(format_cell(column, row, JobsAnswer(jobs=(row,), now=NOW))))
        assert "<script" not in shown, column.name
        assert "\x1b" not in shown, column.name


def test_cells_of_what_is_not_known_are_empty() -> None:
    row = JobRow(cluster="c1", job="1", job_id=1, tasks={"FAILED": 2, "PENDING": 1000})
    reply = JobsAnswer(jobs=(row,), now=NOW)
    shown = {key: tagless(str(format_cell(column, row, reply))) for key, column in COLUMNS.items()}
    assert shown["state"].replace("\N{NARROW NO-BREAK SPACE}", " ") == "2 FAILED 1 000 PENDING"
    for key in ("elapsed", "cpu", "peak", "exit", "cost", "limit", "nodes"):
        assert shown[key] == "", key
    ended = JobRow(cluster="c1", job="1", job_id=1, exit_code=0, exit_signal=9)
    assert format_cell(COLUMNS["exit"], ended, reply) == "SIGKILL"
    assert format_cell(make_cost_column({("c1", 1): 1_500_000}, 2), ended, reply) == "1.50"
    when = JobRow(cluster="c1", job="1", job_id=1, submit=datetime(2026, 7, 1, 12, tzinfo=UTC))
    zoned = JobsAnswer(jobs=(when,), now=NOW, zones={"c1": "Europe/Berlin"})
    there = str(format_cell(COLUMNS["submit"], when, zoned))
    assert "2026-07-01 14:00:00" in there


@pytest.mark.parametrize(
    "script",
    [
        "#!/bin/bash\n#SBATCH -n4\necho $HOME # all\n",
        "#!/usr/bin/env python3\nprint('a')\n\n\n",
        "#!/usr/bin/awk -f\nBEGIN { }\n",
        "no shebang\nno newline",
        "\n\n#!/bin/sh\n",
        f"echo {HOSTILE}\ncat <<EOF\n{HOSTILE}\nEOF\n",
        "x = '''\nseveral\nlines'''\n",
        "",
        "\r\nold\rlines\r\n",
    ],
)
def test_colours_change_no_letter(script: str) -> None:
    shown = str(highlight_script(script))
    assert "<script" not in shown
    assert "\x1b" not in shown
    read = tagless(shown)
    for line in script.split("\n"):
        if line.isascii() and line.isprintable():
            assert line in read
    numbers = [int(number) for number in re.findall(r'id="L(\d+)"', shown)]
    assert numbers == list(range(1, len(numbers) + 1))
    # Every line's elements end in it.
    for line in re.split(r"(?=<span class=\"line)", shown):
        assert line.count("<span") == line.count("</span>")


def test_directives_stand_out_and_long_scripts_are_cut() -> None:
    shown = str(highlight_script("#!/bin/bash\n#SBATCH -n4\n#SBATCHED\n"))
    assert shown.count("line directive") == 1
    assert len(tagless(str(highlight_script("x" * 2 * MOST_LETTERS)))) == MOST_LETTERS + 1
    assert str(highlight_script("x\n" * MOST_LETTERS)).count('class="line"') == MOST_LINES
    assert truncate_script("a\r\nb\rc") == "a\r\nb\rc"


def test_what_was_found_is_marked() -> None:
    line = HitLine(number=1, text="a <b> needle & needle", spans=((6, 12), (15, 21)))
    assert mark_matches(line) == "a &lt;b&gt; <mark>needle</mark> &amp; <mark>needle</mark>"
    # What an index of others' making says of places is not to be trusted.
    odd = HitLine(number=1, text="short", spans=((3, 2), (0, 99), (1, 2)))
    assert tagless(str(mark_matches(odd))) == "short"


def test_differences_are_marked_and_escaped() -> None:
    diff = "--- 1\n+++ 2\n@@ -1,2 +1,2 @@\n same <i>\n-old <b>\n+new\x1b\n"
    job = JobLine(cluster="c1", job="1", job_id=1)
    answer = DiffReply(
        left=job, right=job, identical=False, diff=EncodedContent.from_bytes(diff.encode())
    )
    shown = str(render_diff(answer))
    assert "<del>-old &lt;b&gt;</del>" in shown
    assert "<ins>+new\\x1b</ins>" in shown
    assert " same &lt;i&gt;" in shown
    assert "--- 1" not in shown
    assert "full diff" not in shown
    long = DiffReply(
        left=job,
        right=job,
        identical=False,
        diff=EncodedContent.from_bytes((diff + "+x\n" * 100_000).encode()),
    )
    assert "full diff: steward archive diff 1 1" in render_diff(long)


def test_a_name_is_looked_for_as_it_is() -> None:
    assert make_exact_pattern("a*b?[c]") == "a[*]b[?][[]c]"
    assert make_exact_pattern("plain,name") == "plain,name"


def test_tasks_are_plotted_where_there_are_several() -> None:
    several = run_of(run_line(), launch(task(1, cpu_s=2.0), task(0, max_rss_bytes=2**20)))
    page = answer_of(several)
    ((step, plots),) = plot_steps(page.runs[0].steps)
    assert step.line.step == "0"
    cpu, memory = plots
    assert cpu.x == [0.0, 1.0]
    assert cpu.series[0] == ("user", [1.0, 2.0])
    assert memory.series == [("peak", [2.0**20, None])]
    assert plot_steps(answer_of(run_of(run_line(), launch(task(0)))).runs[0].steps) == []
