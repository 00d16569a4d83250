"""Words and sizes for people, and text that others chose made fit to print."""

from steward.core.printable import safe, safe_lines

__all__ = ["decode", "number", "safe", "safe_lines", "size"]


def decode(data: bytes) -> str:
    r"""Bytes as text; what is not UTF-8 becomes escapes such as ``\xff``."""
    return data.decode("utf-8", "backslashreplace")


def number(count: int, what: str) -> str:
    """So many of something: ``1 script``, ``2 scripts``."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def size(count: int | None) -> str:
    """A size for people: ``812``, ``1.2K``, ``3.4M``; "" for None."""
    if count is None:
        return ""
    amount = float(count)
    for unit in ("", "K", "M", "G", "T"):
        if amount < 999.5 or unit == "T":
            return f"{count}" if not unit else f"{amount:.1f}{unit}"
        amount /= 1024
    raise AssertionError("the loop ends at its last unit")
