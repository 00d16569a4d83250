"""``steward bank mybrc-user``: who may get a token of the myBRC API."""

import sys
from typing import Annotated

import typer

from steward.core.errors import UsageError
from steward.extensions.mybrc import drop_user, set_user


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
        if not drop_user(file, user):
            raise UsageError(f"{file} has no user {user}", user)
        typer.echo(f"{user} is out of {file}")
        return
    if sys.stdin.isatty():
        password = typer.prompt("Password", hide_input=True, confirmation_prompt=True)
    else:
        password = sys.stdin.readline().rstrip("\n")
    is_new = set_user(file, user, password)
    typer.echo(f"{user} {'is new in' if is_new else 'has another password in'} {file}")
