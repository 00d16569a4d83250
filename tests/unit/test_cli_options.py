"""Shared options of commands: they are collected in one object, and each keeps its meaning."""

import inspect
from typing import Annotated

import click
import pytest

from steward.cli.app import run
from steward.cli.groups import Entry, import_command
from steward.cli.options import CommandCall, with_call, with_options, with_table_call
from steward.cli.parameters import Argument, Option

Name = Annotated[str, Argument(metavar="NAME")]
Size = Annotated[int, Option("--size")]

SAID: list[object] = []


def _thing(context: click.Context, name: Name, size: Size = 3) -> tuple[str, int, bool]:
    source = context.get_parameter_source("size")
    return name, size, source is not None and source.name == "COMMANDLINE"


@with_call
@with_options(_thing)
def made(
    thing: tuple[str, int, bool],
    asked: CommandCall,
    often: Annotated[bool, Option("--often")] = False,
) -> None:
    """Make a thing."""
    SAID.append((thing, asked.style.parsable, asked.place.socket, often))


def called(*words: str) -> object:
    SAID.clear()
    command = import_command(Entry("made", "", "", __name__, "made"))
    command.main(args=list(words), standalone_mode=False)
    (said,) = SAID
    return said


def test_a_command_gets_what_its_options_make() -> None:
    assert called("x") == (("x", 3, False), False, "", False)
    words = ("x", "--size", "3", "-P", "--often", "--socket", "/s")
    assert called(*words) == (("x", 3, True), True, "/s", True)


def test_its_signature_is_one_of_all_with_what_is_needed_first() -> None:
    names = list(inspect.signature(made).parameters)
    assert names[:2] == ["context", "name"]
    assert set(names[2:]) == {
        *("often", "size", "as_json", "parsable", "noheader", "config", "socket"),
    }
    assert made.__doc__ == "Make a thing."

    def listed(asked: CommandCall) -> None:
        """List."""

    plain, with_columns = with_call(listed), with_table_call(listed)
    added = set(inspect.signature(with_columns).parameters) - set(
        inspect.signature(plain).parameters
    )
    assert added == {"columns", "as_csv"}


def test_options_that_exclude_each_other_are_refused() -> None:
    assert run(["bank", "balance", "--json", "-P"]) == 2


def test_a_number_with_more_digits_than_a_float_is_too_large(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["journal", "list", "--after", "9" * 400]) == 2
    assert "is too large: give 9223372036854775807 or less" in capsys.readouterr().err
