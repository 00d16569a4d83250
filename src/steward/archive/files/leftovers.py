"""Copies in the tree that files are moved on to, of what may not be moved any more.

What is purged while it is copied must not be left there, by a crash neither: the
rows of what is being copied are written down before it begins.
"""

import os
from collections.abc import Sequence

import msgspec

from steward.archive.files.manifest import Manifests
from steward.archive.files.packing import plain_name
from steward.archive.files.pending import clear_out
from steward.archive.files.placing import digest
from steward.archive.files.purging import forget_lines
from steward.archive.files.records import Records, Row
from steward.archive.files.tree import Tree
from steward.core.events import utc_now

_row_decoder = msgspec.json.Decoder(Row)


class Leftovers:
    """Removes copies.

    Args:
        tree: The tree that files are moved on to.
        records: The sink's database, for that tree.
        manifests: The tree's manifests.
    """

    def __init__(self, tree: Tree, records: Records, manifests: Manifests) -> None:
        self._tree = tree
        self._records = records
        self._manifests = manifests

    def remove(self, copies: Sequence[Row]) -> None:
        """Remove copies of what was changed or purged while it was copied.

        Raises:
            OSError: The tree cannot be written.
        """
        for copy in copies:
            path = self._records.directory(copy.directory)
            for name in (copy.script_name, copy.env_name):
                if name:
                    self._tree.unlink(path, name)
        forget_lines(copies, self._records, self._manifests, None, utc_now())
        clear_out(self._tree, self._records, {copy.directory for copy in copies})

    def after_a_crash(self) -> None:
        """Remove copies of what was purged while it was being copied, when a crash came.

        Raises:
            OSError: The tree cannot be written.
        """
        found = self._records.query("SELECT row FROM moving")
        if not found:
            return
        rows = [_row_decoder.decode(row) for (row,) in found]
        now = self._records.rows([(row.cluster, row.key) for row in rows])
        for row in rows:
            if (row.cluster, row.key) in now:
                continue
            path = self._records.directory(row.directory)
            for name, sha in ((row.script_name, row.script_sha), (row.env_name, row.env_sha)):
                if name and sha:
                    self._remove_copies(row, path, name, sha)
            forget_lines([row], self._records, self._manifests, None, utc_now())
            clear_out(self._tree, self._records, {row.directory})
        with self._records.writing() as connection:
            connection.execute("DELETE FROM moving")

    def _remove_copies(self, row: Row, path: str, name: str, sha: bytes) -> None:
        try:
            fd = self._tree.directory(path)
            names = os.listdir(fd)
        except FileNotFoundError:
            return
        plain = plain_name(name)
        stem = plain.rpartition(".")[0] if plain.endswith((".sh", ".env")) else plain
        for there in names:
            if (
                there.startswith(stem)
                and not self._records.claimed(row.job_id, row.key, row.directory, there)
                and digest(fd, there) == sha
            ):
                self._tree.unlink(path, there)
