"""Small files that one process leaves in the state directory for others to read.

Each is whole or not there at all; none of them is needed after a power loss, so
nothing is synced.
"""

import os
from typing import Any, TypeVar

import msgspec

from steward.core.errors import Unavailable

T = TypeVar("T")


class NotLeft(Unavailable):
    """A file cannot be written now."""


def leave(path: str, value: Any) -> None:
    """Write a value down in place of what was there.

    Args:
        path: The file.
        value: A Struct.

    Raises:
        NotLeft: It cannot be written.
    """
    fresh = f"{path}.{os.getpid()}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(value))
        os.replace(fresh, path)
    except OSError as error:
        raise NotLeft(f"cannot write {path}: {error.strerror}", path) from error


def left(path: str, kind: type[T]) -> tuple[T, float] | None:
    """What was left there, and when, seconds since the epoch; None where nothing can be read."""
    try:
        with open(path, "rb") as file:
            at_s = os.fstat(file.fileno()).st_mtime
            return msgspec.json.decode(file.read(), type=kind), at_s
    except (OSError, msgspec.MsgspecError):
        # Nothing was left yet, or by another release: either way nothing is known.
        return None
