"""``steward accounting``: the group of commands about the books of jobs."""

from typing import ClassVar

import typer

from steward.cli.lazy import ADMINISTRATORS, CONTEXT, OPERATORS, Entry, LazyGroup

_LOG = "steward.cli.accounting_log"


class AccountingGroup(LazyGroup):
    """The commands about the books of jobs."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry("dump", OPERATORS, "Write the job log out, record by record.", _LOG, "dump"),
        Entry("expire", OPERATORS, "Forget the books of old jobs.", _LOG, "expire"),
        Entry(
            "plugins",
            OPERATORS,
            "Show the accounting plugins and what went wrong in them.",
            _LOG,
            "plugins",
        ),
        Entry(
            "gaps",
            OPERATORS,
            "Tell what is missing or doubtful: lost facts, silent nodes, nobody's CPU time.",
            "steward.cli.accounting_gaps",
            "gaps",
        ),
        Entry(
            "import",
            ADMINISTRATORS,
            "Take over slurmdbd's history, or a file of sacct's.",
            "steward.cli.accounting_import",
            "import_",
        ),
    )


app = typer.Typer(
    cls=AccountingGroup, context_settings=CONTEXT, no_args_is_help=True, add_completion=False
)


@app.callback()
def accounting() -> None:
    """Look after the books: the job log, plugins, what is missing."""
