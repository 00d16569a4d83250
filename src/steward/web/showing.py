"""Plain values as pages show them."""

from typing import Any, Final

import msgspec

_LONGEST: Final = 20_000


def pretty(value: Any) -> str:
    """A value as indented JSON, cut where it is very long; "" for none."""
    if value is None or value in ({}, []):
        return ""
    text = msgspec.json.format(msgspec.json.encode(value)).decode()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}\n[…]"
