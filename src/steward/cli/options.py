"""Command-line options that several commands share, defined once (see ``cli/parameters.py``).

Letters and words are those of Slurm's commands: ``-u``, ``-A``, ``-j``, ``-S``, ``-E`` as in
sacct(1), ``-n`` and ``-P`` for output.

In order: callbacks that check options, the option types, some of them made from request fields by
:func:`make_option`, :func:`make_style` (options to output format), and the decorators
``with_call``, ``with_table_call`` and ``with_json_call``. A decorated command receives a
:class:`CommandCall`: the output style, and :meth:`CommandCall.send` to send a request to the
daemon.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, get_args

import click
import msgspec

from steward.cli.output import Style, TimeUnit
from steward.cli.parameters import Argument, Option
from steward.client.calls import call_action
from steward.client.places import ClientPlace
from steward.core.actions import Input, InputFile, find_annotation
from steward.core.config import LogLevel, Settings
from steward.core.errors import UsageError
from steward.daemon.registry import get_action

DAEMON_SOCKET: Final = Settings().socket
"""Default path of the daemon's socket."""

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Name in a parameter ``NAME=VALUE``."""
_MAX_FILE_BYTES: Final = 64 * 1024 * 1024
"""Maximum size of a file in a request, in bytes."""


def reject_empty(context: click.Context, param: click.Parameter, value: Any) -> Any:
    """Reject a filter that was given but is empty, as from an unset shell variable.

    Treated as no filter, ``erase -u ada -j "$JOBS" --yes`` would remove all scripts of ada.
    """
    is_given = _find_source(context, param.name) == "COMMANDLINE"
    if is_given and not split_lists([value] if isinstance(value, str) else value):
        is_option = param.opts[0].startswith("-")
        name = param.opts[0] if is_option else getattr(param, "metavar", None) or param.name
        raise UsageError(f"{name} has no value: give one, or leave the option out")
    return value


def prefer_named_place(context: click.Context, param: click.Parameter, value: str) -> str:
    """Return "" for an environment variable's place if the command line names a place.

    Click processes the parameters given on the command line before all others.
    """
    is_exported = _find_source(context, param.name) == "ENVIRONMENT"
    is_named = any(
        _find_source(context, name) == "COMMANDLINE" for name in ClientPlace.__struct_fields__
    )
    return "" if is_exported and is_named else value


def _find_source(context: click.Context, name: str | None) -> str:
    """Return where a parameter's value comes from, by Click's name; "" if not parsed yet."""
    source = context.get_parameter_source(name or "")
    return source.name if source is not None else ""


Config = Annotated[
    str,
    Option(
        "--config",
        envvar="STEWARD_CONFIG",
        metavar="FILE",
        help="Path of the configuration file.",
        callback=prefer_named_place,
    ),
]
Socket = Annotated[
    str,
    Option(
        "--socket",
        envvar="STEWARD_SOCKET",
        metavar="PATH",
        help="Path of the daemon's socket.",
        callback=prefer_named_place,
    ),
]
DaemonSocket = Annotated[
    str,
    Option(
        "--socket", envvar="STEWARD_SOCKET", metavar="FILE", help="Path of the daemon's socket."
    ),
]
"""For commands that only a daemon can answer; :data:`Socket` is one of several places."""
LogLevelOption = Annotated[
    LogLevel,
    Option(
        "--log-level",
        metavar="LEVEL",
        case_sensitive=False,
        help=f"{', '.join(get_args(LogLevel)[:-1])} or {get_args(LogLevel)[-1]}.",
    ),
]
Archive = Annotated[
    str,
    Option(
        "--archive",
        envvar="STEWARD_ARCHIVE",
        metavar="DIR",
        help="Archive of 'steward archive watch' to use, without the daemon.",
        callback=prefer_named_place,
    ),
]

Json = Annotated[bool, Option("--json", help="Print JSON, for programs.")]
Parsable = Annotated[
    bool, Option("--parsable2", "-P", help="Print fields separated by '|', for programs.")
]
NoHeader = Annotated[bool, Option("--noheader", "-n", help="Omit the header line.")]
Csv = Annotated[bool, Option("--csv", help="Print a table as CSV, for spreadsheets.")]
ResourceTimeUnit = Annotated[
    str,
    Option(
        *("--time", "-t"),
        metavar="hours|minutes|seconds",
        help="Unit of resource time. Default: hours.",
        callback=reject_empty,
    ),
]
Format = Annotated[
    str, Option("--format", "-o", metavar="NAME,…", help="Names of the columns to print.")
]


def make_option(field_type: Any, description: str = "") -> Any:
    """Return the option or argument of a request's field with text.

    Args:
        field_type: Annotated type of the field.
        description: Help of the option; the field's description if empty.
    """
    meta = find_annotation(field_type)
    assert meta is not None
    assert meta.extra is not None
    given: Input = meta.extra["input"]
    make = partial(Option, *given.words) if given.words else Argument
    text = description or meta.description or ""
    return make(metavar=given.metavar, help=text, callback=reject_empty)


def make_style(
    as_json: bool = False,
    parsable: bool = False,
    noheader: bool = False,
    columns: str = "",
    as_csv: bool = False,
    unit: str = "",
) -> Style:
    """Return the output style that the options select.

    Raises:
        UsageError: Two options contradict each other.
    """
    if as_json and (parsable or columns):
        raise UsageError("--json prints everything: leave out --parsable2 and --format")
    if as_csv and (as_json or parsable):
        raise UsageError("--csv, --json and --parsable2 exclude each other")
    units = [name for name in get_args(TimeUnit) if name.startswith(unit.lower())]
    if not units:
        raise UsageError(f"--time takes hours, minutes or seconds, not {unit!r}", unit)
    return Style(
        hours_unit=units[0],
        json=as_json,
        csv=as_csv,
        parsable=parsable,
        has_header=not noheader,
        columns=split_lists(columns.split(",") if columns else ()),
    )


def split_lists(values: Iterable[str] | None) -> tuple[str, ...]:
    """Split comma-separated values, as Slurm's commands accept lists."""
    return tuple(part for value in values or () for part in value.split(",") if part)


