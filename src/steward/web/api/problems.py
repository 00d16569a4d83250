"""How the API says what went wrong: problem+json, RFC 9457."""

from http import HTTPStatus
from typing import Any

import msgspec
from litestar import Response


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong.

    Attributes:
        type: Always ``about:blank``: the status says what kind it is.
        title: The status, in words.
        status: Of HTTP.
        detail: What happened, and what to do about it.
    """

    title: str
    status: int
    detail: str
    type: str = "about:blank"


def problem(status: int, detail: str, headers: dict[str, str] | None = None) -> Response[Any]:
    """An answer that says what went wrong."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    return Response(
        Problem(title=title, status=status, detail=detail),
        status_code=status,
        media_type="application/problem+json",
        headers=headers,
    )
