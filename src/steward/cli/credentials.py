"""``steward token`` and ``steward login``: create, list and revoke API tokens; log in by link."""

import re
from typing import Annotated, Any, ClassVar, Final

import typer

from steward.admin.credentials.requests import (
    TokenAnswer,
    TokenCreateRequest,
    TokenListAnswer,
    TokenListRequest,
    TokenRevokeRequest,
)
from steward.admin.credentials.store import Credential
from steward.cli import options, output
from steward.cli.groups import CONTEXT, EVERYONE, Entry, LazyGroup
from steward.cli.options import (
    LARGEST_NUMBER,
    CommandCall,
    reject_empty,
    with_call_and_columns,
    with_json_call,
)
from steward.cli.output import format_time, print_json, print_table
from steward.core.access import SCOPES
from steward.core.errors import UsageError
from steward.core.layouts import Column

_DURATION = re.compile(r"(\d{1,6})\s*(m|h|d|w)", re.IGNORECASE | re.ASCII)
"""A lifetime such as ``12h``, ``30d`` or ``8w``."""
_UNIT_S: Final = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_REVOKED_STATE: Final = "revoked"


class TokenGroup(LazyGroup):
    """Commands of ``steward token``."""

    entries: "ClassVar[tuple[Entry, ...]]" = (
        Entry(
            "create",
            EVERYONE,
            "Make a token, with which a program may ask as you.",
            __name__,
            "create",
        ),
        Entry("list", EVERYONE, "List your tokens.", __name__, "list_"),
        Entry(
            "revoke",
            EVERYONE,
            "Take tokens back: from now on they let nobody in.",
            __name__,
            "revoke",
        ),
    )


app = typer.Typer(
    cls=TokenGroup, context_settings=CONTEXT, no_args_is_help=True, add_completion=False
)


@app.callback()
def token() -> None:
    """What programs show to be let in as you."""


@with_json_call
def create(
    call: CommandCall,
    scope: Annotated[
        list[str] | None,
        typer.Option(
            "--scope",
            metavar="SCOPE,…",
            help=f"What it may do: {', '.join(SCOPES)}; 'read' if not given.",
            callback=reject_empty,
        ),
    ] = None,
    expires: Annotated[
        str,
        typer.Option(
            "--expires",
            metavar="TIME",
            help="How long it is good: 12h, 30d, 8w; if not given 90d, or the most there is.",
            callback=reject_empty,
        ),
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            "--user",
            "-u",
            metavar="NAME",
            help="Whose it is; only root makes one for another.",
            callback=reject_empty,
        ),
    ] = "",
    name: Annotated[str, typer.Option("--name", metavar="TEXT", help="What it is for.")] = "",
) -> None:
    """Make a token, with which a program may ask as you.

    It is printed once, and kept nowhere: put it where only the program can read it.
    """
    scopes: Any = options.split_lists(scope) or ("read",)
    unknown_scopes = [scope_name for scope_name in scopes if scope_name not in SCOPES]
    if unknown_scopes:
        raise UsageError(f"there is no scope {unknown_scopes[0]!r}: there are {', '.join(SCOPES)}")
    lifetime_s = _parse_lifetime(expires) if expires else None
    request = TokenCreateRequest(name=name, scopes=scopes, expires_s=lifetime_s, user=user)
    reply: TokenAnswer = call.send("credentials.token_create", request)
    if call.style.json:
        print_json(reply)
        return
    print(reply.secret)
    new_token = reply.token
    output.print_note(
        f"Token {new_token.id} of {new_token.user}, for {', '.join(new_token.scopes)}, "
        f"good until {format_time(new_token.expires)}."
    )


def _parse_lifetime(text: str) -> float:
    """Parse a lifetime such as ``30d`` into seconds."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{text!r} is no time to be good for: 12h, 30d, 8w", text)
    return float(int(match[1]) * _UNIT_S[match[2].lower()])


_TOKEN_COLUMNS: Final = [
    Column("ID", "id", "count"),
    Column("User", "user"),
    Column("Kind", "kind", show="requested"),
    Column("How", "how", show="requested"),
    Column("Scopes", "scopes"),
    Column("Created", "created", "time"),
    Column("Expires", lambda row, _: _REVOKED_STATE if row.ended else format_time(row.expires)),
    Column("Used", "used", "time"),
    Column("Name", "name"),
]


@with_call_and_columns
def list_(
    call: CommandCall,
    everybodys: Annotated[
        bool, typer.Option("--all", "-a", help="Everybody's; for root and Steward's own user.")
    ] = False,
    sessions: Annotated[
        bool, typer.Option("--sessions", help="Browsers that are logged in, too.")
    ] = False,
) -> None:
    """List your tokens."""
    request = TokenListRequest(everybodys=everybodys, sessions=sessions)
    reply: TokenListAnswer = call.send("credentials.token_list", request)
    if call.style.json:
        print_json(reply)
        return
    rows: tuple[Credential, ...] = reply.tokens
    print_table(_TOKEN_COLUMNS, rows, call.style)


@with_json_call
def revoke(
    call: CommandCall,
    numbers: Annotated[
        list[int],
        typer.Argument(
            metavar="ID", min=1, max=LARGEST_NUMBER, help="Those of 'steward token list'."
        ),
    ],
) -> None:
    """Take tokens back: from now on they let nobody in."""
    reply = call.send("credentials.token_revoke", TokenRevokeRequest(numbers=tuple(numbers)))
    if call.style.json:
        print_json(reply)


@with_json_call
def login(call: CommandCall) -> None:
    """Print a link that opens the pages.

    It logs you in, once, and only for a few minutes: give it to nobody.
    """
    from steward.admin.credentials.requests import LoginRequest

    reply = call.send("credentials.login", LoginRequest())
    if call.style.json:
        print_json(reply)
        return
    print(reply.url)
    output.print_note(f"It can be used once, until {format_time(reply.expires)}.")
