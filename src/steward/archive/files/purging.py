"""Forgetting scripts: their files, and every line that a manifest has about them."""

import errno
from collections.abc import Iterable
from datetime import datetime

import msgspec

from steward.archive.files.manifest import VERSION, Fact, Manifests, line
from steward.archive.files.packing import other_name
from steward.archive.files.pending import WAITING_DIRECTORY, Pending
from steward.archive.files.placing import digest, is_file
from steward.archive.files.records import MOVED, WAITING, Records, Ref, Row
from steward.archive.files.tree import InTheWay, Tree
from steward.core.events import ArchivePurge, Event, JobScript
from steward.core.incoming import kept_filename, parse_kept_filename

_body_decoder = msgspec.json.Decoder(JobScript)


def purge(
    event: Event, pending: Pending, tree: Tree, records: Records, manifests: Manifests
) -> None:
    """Forget the scripts that an archive.purge event names, as far as they are in this tree.

    Raises:
        InTheWay: Something that is no file of ours is in the place of one.
        OSError: The tree cannot be written.
    """
    body: ArchivePurge = event.body
    # Lines about them may still wait to be appended.
    manifests.flush()
    gone: list[Row] = []
    removed: dict[Ref, Row] = {}
    for key in body.script_keys:
        row = pending.rows.get((event.cluster, key))
        if row is None:
            continue
        if row.state == MOVED:
            # The files are the mover's to remove; lines about them may still be here.
            pending.later.append((event.kind, key, event.cluster, msgspec.json.encode(body)))
            gone.append(row)
            continue
        _remove_files(row, tree, records)
        removed[event.cluster, key] = row
        if row.directory:
            gone.append(row)
    try:
        forget_lines(gone, records, manifests, body.asked_by, pending.now)
    except OSError as error:
        if error.errno not in {errno.EISDIR, errno.ELOOP}:
            raise
        raise InTheWay(
            f"a manifest below {tree.root} that names what is to be purged is no file "
            f"({error.strerror}): move away what is there",
            tree.root,
        ) from error
    # Last: a purge that fails half way is asked for again, and must find its rows.
    for ref, row in removed.items():
        pending.delete(ref)
        if row.directory:
            pending.left.add(row.directory)


def _remove_files(row: Row, tree: Tree, records: Records) -> None:
    if row.state == WAITING:
        body = _body_decoder.decode(row.body) if row.body else None
        for kept in (body.script, body.environment) if body else ():
            if kept is not None:
                _remove(tree, WAITING_DIRECTORY, kept.path)
        return
    path = records.directory(row.directory)
    for name, sha in ((row.script_name, row.script_sha), (row.env_name, row.env_sha)):
        if name:
            _remove(tree, path, name)
            _remove_twin(row, tree, records, other_name(name), sha)


def _remove_twin(row: Row, tree: Tree, records: Records, name: str, sha: bytes | None) -> None:
    """Remove what a crash, and another setting since, may have left of a script."""
    path = records.directory(row.directory)
    try:
        fd = tree.directory(path)
    except FileNotFoundError:
        return
    if (
        is_file(fd, name)
        and not records.claimed(row.job_id, row.key, row.directory, name)
        and digest(fd, name) == sha
    ):
        tree.unlink(path, name)


def _remove(tree: Tree, path: str, name: str) -> None:
    try:
        tree.unlink(path, name)
    except IsADirectoryError as error:
        raise InTheWay(
            f"{tree.root}/{path}/{name} is a directory, not the file that is to be purged: "
            "move it away",
            path,
        ) from error


def incoming_names(event: Event, pending: Pending) -> list[str]:
    """Names, in a store, of the bytes of the scripts that an archive.purge event names."""
    names: set[str] = set()
    for key in event.body.script_keys:
        ref = (event.cluster, key)
        row = pending.rows.get(ref)
        if row is None:
            continue
        body = pending.fresh.get(ref)
        if body is None and row.body:
            body = _body_decoder.decode(row.body)
        if body is not None:
            names.update(kept.path for kept in (body.script, body.environment) if kept)
            continue
        of = (row.cluster, row.job_id, row.mtime_ns)
        if row.script_sha is not None:
            names.add(kept_filename(*of, row.script_length, "script"))
        if row.env_sha is not None:
            names.add(kept_filename(*of, row.env_length, "env"))
    return sorted(name for name in names if parse_kept_filename(name))


def forget_lines(
    rows: Iterable[Row],
    records: Records,
    manifests: Manifests,
    asked_by: str | None,
    now: datetime,
) -> None:
    """Take every line about scripts out of the manifests of all directories that they were in.

    Args:
        rows: The scripts.
        records: The sink's database.
        manifests: Of the tree.
        asked_by: Who had them purged; None if they were not, and nothing is to be said.
        now: The present moment.

    Raises:
        OSError: A manifest cannot be rewritten.
    """
    keys: dict[str, list[str]] = {}
    told: dict[str, list[bytes]] = {}
    for row in rows:
        path = records.directory(row.directory)
        fact = Fact(
            fact="purged",
            key=row.key,
            version=VERSION,
            cluster=row.cluster,
            at=now,
            asked_by=asked_by or "",
        )
        if asked_by is not None:
            told.setdefault(path, []).append(line(fact))
        for number in (row.directory, *earlier(row)):
            keys.setdefault(records.directory(number), []).append(row.key)
    for path, forgotten in keys.items():
        manifests.forget(path, forgotten, told.get(path, []))


def earlier(row: Row) -> list[int]:
    """Numbers of the directories in which a script lay before."""
    return [int(number) for number in row.came_from.split(",") if number]
