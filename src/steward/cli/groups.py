"""Command groups that import a command's module only when that command is called.

Their help is a table in the group itself, by the reader that each command is
for, so that ``steward --help`` imports nothing but Typer.
"""

import importlib
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from collections.abc import Sequence


EVERYONE = "For everyone"
OPERATORS = "For operators"
ADMINISTRATORS = "For administrators"

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""What every Typer application of Steward is made with."""


class Entry(msgspec.Struct, frozen=True):
    """A command of a group.

    Attributes:
        name: As it is typed.
        reader: For whom it is: one of the three above.
        help: One line; the command's own first line is the same.
        module: Where it is, under the name ``attribute``.
        attribute: Name of a Typer application, or of a function that is the command.
    """

    name: str
    reader: str
    help: str
    module: str
    attribute: str = "app"


class LazyGroup(TyperGroup):
    """A group whose commands are imported when they are called."""

    entries: "ClassVar[Sequence[Entry]]" = ()

    def get_help_option(self, ctx: Any) -> Any:
        """The option ``--help``, which is false where it is not given."""
        option = super().get_help_option(ctx)
        if option is not None:
            # Of what is neither true nor false Typer has Pydantic say what it is: 80 ms.
            option.default = False
        return option

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - Typer's signature
        """Names of the commands, in the order of the table."""
        return [entry.name for entry in self.entries]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - Typer's signature
        """The command, imported now; None if there is none of that name."""
        for entry in self.entries:
            if entry.name == cmd_name:
                return load(entry)
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the first word names, with a suggestion where it names none."""
        # Typer suggests from what is registered eagerly, which here is nothing.
        names_only: dict[str, Any] = dict.fromkeys(self.list_commands(ctx))
        self.commands = names_only
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - Typer's signature
        """Write the commands, one section a reader."""
        readers = list(dict.fromkeys(entry.reader for entry in self.entries))
        for reader in readers:
            rows = [(entry.name, entry.help) for entry in self.entries if entry.reader == reader]
            with formatter.section(reader):
                formatter.write_dl(rows)


def load(entry: Entry) -> Any:
    """Import a command."""
    found = getattr(importlib.import_module(entry.module), entry.attribute)
    if isinstance(found, typer.Typer):
        app = found
    else:
        app = typer.Typer(add_completion=False)
        app.command(entry.name)(found)
    # Typer's own markup would import Rich for every page of help.
    app.rich_markup_mode = None
    command = typer.main.get_command(app)
    command.name = entry.name
    command.context_settings = {**CONTEXT, **command.context_settings}
    return command
