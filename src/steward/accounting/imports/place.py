"""Where an import has come to, so that one that was cut short goes on there."""

import os
from typing import Final

import msgspec

from steward.accounting.errors import AccountingError

_MOST: Final = 64


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """An import that was cut short, or is over.

    Attributes:
        name: What was imported, and from when on.
        done: How far it is: of slurmdbd the day, ``2026-11-20``; of a file its bytes or lines.
    """

    name: str
    done: str


def places_path(state_dir: str) -> str:
    """The file that keeps them."""
    return f"{state_dir}/imports.json"


def load(path: str, name: str) -> str:
    """How far an import of this name has come; "" if it has not begun.

    Raises:
        AccountingError: The file cannot be read.
    """
    return next((place.done for place in _all(path) if place.name == name), "")


def save(path: str, place: Place) -> None:
    """Note how far an import has come; of those that are longest ago, some are forgotten.

    Raises:
        AccountingError: The file cannot be written.
    """
    others = [other for other in _all(path) if other.name != place.name]
    data = msgspec.json.encode([*others, place][-_MOST:])
    try:
        fd = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(f"{path}.new", path)
    except OSError as error:
        raise AccountingError(f"{path} cannot be written: {error.strerror}", path) from error


def _all(path: str) -> list[Place]:
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=list[Place])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        raise AccountingError(
            f"{path} cannot be read: {error}; without it imports begin anew, which does no harm",
            path,
        ) from error
