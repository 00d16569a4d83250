"""Log lines: one a record, whatever is in it."""

import io
import logging
import os
import shlex
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward import logs


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Leave logging as it was found."""
    root = logging.getLogger()
    before, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield
    root.handlers[:], logging.raiseExceptions = before, raises
    root.setLevel(level)


def line_of(message: str, *args: object, **extra: object) -> str:
    stream = io.StringIO()
    logs.set_up("info", "capture.0", stream)
    logging.getLogger("steward.test").warning(message, *args, extra=extra)
    return stream.getvalue()


def test_a_line_has_level_name_message_and_keys() -> None:
    line = line_of("job %d is odd", 7, job=7, path="/a b")
    assert line.endswith(
        ' warning steward.test msg="job 7 is odd" part=capture.0 job=7 path="/a b"\n'
    )


def test_an_error_is_told_on_the_same_line() -> None:
    stream = io.StringIO()
    logs.set_up("info", stream=stream)
    try:
        int("two\nlines")
    except ValueError:
        logging.getLogger("steward.test").exception("failed")
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert 'error="ValueError: invalid literal' in line
    assert "test_logs.py:" in line


def test_a_wrong_call_still_tells_what_it_can() -> None:
    assert "only %d" in line_of("only %d", "text")


def test_levels_below_are_silent() -> None:
    stream = io.StringIO()
    logs.set_up("warning", stream=stream)
    logging.getLogger("steward.test").info("not this")
    assert stream.getvalue() == ""


def test_journald_gets_a_priority_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile("w+") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        logs.set_up("info", stream=file)
        logging.getLogger("steward.test").error("x")
        file.seek(0)
        assert file.read() == "<3>error steward.test msg=x\n"


def test_another_stream_than_journalds_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    assert not line_of("x").startswith("<")


@given(st.text(), st.text() | st.binary() | st.integers())
def test_no_value_breaks_out_of_its_line_or_its_quotes(message: str, value: object) -> None:
    line = line_of("%s", message, value=value)
    body = line.removesuffix("\n")
    assert body.isprintable()
    # POSIX quoting reads what we write: every value stays one word.
    words = shlex.split(body)
    assert len(words) == 6
    assert words[3].startswith("msg=")
    assert words[5].startswith("value=")