def parse_pairs(words: Iterable[str]) -> dict[str, str]:
    """Parse parameters typed as ``NAME=VALUE``.

    Raises:
        UsageError: A word has another form, or a name appears twice.
    """
    values: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or _NAME.fullmatch(name) is None:
            raise UsageError(f"invalid parameter {word!r}: write NAME=VALUE", word)
        if name in values:
            raise UsageError(f"parameter {name} is given twice", name)
        values[name] = value
    return values


def read_input_file(path: str, max_bytes: int = _MAX_FILE_BYTES) -> InputFile:
    """Read a file for a request, or standard input for ``-``.

    Args:
        path: The file.
        max_bytes: Largest size, in bytes; whole MiB.

    Raises:
        UsageError: It cannot be read, is too large or not UTF-8.
    """
    try:
        if path == "-":
            data = sys.stdin.buffer.read(max_bytes + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(max_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", path) from error
    if len(data) > max_bytes:
        raise UsageError(f"{path} is larger than {max_bytes >> 20} MiB, the maximum", path)
    try:
        return InputFile(name=os.path.basename(path), text=data.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason}", path) from error


def make_key() -> str:
    """Return a random idempotency key."""
    return os.urandom(8).hex()


P = ParamSpec("P")
T = TypeVar("T")
Command = Callable[P, None]


class CommandCall(msgspec.Struct, frozen=True):
    """Output style of a command, and the place that answers its requests.

    Attributes:
        style: Output format.
        place: The daemon's socket or the configuration file to use.
    """

    style: Style
    place: ClientPlace

    def send(self, action_name: str, request: Any) -> Any:
        """Send a request to an action and return its reply.

        Args:
            action_name: Name of the action, such as ``bank.balance``.
            request: A value of the action's request type.

        Raises:
            StewardError: The action rejected the request, or the daemon does not answer.
        """
        return call_action(self.place, get_action(action_name), request)


def _make_table_call(
    columns: Format = "",
    as_csv: Csv = False,
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
) -> CommandCall:
    """Make the call of a command that prints a table, also for spreadsheets."""
    return CommandCall(
        make_style(as_json, parsable, noheader, columns, as_csv),
        ClientPlace(config=config, socket=socket),
    )


def _make_call(
    as_json: Json = False,
    parsable: Parsable = False,
    noheader: NoHeader = False,
    config: Config = "",
    socket: Socket = "",
) -> CommandCall:
    """Make the call of a command that prints a table."""
    return _make_table_call("", False, as_json, parsable, noheader, config, socket)


def _make_json_call(as_json: Json = False, config: Config = "", socket: Socket = "") -> CommandCall:
    """Make the call of a command that prints no table."""
    return _make_table_call("", False, as_json, config=config, socket=socket)


def _has_default(parameter: inspect.Parameter) -> bool:
    """Return True if a parameter has a default value."""
    return parameter.default is not inspect.Parameter.empty


def with_options(
    read_options: Callable[..., T],
) -> Callable[[Callable[Concatenate[T, P], None]], Command[P]]:
    """Return a decorator that adds a function's options to a command.

    The function's result becomes the command's first argument.

    Args:
        read_options: Function whose parameters are options and arguments.
    """

    def decorate(command: Callable[Concatenate[T, P], None]) -> Command[P]:
        shared_parameters = inspect.signature(read_options, eval_str=True).parameters
        own_parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            arguments: dict[str, Any] = dict(kwargs)
            options_value = read_options(
                **{name: arguments.pop(name) for name in shared_parameters}
            )
            command(options_value, *args, **arguments)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__module__ = command.__module__
        parameters = sorted([*own_parameters, *shared_parameters.values()], key=_has_default)
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # inspect's own
        return run

    return decorate


with_call = with_options(_make_call)
"""Add the options of output and place to a command: its first argument, a :class:`CommandCall`."""

with_table_call = with_options(_make_table_call)
"""The same, with ``--format`` to choose the table's columns and ``--csv``."""

with_json_call = with_options(_make_json_call)
"""The same for commands without a table: ``--json`` is the only output option."""
