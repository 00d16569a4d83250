"""``steward bank import``, ``notices`` and ``mybrc-user``, and the printer of ``backfill``.

``import_`` reads a file or standard input; ``notices`` calls one of two actions, by its option;
``mybrc_user`` edits the password file of the myBRC API directly.
"""

import os
import sys
from typing import Annotated

import typer

from steward.bank.actions.maintenance import (
    BackfillReply,
    ImportKind,
    ImportReply,
    ImportRequest,
    NoticesReply,
    NoticesRequest,
    NoticesRetryReply,
    NoticesRetryRequest,
)
from steward.cli import options, output
from steward.cli.bank_options import (
    ClusterOption,
    DryRun,
    print_line,
)
from steward.cli.commands import print_reply, prints
from steward.cli.options import CommandCall, reject_empty, with_call_and_columns
from steward.cli.output import (
    Style,
    find_requested_zone,
    format_count,
    print_json,
    print_table,
)
from steward.core.errors import UsageError
from steward.extensions.mybrc import remove_user, set_user

_MAX_IMPORT_BYTES = 64 * 1024 * 1024
"""Largest file to import, in bytes."""


@prints("bank.backfill")
def print_backfill(reply: BackfillReply, style: Style) -> None:
    """Print the totals of a backfill; for people with a table of the runs that have no rate."""
    if style.csv or style.parsable or style.columns:
        print_table(reply.layout, reply.totals, style, reply)
        return
    verb = "Would charge" if reply.dry_run else "Charged"
    runs, amount = format_count(reply.charges, "run"), reply.format_with_unit(reply.amount)
    print_line(f"{verb} {runs}, {amount}.")
    if reply.passed_over:
        rows = format_count(reply.passed_over, "row")
        output.print_warning(f"cannot parse {rows} of slurmdbd: nothing is charged for them")
    if reply.unpriced:
        output.print_warning(f"nothing says what {format_count(len(reply.unpriced), 'run')} cost:")
        print_table(reply.layouts["unpriced"], reply.unpriced, Style(), reply)
        raise typer.Exit(1)


@with_call_and_columns
def import_(
    call: CommandCall,
    kind: Annotated[
        ImportKind,
        typer.Argument(
            metavar="csv|sacctmgr|bank-config", help="What it is; sacctmgr can do without a file."
        ),
    ],
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The file.")] = "",
    cluster: ClusterOption = "",
    dry_run: DryRun = False,
) -> None:
    """Import accounts, users, allocations and rates.

    From a table with commas (docs/bank.md says its columns), from slurmdbd or a file of
    'sacctmgr dump', or from slurm-banking-plugins' bank-config.toml. What is there
    already stays, so that it can be done again.
    """
    style = call.style
    if not file and kind != "sacctmgr":
        raise UsageError("name the file, or - for the standard input")
    request = ImportRequest(
        kind=kind,
        text=_read_import_file(file) if file else "",
        name=os.path.basename(file),
        cluster=cluster,
        dry_run=dry_run,
        zone=find_requested_zone(),
    )
    reply: ImportReply = call.send("bank.import", request)
    if style.json:
        print_json(reply)
        return
    changes = [change for change in reply.changes if change.how != "keep"]
    rows = reply.changes if style.parsable else changes
    if rows or style.parsable:
        print_table(reply.layout, rows, style, reply)
    for remark in reply.remarks:
        output.print_warning(remark)
    kept_count = len(reply.changes) - len(changes)
    verb = "would be done" if reply.dry_run else "done"
    summary = f"{format_count(len(changes), 'change')} {verb}, {kept_count} left as they were."
    if changes or style.parsable:
        output.print_note(summary)
    else:
        print_line(summary)


def _read_import_file(path: str) -> str:
    """Read a file to import, or standard input."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(_MAX_IMPORT_BYTES + 1)
        else:
            with open(path, "rb") as file:
                data = file.read(_MAX_IMPORT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", path) from error
    if len(data) > _MAX_IMPORT_BYTES:
        raise UsageError(f"{path} is larger than anything that can be imported", path)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason}", path) from error


_RETRY_ALL = "all"


@with_call_and_columns
def notices(
    call: CommandCall,
    retry: Annotated[
        str,
        typer.Option(
            "--retry",
            metavar="NUMBER,…|all",
            help="Have these told at once; all: whatever was set aside.",
            callback=reject_empty,
        ),
    ] = "",
) -> None:
    """List mails and other notices that were not sent.

    What is refused is tried a few times, what cannot be sent for a week; then it is set
    aside until --retry. What a myBRC server elsewhere was not told is listed, too.
    """
    style = call.style
    if retry:
        request = NoticesRetryRequest(numbers=_parse_numbers(retry))
        retry_reply: NoticesRetryReply = call.send("bank.notices_retry", request)
        if style.json:
            print_json(retry_reply)
        else:
            print_line(f"{format_count(retry_reply.retried, 'notice')} will be tried again.")
        return
    reply: NoticesReply = call.send("bank.notices", NoticesRequest())
    if style.json:
        print_json(reply)
    else:
        print_reply(reply, style, "notices")


def _parse_numbers(text: str) -> tuple[int, ...]:
    """Parse numbers of notices; "all" gives an empty tuple."""
    if text == _RETRY_ALL:
        return ()
    parts = options.split_lists([text])
    if not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
        raise UsageError(f"{text!r} is no list of numbers: --retry 12,13, or --retry all", text)
    return tuple(int(part) for part in parts)


def mybrc_user(
    user: Annotated[str, typer.Argument(metavar="USER", help="A name, of the API alone.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The users_file of [mybrc]; made if need be.")
    ],
    *,
    remove: Annotated[
        bool, typer.Option("--remove", help="Take the user away, and all tokens with it.")
    ] = False,
) -> None:
    """Say who may get a token of the myBRC API, and by which password.

    The password is asked for, or is the first line of the standard input. Only its hash
    is kept. A running server reads the file again by itself.
    """
    if remove:
        if not remove_user(file, user):
            raise UsageError(f"{file} has no user {user}", user)
        typer.echo(f"{user} is out of {file}")
        return
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    is_new = set_user(file, user, password)
    typer.echo(f"{user} {'is new in' if is_new else 'has another password in'} {file}")
