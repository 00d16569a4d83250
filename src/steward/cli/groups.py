"""Command groups of the ``steward`` CLI that import a command's module only on use.

A group lists its commands in a table of :class:`Entry`, sorted by reader (everyone, operators,
administrators). ``steward --help`` therefore prints from the table and imports nothing but Click.
:func:`import_command` imports one command; ``cli/app.py`` holds the tables.
"""

import importlib
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import click

from steward.cli.parameters import Group, wrap_function
from steward.daemon.action_index import ACTION_INDEX

if TYPE_CHECKING:
    from collections.abc import Sequence


EVERYONE = "For everyone"
OPERATORS = "For operators"
ADMINISTRATORS = "For administrators"
READERS = {"everyone": EVERYONE, "operator": OPERATORS, "administrator": ADMINISTRATORS}
"""Section of the help for each role of an action."""


class Entry(NamedTuple):
    """A command in a group's table.

    Attributes:
        name: The word typed on the command line.
        reader: The section of the help: one of the three constants above.
        help: One line of help, the same as the first line of the command's own docstring unless it
            has an action.
        module: Module to import; it defines ``attribute``. "" if the command derives from its
            action.
        attribute: Name of a Click command, or of a function that makes one.
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


class LazyGroup(Group):
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

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - Click's signature
        """Return the names of the commands, in table order."""
        return [entry.name for entry in self.list_entries()]

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - Click's signature
        cmd_name: str,
    ) -> click.Command | None:
        """Import and return the named command, or None if the group has none of that name."""
        for entry in self.list_entries():
            if entry.name == cmd_name:
                return import_command(entry)
        return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the first word names, or fail with a suggestion."""
        # Click suggests names from the commands of the group, of which none is imported yet.
        placeholders: dict[str, Any] = dict.fromkeys(self.list_commands(ctx))
        self.commands = placeholders
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - Click's signature
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the commands to the help, one section for each reader."""
        entries = self.list_entries()
        for reader in READERS.values():
            rows = [(entry.name, entry.help) for entry in entries if entry.reader == reader]
            if rows:
                with formatter.section(reader):
                    formatter.write_dl(rows)


def import_command(entry: Entry) -> click.Command:
    """Import an entry's command and return it."""
    if not entry.module:
        target: Any = importlib.import_module("steward.cli.commands").make_command(entry.action)
    else:
        target = getattr(importlib.import_module(entry.module), entry.attribute)
    command = target if isinstance(target, click.Command) else wrap_function(target)
    command.name = entry.name
    if entry.action:
        details = (command.help or "").partition("\n\n")[2]
        command.help = f"{entry.help}\n\n{details}".rstrip()
    return command
