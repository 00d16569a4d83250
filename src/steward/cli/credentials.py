"""Printers of ``steward token create`` and ``steward login``: a secret and its validity."""

from steward.admin.credentials.requests import LoginAnswer, TokenAnswer
from steward.cli import output
from steward.cli.commands import prints
from steward.cli.output import format_time


@prints("credentials.token_create")
def print_token(reply: TokenAnswer) -> None:
    """Print the secret of a new token, and for people its scopes and expiry."""
    print(reply.secret)
    token = reply.token
    output.print_note(
        f"Token {token.id} of {token.user}, for {', '.join(token.scopes)}, "
        f"valid until {format_time(token.expires)}."
    )


@prints("credentials.login")
def print_login_link(reply: LoginAnswer) -> None:
    """Print a login link, and for people its expiry."""
    print(reply.url)
    output.print_note(f"It can be used once, until {format_time(reply.expires)}.")
