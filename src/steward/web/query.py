"""What an address says behind its question mark: anybody may have written it."""

from typing import Any, Final

from litestar import Request

from steward.core.errors import UsageError

_LONGEST: Final = 1000
_MOST_WORDS: Final = 100
_LARGEST: Final = 2**53

Ask = Request[Any, Any, Any]


def text(request: Ask, name: str, default: str = "") -> str:
    """A text, without blanks around it.

    Raises:
        UsageError: It is too long.
    """
    found = str(request.query_params.get(name, "")).strip()
    if len(found) > _LONGEST:
        raise UsageError(f"{name} is too long", name)
    return found or default


def words(request: Ask, name: str) -> tuple[str, ...]:
    """Several words: repeated, or with commas between.

    Raises:
        UsageError: They are too many, or too long.
    """
    given = request.query_params.getall(name, [])
    found = [word.strip() for one in given for word in str(one)[: _LONGEST + 1].split(",")]
    if len(found) > _MOST_WORDS or any(len(word) > _LONGEST for word in found):
        raise UsageError(f"{name} is too long", name)
    return tuple(filter(None, found))


def number(request: Ask, name: str, default: int = 0) -> int:
    """A whole number, 0 or more.

    Raises:
        UsageError: It is none.
    """
    given = text(request, name)
    if not given:
        return default
    if not (given.isascii() and given.isdigit() and int(given[:20]) < _LARGEST):
        raise UsageError(f"{name} is a number, not {given[:60]!r}", name)
    return int(given)


def switch(request: Ask, name: str) -> bool:
    """Whether something was asked for: a box that was ticked."""
    return text(request, name) not in ("", "0", "no", "false", "off")
