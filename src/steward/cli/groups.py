"""Command groups of the ``steward`` CLI that import a command's module only on use.

A group lists its commands in a table of :class:`Entry`, sorted by reader (everyone, operators,
administrators). ``steward --help`` therefore prints from the table and imports nothing but Typer.
:func:`import_command` imports one command; ``cli/app.py`` holds the tables.
"""

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import typer
from typer.core import TyperGroup

from steward.daemon.action_index import ACTION_INDEX

if TYPE_CHECKING:
    from collections.abc import Sequence


EVERYONE = "For everyone"
OPERATORS = "For operators"
ADMINISTRATORS = "For administrators"
READERS = {"everyone": EVERYONE, "operator": OPERATORS, "administrator": ADMINISTRATORS}
"""Section of the help for each role of an action."""

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Click context settings of every Typer application of Steward: ``-h`` for help, 100 columns."""


class Entry(msgspec.Struct, frozen=True):
    """A command in a group's table.

    Attributes:
        name: The word typed on the command line.
        reader: The section of the help: one of the three constants above.
        help: One line of help, the same as the first line of the command's own docstring unless it
            has an action.
        module: Module to import; it defines ``attribute``. "" if the command derives from its
            action.
        attribute: Name of a Typer application, or of a function that is the command.
        action: Action that the help is of; "" if it is the command's own.
    """

    name: str
    reader: str
    help: str
    module: str
    attribute: str = "app"
    action: str = ""


def describe_by_action(name: str, action: str, module: str, attribute: str = "app") -> Entry:
    """Return the entry of a command written by hand, with help and reader of an action."""
    about = ACTION_INDEX[action]
    return Entry(name, READERS[about.role], about.help, module, attribute, action)


def list_derived_entries(words: str) -> list[Entry]:
    """Return the commands of a group that derive from actions.

    Args:
        words: Words that call the group, such as ``bank account``.
    """
    return [
        Entry(entry.command.split()[-1], READERS[entry.role], entry.help, "", "", name)
        for name, entry in ACTION_INDEX.items()
        if entry.command.rpartition(" ")[0] == words and entry.command
    ]


class LazyGroup(TyperGroup):
    """A command group that imports a command only when it is called."""

    words: "ClassVar[str | None]" = None
    """Words that call the group, "" for the program itself; None if no action has a command there.
    """
    entries: "ClassVar[Sequence[Entry]]" = ()
    """Commands of the group that are written by hand."""

    @classmethod
    def list_entries(cls) -> "list[Entry]":
        """Return all commands of the group: those written by hand, then those of actions."""
        derived = [] if cls.words is None else list_derived_entries(cls.words)
        return [*cls.entries, *derived]

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option ``--help`` with the default False."""
        option = super().get_help_option(ctx)
        if option is not None:
            # Without a default Typer lets Pydantic determine the option's type, which takes 80 ms.
            option.default = False
        return option

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - Typer's signature
        """Return the names of the commands, in table order."""
        return [entry.name for entry in self.list_entries()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - Typer's signature
        """Import and return the named command, or None if the group has none of that name."""
        for entry in self.list_entries():
            if entry.name == cmd_name:
                return import_command(entry)
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, or fail with a suggestion."""
        # Typer suggests names from its eagerly registered commands, of which there are none here.
        placeholders: dict[str, Any] = dict.fromkeys(self.list_commands(ctx))
        self.commands = placeholders
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - Typer's signature
        """Write the commands to the help, one section for each reader."""
        entries = self.list_entries()
        for reader in READERS.values():
            rows = [(entry.name, entry.help) for entry in entries if entry.reader == reader]
            if rows:
                with formatter.section(reader):
                    formatter.write_dl(rows)


def import_command(entry: Entry) -> Any:
    """Import an entry's command and return it as a Click command."""
    if not entry.module:
        target: Any = importlib.import_module("steward.cli.commands").make_command(entry.action)
    else:
        target = getattr(importlib.import_module(entry.module), entry.attribute)
    if isinstance(target, typer.Typer):
        app = target
    else:
        app = typer.Typer(add_completion=False)
        app.command(entry.name)(target)
    # Rich markup would make every help page import Rich.
    app.rich_markup_mode = None
    command = typer.main.get_command(app)
    command.name = entry.name
    if entry.action:
        details = (command.help or "").partition("\n\n")[2]
        command.help = f"{entry.help}\n\n{details}".rstrip()
    command.context_settings = {**CONTEXT, **command.context_settings}
    return command
