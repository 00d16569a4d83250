"""What commands have in common: how they print, whom they ask, and other options of several.

A command gets such options as one thing, made by a function that alone writes them down.
"""

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

import msgspec

from steward.cli import options
from steward.cli.output import Style
from steward.client.asking import action, call
from steward.client.place import Place

P = ParamSpec("P")
T = TypeVar("T")
Command = Callable[P, None]


class Asked(msgspec.Struct, frozen=True):
    """What the command line said of printing and asking.

    Attributes:
        style: How to print.
        place: Whom to ask.
    """

    style: Style
    place: Place

    def call(self, name: str, request: Any) -> Any:
        """The answer of an action.

        Args:
            name: The action's: ``bank.balance``.
            request: What it is asked.

        Raises:
            StewardError: It was refused, or nobody answers.
        """
        return call(self.place, action(name), request)


def _with_columns(
    columns: options.Format = "",
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> Asked:
    return Asked(
        options.style(as_json, parsable, noheader, columns), Place(config=config, socket=socket)
    )


def _plain(
    as_json: options.Json = False,
    parsable: options.Parsable = False,
    noheader: options.NoHeader = False,
    config: options.Config = "",
    socket: options.Socket = "",
) -> Asked:
    return _with_columns("", as_json, parsable, noheader, config, socket)


def _without_table(
    as_json: options.Json = False, config: options.Config = "", socket: options.Socket = ""
) -> Asked:
    return _with_columns("", as_json, config=config, socket=socket)


def _has_default(one: inspect.Parameter) -> bool:
    return one.default is not inspect.Parameter.empty


def taking(common: Callable[..., T]) -> Callable[[Callable[Concatenate[T, P], None]], Command[P]]:
    """Give a command the options of a function, and what that makes of them as first argument.

    Args:
        common: Its parameters are options and arguments as Typer knows them.
    """

    def given(command: Callable[Concatenate[T, P], None]) -> Command[P]:
        shared = inspect.signature(common).parameters
        own = list(inspect.signature(command).parameters.values())[1:]
        hints = get_type_hints(command, include_extras=True)
        hints |= get_type_hints(common, include_extras=True)

        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            said: dict[str, Any] = dict(kwargs)
            made = common(**{name: said.pop(name) for name in shared})
            command(made, *args, **said)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__module__ = command.__module__
        # Typer reads a command's options off its signature and its annotations.
        every = sorted([*own, *shared.values()], key=_has_default)
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined] # inspect's own
        run.__annotations__ = {one.name: hints[one.name] for one in every}
        return run

    return given


asking = taking(_plain)
"""Gives a command the options of printing and asking, as its first argument."""

asking_columns = taking(_with_columns)
"""The same, of a command whose table's columns may be chosen."""

asking_json = taking(_without_table)
"""The same, of a command that prints no table: of printing there is ``--json`` alone."""
