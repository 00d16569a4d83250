"""Tables of archived jobs, on terminals and for programs."""

from typing import Any

import pytest

from steward.archive.requests import JobLine, JobListReply
from steward.cli.output import Style, print_table


def job(**said: Any) -> JobLine:
    return JobLine(cluster="c", job="7", job_id=7, verified=True, **said)


def printed(capsys: pytest.CaptureFixture[str], style: Style, *jobs: JobLine) -> str:
    reply = JobListReply(jobs=jobs)
    print_table(reply.layout, reply.jobs, style, reply)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("said", "cell"),
    [
        ({"script_key": "k", "script_bytes": 12}, "12"),
        ({"kind": "batch", "script_hidden": "private"}, "private"),
        ({"kind": "batch", "script_hidden": "erased"}, "erased"),
        ({"kind": "interactive"}, "none: interactive"),
        ({"kind": "batch"}, "none"),
    ],
)
def test_why_no_script_is_shown_is_said(
    capsys: pytest.CaptureFixture[str], said: dict[str, Any], cell: str
) -> None:
    style = Style(has_header=False, columns=("script",))
    assert printed(capsys, style, job(**said)) == f"{cell}\n"


@pytest.mark.parametrize("said", [{"name": "n" * 900}, {"name": "\x1b" * 300}])
def test_a_long_name_does_not_make_the_table_of_all_wide(
    capsys: pytest.CaptureFixture[str], said: dict[str, Any]
) -> None:
    heading, long, short = printed(capsys, Style(), job(**said), job(name="a")).splitlines()
    assert max(map(len, (heading, long, short))) < 120
    assert "..." in long
    assert "..." not in short


def test_a_long_submit_line_does_not_make_it_wide_either(
    capsys: pytest.CaptureFixture[str],
) -> None:
    salloc = job(kind="interactive", submit_line="salloc " + "x" * 900)
    assert len(printed(capsys, Style(has_header=False), salloc)) < 120


def test_programs_get_long_names_whole(capsys: pytest.CaptureFixture[str]) -> None:
    style = Style(parsable=True, has_header=False, columns=("jobname",))
    assert printed(capsys, style, job(name="n" * 900)) == "n" * 900 + "\n"


def test_a_name_just_as_wide_as_its_column_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    style = Style(has_header=False, columns=("jobname",))
    assert printed(capsys, style, job(name="n" * 40)) == "n" * 40 + "\n"
    assert printed(capsys, style, job(name="n" * 41)) == "n" * 37 + "...\n"
