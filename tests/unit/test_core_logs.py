"""Log lines: one for each record, with any content."""

import functools
import io
import json
import logging
import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.forks import fork_child
from steward.core import logs


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restore logging after the test."""
    root = logging.getLogger()
    before, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield
    root.handlers[:], logging.raiseExceptions = before, raises
    root.setLevel(level)


def line_of(message: str, *args: object, **extra: object) -> str:
    stream = io.StringIO()
    logs.configure_logging("info", "capture.0", stream)
    logging.getLogger("steward.test").warning(message, *args, extra=extra)
    return stream.getvalue()


def test_a_line_has_level_name_message_and_keys() -> None:
    line = line_of("job %d is odd", 7, job=7, path="/a b")
    assert line.endswith(
        ' warning steward.test msg="job 7 is odd" worker=capture.0 job=7 path="/a b"\n'
    )


def test_an_error_is_told_on_the_same_line() -> None:
    stream = io.StringIO()
    logs.configure_logging("info", stream=stream)
    try:
        int("two\nlines")
    except ValueError:
        logging.getLogger("steward.test").exception("failed")
    line = stream.getvalue()
    assert line.count("\n") == 1
    assert 'error="ValueError: invalid literal' in line
    assert "test_core_logs.py:" in line


def test_a_wrong_call_still_tells_what_it_can() -> None:
    assert "only %d" in line_of("only %d", "text")


def test_levels_below_are_silent() -> None:
    stream = io.StringIO()
    logs.configure_logging("warning", stream=stream)
    logging.getLogger("steward.test").info("not this")
    assert stream.getvalue() == ""


def test_journald_gets_a_priority_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryFile("w+") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        logs.configure_logging("info", stream=file)
        logging.getLogger("steward.test").error("x")
        file.seek(0)
        assert file.read() == "<3>error steward.test msg=x\n"


def test_another_stream_than_journalds_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    assert not line_of("x").startswith("<")


def test_a_renamed_file_is_written_to_no_more(tmp_path: Path) -> None:
    path = tmp_path / "steward.log"
    logs.configure_logging("info", path=str(path))
    log = logging.getLogger("steward.test")
    log.info("one")
    path.rename(tmp_path / "steward.log.1")
    log.info("two")
    log.info("three")
    path.unlink()
    log.info("four")
    assert "msg=one" in (tmp_path / "steward.log.1").read_text()
    assert path.read_text().count("\n") == 1
    assert "msg=four" in path.read_text()
    assert path.stat().st_mode & 0o007 == 0
    logs.configure_logging("info", stream=io.StringIO())


def test_processes_do_not_mix_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "steward.log"
    logs.configure_logging("info", path=str(path))

    def write(number: int) -> None:
        logs.set_log_worker(f"archive.{number}")
        for _ in range(200):
            logging.getLogger("steward.test").info("x" * 3000)

    children = [fork_child(functools.partial(write, number)) for number in range(4)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    logs.configure_logging("info", stream=io.StringIO())
    lines = path.read_text().splitlines()
    assert len(lines) == 800
    for line in lines:
        assert re.fullmatch(r"\S+Z info steward.test msg=x{3000} worker=archive\.\d", line)


def test_a_file_that_cannot_be_written_is_told() -> None:
    with pytest.raises(logs.LogUnavailable, match="cannot log to /proc/nowhere"):
        logs.configure_logging("info", path="/proc/nowhere")


def test_json_holds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    logs.configure_logging("info", "gate", stream, line_format="json")
    try:
        int("x")
    except ValueError:
        logging.getLogger("steward.test").exception(
            "failed %d", 7, extra={"job": 7, "level": "mine", "bad key": 1.5}
        )
    line = stream.getvalue()
    assert line.count("\n") == 1
    said = json.loads(line)
    assert (said["level"], said["logger"], said["message"]) == ("error", "steward.test", "failed 7")
    assert (said["worker"], said["job"], said["bad_key"]) == ("gate", 7, 1.5)
    assert said["error"].startswith("ValueError: invalid literal")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"])
    with tempfile.TemporaryFile("w+") as file:
        status = os.fstat(file.fileno())
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        logs.configure_logging("info", stream=file, line_format="json")
        logging.getLogger("steward.test").error("x")
        file.seek(0)
        line = file.read()
    assert line.startswith("<3>{")
    assert json.loads(line[3:])["message"] == "x"


@given(st.text(), st.text() | st.binary() | st.floats() | st.none())
def test_no_value_breaks_out_of_json(message: str, value: object) -> None:
    stream = io.StringIO()
    logs.configure_logging("info", "capture.0", stream, line_format="json")
    logging.getLogger("steward.test").warning("%s", message, extra={"value": value})
    line = stream.getvalue()
    assert line.removesuffix("\n").isprintable()
    assert set(json.loads(line)) == {"time", "level", "logger", "message", "worker", "value"}


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
