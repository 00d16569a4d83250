"""``steward bank notices`` and ``mybrc-user``, and the printers of ``backfill`` and ``import``.

``notices`` calls one of two actions, by its option; ``mybrc_user`` edits the password file of the
myBRC API directly.
"""

import sys
from typing import Annotated

import click

from steward.bank.actions.maintenance import (
    BackfillReply,
    ImportReply,
    NoticesReply,
    NoticesRequest,
    NoticesRetryReply,
    NoticesRetryRequest,
)
from steward.cli import options
from steward.cli.commands import print_reply, prints
from steward.cli.options import CommandCall, reject_empty, with_table_call
from steward.cli.output import (
    Style,
    format_count,
    print_json,
    print_line,
    print_warning,
)
from steward.cli.parameters import Argument, Option
from steward.core.errors import UsageError
from steward.extensions.mybrc import remove_user, set_user


@prints("bank.backfill")
def print_backfill(reply: BackfillReply, style: Style) -> None:
    """Print the totals of a backfill; for people with a table of the runs that have no rate."""
    print_reply(reply, style, "totals" if style.is_for_programs else "unpriced")


@prints("bank.import")
def print_import(reply: ImportReply, style: Style) -> None:
    """Print the changes of an import, for programs with unchanged objects; then its remarks."""
    print_reply(reply, style, "changes" if style.is_for_programs else "made")
    for remark in reply.remarks:
        print_warning(remark)


_RETRY_ALL = "all"


@with_table_call
def notices(
    call: CommandCall,
    retry: Annotated[
        str,
        Option(
            "--retry",
            metavar="NUMBER,…|all",
            help="Numbers of the notices to retry; 'all' for all dead letters.",
            callback=reject_empty,
        ),
    ] = "",
) -> None:
    """Run the action ``bank.notices`` and print its reply.

    Steward retries a rejected notice a few times. If the receiver does not answer, it retries
    for a week. After that the notice is a dead letter: --retry sends it again. The list
    includes notices to a remote myBRC server.
    """
    style = call.style
    if retry:
        request = NoticesRetryRequest(numbers=_parse_numbers(retry))
        retry_reply: NoticesRetryReply = call.send("bank.notices_retry", request)
        if style.json:
            print_json(retry_reply)
        else:
            print_line(f"Steward retries {format_count(retry_reply.retried, 'notice')}.")
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
        raise UsageError(
            f"{text!r} is not a list of numbers: give --retry 12,13 or --retry all", text
        )
    return tuple(int(part) for part in parts)


def mybrc_user(
    user: Annotated[
        str,
        Argument(
            metavar="USER", help="Name of the user in the myBRC API; independent of Linux users."
        ),
    ],
    file: Annotated[
        str,
        Argument(
            metavar="FILE", help="File of the users: 'users_file' of [mybrc]. Created if missing."
        ),
    ],
    *,
    remove: Annotated[
        bool, Option("--remove", help="Remove the user; the user's tokens end at once.")
    ] = False,
) -> None:
    """Manage users of the myBRC API.

    The command prompts for the password, or reads the first line of standard input. It
    stores only the hash. A new password ends the user's tokens. A running server reloads the file.
    """
    if remove:
        if not remove_user(file, user):
            raise UsageError(f"{file} has no user {user}", user)
        click.echo(f"Removed {user} from {file}.")
        return
    if sys.stdin.isatty():
        password = click.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    is_new = set_user(file, user, password)
    click.echo(f"{user} {'was added to' if is_new else 'has a new password in'} {file}")
