"""The command line: help, usage errors, other errors, and exit codes."""

import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from steward.cli.app import ArchiveGroup, Root, app, run
from steward.cli.groups import Entry, LazyGroup, import_command
from steward.cli.parameters import Number
from steward.daemon.action_index import ACTION_INDEX

GROUPS: list[type[LazyGroup]] = [Root, ArchiveGroup]
ENTRIES = [(group, entry) for group in GROUPS for entry in group.entries]


def exists(entry: Entry) -> bool:
    return importlib.util.find_spec(entry.module) is not None


def commands(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """List every command below a group, with the words that call it."""
    yield words, command
    context = click.Context(command)
    if hasattr(command, "list_commands"):
        for name in command.list_commands(context):
            if name != "demo" or exists(Root.entries[-1]):
                yield from commands(command.get_command(context, name), (*words, name))


def words_id(value: Any) -> str:
    return "-".join(value) if isinstance(value, tuple) else ""


ROOT = list(commands(app))


@pytest.mark.parametrize(("group", "entry"), ENTRIES, ids=lambda value: getattr(value, "name", ""))
def test_the_lazy_help_is_the_commands_own(group: type[LazyGroup], entry: Entry) -> None:
    if not exists(entry):
        pytest.skip(f"{entry.module} is not written yet")
    first_line = (import_command(entry).help or "").partition("\n")[0]
    assert first_line == entry.help or group is Root


@pytest.mark.parametrize("group", LazyGroup.__subclasses__())
def test_a_command_takes_the_help_of_its_action(group: type[LazyGroup]) -> None:
    helps = {about.help for about in ACTION_INDEX.values()}
    for entry in group.entries:
        assert (entry.help in helps) == bool(entry.action), entry
        if entry.action:
            assert (import_command(entry).help or "").partition("\n")[0] == entry.help


@pytest.mark.parametrize(("words", "command"), ROOT, ids=words_id)
def test_every_command_has_help(
    words: tuple[str, ...], command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {' '.join(('steward', *words))}")
    assert run([*words, "-h"]) == 0
    assert all(len(line) <= 100 for line in out.splitlines())


@pytest.mark.parametrize(("words", "command"), ROOT, ids=words_id)
def test_letters_mean_the_same_everywhere(words: tuple[str, ...], command: Any) -> None:
    meaning = {
        "-n": "--noheader",
        "-P": "--parsable2",
        "-u": "--user",
        "-j": "--jobs",
        "-l": "--long",
    }
    for option in command.params:
        for letter, name in meaning.items():
            if letter in option.opts:
                assert name in option.opts, (words, option.opts)


def numbers_asked() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every option and argument that takes a number, with its command."""
    for words, command in ROOT:
        before: list[str] = []
        for one in command.params:
            if one.param_type_name == "option":
                before_it = [*words, one.opts[0]]
            else:
                before_it = [*words, "--", *before]
                before.append("one")
            if isinstance(one.type, Number):
                yield tuple(before_it), one


@pytest.mark.parametrize(("words", "asked"), list(numbers_asked()), ids=words_id)
def test_a_number_that_is_none_is_wrong_use_in_our_words(
    words: tuple[str, ...], asked: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = {"zzz": "is not a whole number", "9" * 5000: "number"}
    if asked.type.kind is float:
        tried = {"zzz": "is not a number"}
    least, most = asked.type.min, asked.type.max
    if least is not None:
        tried[str(least - 1)] = f"is too small: give {least} or more"
    if most is not None:
        tried[str(most + 1)] = f"is too large: give {most} or less"
    for value, what in tried.items():
        assert run([*words, value]) == 2
        told = capsys.readouterr().err
        assert told.count("\n") == 1
        assert len(told) < 300
        assert f"'{value[:60]}" in told
        assert what in told
        assert "--help')" in told


WITH_LOG_LEVEL = [
    words for words, command in ROOT if any("--log-level" in one.opts for one in command.params)
]


@pytest.mark.parametrize("words", WITH_LOG_LEVEL, ids=words_id)
def test_a_log_level_that_does_not_exist_is_wrong_use(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "--log-level", "loud"]) == 2
    assert "'loud' is not one of" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["web", "listen"])
def test_a_log_level_is_taken_in_any_case(name: str) -> None:
    command = import_command(next(entry for entry in Root.entries if entry.name == name))
    parsed = command.make_context(name, ["--log-level", "INFO"])
    assert parsed.params["log_level"] == "info"


def python(*args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, check=False, **options
    )


@pytest.mark.parametrize("words", [["--help"], ["bank", "--help"], ["bank", "rate", "--help"]])
def test_help_imports_nothing_that_it_does_not_need(words: list[str]) -> None:
    code = (
        f"import sys; from steward.cli.app import run; run({words}); "
        "print([name for name in sys.modules "
        "if name in ('rich', 'pysqlite3', 'asyncio', 'msgspec', 'sqlalchemy') "
        "or name.startswith(('steward.daemon.', 'steward.archive', 'steward.slurm')) "
        "and name != 'steward.daemon.action_index'])"
    )
    assert python("-c", code).stdout.endswith("[]\n")


def test_the_daemon_imports_nothing_of_the_command_line() -> None:
    code = (
        "import sys; import steward.daemon.serve, steward.daemon.registry, steward.daemon.socket; "
        "print([name for name in sys.modules if name.split('.')[0] in "
        "('rich', 'click', 'asyncio', 'json') or name.startswith('steward.cli')])"
    )
    assert python("-c", code).stdout == "[]\n"


def test_groups_are_shown_by_their_reader(capsys: pytest.CaptureFixture[str]) -> None:
    run([])
    out = capsys.readouterr().out
    everyone, operators = out.index("For everyone:"), out.index("For operators:")
    administrators = out.index("For administrators:")
    assert everyone < out.index("  archive ") < operators < out.index("  journal ")
    assert administrators < out.index("  serve ")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["archve"], "did you mean 'archive'"),
        (["archive", "lst"], "did you mean 'list'"),
        (["archive", "list", "--colour"], "no such option"),
        (["archive", "show"], "JOB"),
        (["serve", "--config", "/nonexistent.toml"], "no such file"),
        (["archive", "list", "--json", "-P"], "--json"),
        (["archive", "list", "--socket", "/a", "--config", "/b"], "give one of them"),
    ],
)
def test_wrong_use_is_one_line_and_two(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("steward: ")
    assert captured.err.count("\n") == 1
    assert part.lower() in captured.err.lower()


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["archive"]) == 2
    assert "For everyone:" in capsys.readouterr().err


def test_no_daemon_is_one_line_and_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["archive", "list", "--socket", str(tmp_path / "none\x1b")]) == 1
    err = capsys.readouterr().err
    assert err.startswith("steward: no daemon answers")
    assert err.count("\n") == 1
    assert "\x1b" not in err


def test_debug_shows_where_an_error_came_from(tmp_path: Path) -> None:
    words = ["-m", "steward", "--debug", "archive", "list", "--socket", str(tmp_path / "none")]
    done = python(*words)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_an_unexpected_error_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**_options: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(app, "main", broken)
    assert run(["archive"]) == 1
    err = capsys.readouterr().err
    assert "ZeroDivisionError: oops" in err
    assert err.count("\n") == 1


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "main", interrupted)
    assert run(["archive"]) == 130


def test_a_reader_that_has_enough_is_no_error_to_talk_about() -> None:
    code = "from steward.cli.app import run; import sys; sys.exit(run(['archive', '--help']))"
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            stdout=write,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(write)
    assert done.stderr == b""


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("steward 0.")


def test_commands_are_documented_functions() -> None:
    for _, entry in ENTRIES:
        if exists(entry):
            found = getattr(importlib.import_module(entry.module), entry.attribute)
            assert isinstance(found, click.Command) or inspect.getdoc(found), entry


@pytest.mark.parametrize("words", [("retry", "jobs", "9" * 30), ("list", "--after", "9" * 30)])
def test_a_number_that_no_event_has_is_wrong_use(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["journal", *words]) == 2
    assert "9223372036854775807" in capsys.readouterr().err
