"""Command line as data, for man pages and shell completion."""

import re
from collections.abc import Iterator
from typing import Any, Final

import click
import msgspec

from steward.accounting.sacct.fields import SLURM_FIELDS, STEWARD_FIELDS
from steward.accounting.sacct.options import HELP
from steward.cli.app import app

FILES: Final = ("FILE", "FILE…", "PATH", "PATHS")
DIRECTORIES: Final = ("DIR", "DIR…")
"""What an option's or argument's placeholder is where it wants one."""
_SACCT: Final = re.compile(r"^  (?P<names>(?:-\w, )?.*?-[\w-]+.*?)(?:  +| (?=[A-Z]))(?P<help>.*)$")
_WORDS: Final = re.compile(r"[a-z]+(\|[a-z]+)+")
_NAME: Final = re.compile(r"(?<![\w-])(--?[A-Za-z][\w-]*)")


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """Option of a command.

    Attributes:
        names: Its names, short ones first.
        value: Placeholder of its value; empty if it takes none.
        help: Help text.
        choices: Possible values; empty for any.
    """

    names: tuple[str, ...]
    value: str = ""
    help: str = ""
    choices: tuple[str, ...] = ()


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """Argument of a command.

    Attributes:
        name: Placeholder.
        required: Whether it is required.
        many: Whether there may be several.
        help: Help text.
        choices: Possible values; empty for any.
    """

    name: str
    required: bool
    many: bool = False
    help: str = ""
    choices: tuple[str, ...] = ()


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Command, and the commands below it.

    Attributes:
        path: Words that call it, ``steward`` first.
        reader: Kind of its users; empty for ``steward`` itself.
        help: Help text: a line, and paragraphs after it.
        options: Options in the order of its help.
        arguments: Arguments in order.
        commands: Commands of a group.
        more: Text that its help appends unchanged.
    """

    path: tuple[str, ...]
    reader: str = ""
    help: str = ""
    options: tuple[Option, ...] = ()
    arguments: tuple[Argument, ...] = ()
    commands: "tuple[Shape, ...]" = ()
    more: str = ""

    @property
    def title(self) -> str:
        """First line of its help, without its full stop."""
        return self.help.partition("\n")[0].rstrip(".")


def whole() -> Shape:
    """Return the command ``steward`` with all commands below it."""
    return _shape(app, ("steward",), "")


def below(shape: Shape) -> Iterator[Shape]:
    """Yield a command and everything below it."""
    yield shape
    for one in shape.commands:
        yield from below(one)


def _shape(command: Any, path: tuple[str, ...], reader: str) -> Shape:
    if path == ("steward", "sacct"):
        return _sacct(path, reader)
    context = click.Context(command, info_name=path[-1])
    options: list[Option] = []
    arguments: list[Argument] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            arguments.append(_argument(parameter))
        else:
            options += _options(parameter, context)
    options.append(Option(names=("-h", "--help"), help="Show the help and exit."))
    return Shape(
        path=path,
        reader=reader,
        help=_text(command.help or ""),
        options=tuple(options),
        arguments=tuple(arguments),
        commands=tuple(_commands(command, path)),
    )


def _commands(command: Any, path: tuple[str, ...]) -> Iterator[Shape]:
    if not hasattr(command, "list_commands"):
        return
    readers = {entry.name: entry.reader for entry in getattr(command, "entries", ())}
    for name in command.list_commands(None):
        yield _shape(command.get_command(None, name), (*path, name), readers.get(name, ""))


def _argument(parameter: Any) -> Argument:
    shown = (parameter.metavar or parameter.name.upper()).strip("[]").rstrip(".…")
    choices = _choices(parameter) or (tuple(shown.split("|")) if _WORDS.fullmatch(shown) else ())
    return Argument(
        name=parameter.name.upper() if choices else shown,
        required=parameter.required,
        many=parameter.nargs == -1,
        help=_text(parameter.help or ""),
        choices=choices,
    )


def _options(parameter: Any, context: Any) -> Iterator[Option]:
    """Yield an option, and its opposite as another one if it has one."""
    names = tuple(sorted(parameter.opts, key=lambda name: name.startswith("--")))
    record = parameter.get_help_record(context) or ("", "")
    about = " ".join(record[1].split())
    choices = _choices(parameter)
    value = ""
    if not parameter.is_flag:
        # "-L, --limit N": what stands behind the names.
        shown = record[0].rpartition(names[-1])[2].strip().strip("[]")
        value = "|".join(choices) or shown
    yield Option(names=names, value=value, help=about, choices=choices)
    if parameter.secondary_opts:
        opposite = tuple(parameter.secondary_opts)
        yield Option(names=opposite, help=f"The opposite of {names[-1]}.")


def _choices(parameter: Any) -> tuple[str, ...]:
    choices = parameter.type.choices if isinstance(parameter.type, click.Choice) else ()
    return tuple(word for word in choices if word)


def _text(text: str) -> str:
    """Return a help text with each paragraph on one line."""
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip())]
    return "\n".join(part for part in paragraphs if part)


def _sacct(path: tuple[str, ...], reader: str) -> Shape:
    """Return ``steward sacct``, which reads its own command line, from its help text."""
    options: list[Option] = []
    more = []
    title = ""
    for line in HELP.splitlines()[1:]:
        found = _SACCT.match(line)
        if found is None:
            if line.startswith(("Times:", "SACCT_FORMAT")):
                more.append(line)
            elif line and not title:
                title = line
            continue
        options += _sacct_options(found["names"], found["help"])
    return Shape(path=path, reader=reader, help=title, options=tuple(options), more="\n".join(more))


def _sacct_options(names: str, about: str) -> Iterator[Option]:
    told, _, value = names.partition("=")
    found = tuple(_NAME.findall(told))
    choices = tuple(value.strip().split("|")) if "|" in value else ()
    option = Option(names=found, value=value.strip(), help=about, choices=choices)
    # "--json, --yaml" are two, and no two names of one.
    if len(found) > 1 and not value and all(name.startswith("--") for name in found):
        yield from (msgspec.structs.replace(option, names=(name,)) for name in found)
    else:
        yield option


def sacct_fields() -> tuple[str, ...]:
    """Return the fields that ``steward sacct -o`` knows, in their usual spelling."""
    return tuple(field.name.lower() for field in (*SLURM_FIELDS, *STEWARD_FIELDS))
