"""What the files of each holder take: sums that change in the transaction that changes a row.

Files that may be shared by link count once a holder, kind and tree, all others
each by itself; a size is that of the plain bytes. So the sums are right after
any crash, and a limit is looked at without a walk.
"""

import struct

from steward.archive.files.records import Row, known_contents
from steward.core.sqlite import Connection

_ENVIRONMENT, _MOVED = 1, 2

_ADD = "INSERT INTO content VALUES (?, ?, ?, ?, ?)"
_MORE = "UPDATE content SET uses = uses + ?, job_id = ? WHERE number = ?"
_LESS = "UPDATE content SET uses = uses - ? WHERE number = ?"
_NONE = "DELETE FROM content WHERE number = ? AND uses <= 0"

# Fibonacci hashing: 2**64 divided by the golden ratio.
_SPREAD = 0x9E3779B97F4A7C15
_unpack = struct.Struct("<Q").unpack_from


def content(holder: int, sha: bytes, *, environment: bool, moved: bool) -> int:
    """The number under which bytes are counted once, of 64 bits, as SQLite is quickest with.

    It is made of their SHA-256, and could be met by intent: who does so is counted
    less. Whoever links to a file compares all of its SHA-256.

    Args:
        holder: Whom they are counted for.
        sha: SHA-256 of the plain bytes.
        environment: It is an environment, not a script.
        moved: It is in the tree that files are moved on to.
    """
    place = 4 * holder + (_MOVED if moved else 0) + (_ENVIRONMENT if environment else 0)
    begin: int = _unpack(sha)[0]
    return ((begin + place * _SPREAD) & 0xFFFFFFFFFFFFFFFF) - (1 << 63)


class Counts:
    """The changes of one transaction."""

    def __init__(self) -> None:
        self._more: dict[int, tuple[int, int, int, int]] = {}
        self._less: dict[int, int] = {}
        self._own: dict[int, int] = {}

    def add(self, row: Row, *, moved: bool) -> None:
        """A script is there now."""
        if row.holder is None:
            return
        if not row.shared:
            length = row.script_length + row.env_length
            self._own[row.holder] = self._own.get(row.holder, 0) + length
            return
        if row.script_sha is not None:
            number = content(row.holder, row.script_sha, environment=False, moved=moved)
            self._use(number, row.holder, row.script_length, row.job_id)
        if row.env_sha is not None:
            number = content(row.holder, row.env_sha, environment=True, moved=moved)
            self._use(number, row.holder, row.env_length, row.job_id)

    def _use(self, number: int, holder: int, length: int, job_id: int) -> None:
        known = self._more.get(number)
        self._more[number] = (holder, known[1] + 1 if known else 1, length, job_id)

    def remove(self, row: Row, *, moved: bool) -> None:
        """A script is there no more."""
        if row.holder is None:
            return
        if not row.shared:
            length = row.script_length + row.env_length
            self._own[row.holder] = self._own.get(row.holder, 0) - length
            return
        for sha, environment in ((row.script_sha, False), (row.env_sha, True)):
            if sha is not None:
                number = content(row.holder, sha, environment=environment, moved=moved)
                self._less[number] = self._less.get(number, 0) + 1

    def change(self, before: Row | None, after: Row, *, moved: bool) -> None:
        """A script that was as ``before``, if it was there at all, is as ``after``."""
        if before is not None:
            if (before.holder, before.shared) == (after.holder, after.shared):
                return
            self.remove(before, moved=moved)
        self.add(after, moved=moved)

    def write(self, connection: Connection) -> None:
        """Write the changes, inside the transaction that writes the rows."""
        # First what comes: what only changes its holder's account is never gone in between.
        # By key, so that neighbours meet the same page.
        numbers = sorted(self._more)
        known = known_contents(connection, numbers)
        new = [number for number in numbers if number not in known]
        connection.executemany(_ADD, [(number, *self._more[number]) for number in new])
        for number in new:
            holder, _, length, _ = self._more[number]
            self._own[holder] = self._own.get(holder, 0) + length
        again = [(number, self._more[number]) for number in numbers if number in known]
        connection.executemany(
            _MORE, [(uses, job_id, number) for number, (_, uses, _, job_id) in again]
        )
        if self._less:
            gone = sorted(self._less)
            connection.executemany(_LESS, [(self._less[number], number) for number in gone])
            connection.executemany(_NONE, [(number,) for number in gone])
        connection.executemany(
            "UPDATE holder SET bytes = bytes + ? WHERE number = ?",
            [(length, holder) for holder, length in self._own.items() if length],
        )
