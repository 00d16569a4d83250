"""Query parameters of page requests, validated: text, lists, numbers and switches."""

from typing import Any, Final

from litestar import Request

from steward.core.errors import UsageError

_LONGEST: Final = 1000
"""Most characters of a text or word."""
_MOST_WORDS: Final = 100
"""Most words of a list."""
_LARGEST: Final = 2**53
"""Numbers are below this: the limit of exact integers in JavaScript."""

HttpRequest = Request[Any, Any, Any]
"""A Litestar request."""


def read_text(request: HttpRequest, name: str, default: str = "") -> str:
    """Return a text parameter, stripped of blanks.

    Raises:
        UsageError: The text is too long.
    """
    text = str(request.query_params.get(name, "")).strip()
    if len(text) > _LONGEST:
        raise UsageError(f"{name} is too long", name)
    return text or default


def read_words(request: HttpRequest, name: str) -> tuple[str, ...]:
    """Return a list parameter: repeated, or separated by commas.

    Raises:
        UsageError: There are too many words, or one is too long.
    """
    values = request.query_params.getall(name, [])
    words = [word.strip() for value in values for word in str(value)[: _LONGEST + 1].split(",")]
    if len(words) > _MOST_WORDS or any(len(word) > _LONGEST for word in words):
        raise UsageError(f"{name} is too long", name)
    return tuple(filter(None, words))


def read_number(request: HttpRequest, name: str, default: int = 0) -> int:
    """Return an integer parameter, 0 or more.

    Raises:
        UsageError: The value is not such a number.
    """
    text = read_text(request, name)
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and int(text[:20]) < _LARGEST):
        raise UsageError(f"{name} must be a number, not {text[:60]!r}", name)
    return int(text)


def read_switch(request: HttpRequest, name: str) -> bool:
    """Return True if a boolean parameter (a ticked box) is set."""
    return read_text(request, name) not in ("", "0", "no", "false", "off")
