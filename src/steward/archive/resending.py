"""The action ``archive.resend``: has a sink archive scripts again, wherever their bytes are now.

What it is told of each script is what jobs.db knows. A purge that jobs.db has
not heard of yet is looked up in the journal, so that no order brings a purged
script back.
"""

from collections.abc import Iterable, Iterator, Sequence

from steward.archive.bulk_answers import Progress
from steward.archive.exporting import scripts_of
from steward.archive.files.places import FilesReader
from steward.archive.library import Library
from steward.archive.remote.records import DUE, WAITING
from steward.archive.remote.records import Records as RemoteRecords
from steward.archive.selecting import job_filter, span
from steward.archive.sink_answers import ResendAnswer, ResendRequest
from steward.archive.upkeep import (
    OrderError,
    only_operators,
    order_event,
    sinks_called,
    tell_refilled,
)
from steward.core.access import Asker
from steward.core.errors import Unavailable, UsageError
from steward.core.events import (
    ARCHIVE_PURGE,
    ARCHIVE_RESEND,
    ArchivePurge,
    ArchiveResend,
    Event,
    Resent,
)
from steward.core.journal import JournalReader
from steward.core.sqlite import SqliteUnavailable
from steward.jobs import Job, JobFilter, Script, identity_of

_SCRIPTS_AN_EVENT = 200
_PURGES_AT_ONCE = 100

Ref = tuple[str, str]
"""(cluster, key): what identifies a script."""


def resend(
    library: Library, asker: Asker, request: ResendRequest
) -> Iterator[Progress | ResendAnswer]:
    """Order a sink to archive scripts again; operators only."""
    only_operators(library, asker, "have scripts archived again", request.clusters)
    known = library.settings.archive.sink
    if not request.sink:
        raise UsageError(f"say which sink with --sink: {', '.join(known)}")
    if request.sink == "catalogue" and request.sink not in known:
        raise UsageError("the catalogue is no sink: 'steward archive reindex' makes it again")
    sinks_called(library, request.sink)
    if library.order is None:
        raise OrderError("nothing can be sent from here: ask the daemon")
    when = span(library, request, default=False)
    wanted = job_filter(request, when, library.scopes(asker, scripts=True))
    reader = JournalReader(library.settings.state_dir)
    return _resend(library, asker, request, wanted, reader)


def _resend(
    library: Library,
    asker: Asker,
    request: ResendRequest,
    wanted: JobFilter,
    reader: JournalReader,
) -> Iterator[Progress | ResendAnswer]:
    present = _Present(library, request.sink) if request.missing else None
    orders = _Orders(library, asker, request.sink, reader)
    found = left_out = 0
    try:
        for scripts in _batches(scripts_of(library, asker, wanted, every=True)):
            lacking = present.without(scripts) if present is not None else scripts
            orders.send(lacking)
            found += len(scripts)
            left_out += len(scripts) - len(lacking)
            yield Progress(done=found)
        if _is_everything(request):
            tell_refilled(library, f"archive.{request.sink}", wanted.since)
    finally:
        if present is not None:
            present.close()
        reader.close()
    yield ResendAnswer(
        sink=request.sink,
        scripts=orders.scripts,
        total_bytes=orders.total_bytes,
        present=left_out,
    )


def _batches(found: Iterable[tuple[Job, Script]]) -> Iterator[list[Script]]:
    batch: list[Script] = []
    for _, script in found:
        batch.append(script)
        if len(batch) == _SCRIPTS_AN_EVENT:
            yield batch
            batch = []
    if batch:
        yield batch


def _is_everything(request: ResendRequest) -> bool:
    """Whether nothing but a beginning bounds what is sent: then it fills every gap since."""
    bounds = (request.clusters, request.users, request.accounts, request.partitions)
    return not any((*bounds, request.jobs, request.names, request.states, request.until))


class _Orders:
    """Appends orders to send again, and takes back what was purged while that was done."""

    def __init__(self, library: Library, asker: Asker, sink: str, reader: JournalReader) -> None:
        self._library = library
        self._asked_by = asker.user or str(asker.uid)
        self._sink = sink
        self._reader = reader
        self._purged: set[Ref] = set()
        # What jobs.db has not heard of yet is read here before jobs.db itself is.
        self._looked_upto = library.jobs.cursor()
        self.scripts = 0
        self.total_bytes = 0

    def send(self, scripts: Sequence[Script]) -> None:
        """Order the sink to archive these again, but for those that were purged.

        Raises:
            JournalUnavailable: The daemon does not run.
        """
        assert self._library.order is not None, "the caller has looked"
        self._look_for_purges()
        left = [script for script in scripts if _ref(script) not in self._purged]
        if not left:
            return
        self._library.order([self._order(*of_cluster) for of_cluster in _by_cluster(left)])
        # A purge that came in between stands before this order in the journal.
        self._look_for_purges()
        late = [script for script in left if _ref(script) in self._purged]
        for cluster, of_cluster in _by_cluster(late):
            keys = tuple(script.key for script in of_cluster)
            body = ArchivePurge(
                script_keys=keys,
                sink=self._sink,
                asked_by=self._asked_by,
                reason="purged while it was being sent again",
            )
            self._library.order([order_event(self._library, cluster, ARCHIVE_PURGE, body, keys)])
        self.scripts += len(left) - len(late)
        self.total_bytes += sum(_bytes_of(script) for script in left if script not in late)

    def _order(self, cluster: str, scripts: Sequence[Script]) -> Event:
        keys = [script.key for script in scripts]
        owners = self._library.jobs.by_script(keys, cluster)
        resent = tuple(
            Resent(
                script_key=script.key,
                script=script.body,
                identity=identity_of(owners[script.key], script.key)
                if script.key in owners
                else None,
            )
            for script in scripts
        )
        body = ArchiveResend(sink=self._sink, scripts=resent, asked_by=self._asked_by)
        return order_event(self._library, cluster, ARCHIVE_RESEND, body, keys)

    def _look_for_purges(self) -> None:
        while True:
            events, upto = self._reader.read(self._looked_upto, {ARCHIVE_PURGE}, _PURGES_AT_ONCE)
            for event in events:
                if isinstance(event.body, ArchivePurge) and event.body.sink in {"", self._sink}:
                    self._purged.update((event.cluster, key) for key in event.body.script_keys)
            self._looked_upto = upto
            if len(events) < _PURGES_AT_ONCE:
                return


class _Present:
    """What a sink is known to have."""

    def __init__(self, library: Library, sink: str) -> None:
        self._files: FilesReader | None = None
        self._sent: RemoteRecords | None = None
        settings = library.settings
        if sink in settings.files_sinks():
            self._files = FilesReader(settings, sink)
            return
        try:
            self._sent = RemoteRecords(f"{settings.state_dir}/archive-{sink}.db", reading=True)
        except Unavailable:
            # It has not run yet, so it has nothing.
            self._sent = None

    def without(self, scripts: Sequence[Script]) -> list[Script]:
        """Those of the scripts that the sink does not have, as far as is known."""
        if self._files is not None:
            return [script for script in scripts if not self._is_filed(self._files, script)]
        if self._sent is None:
            return list(scripts)
        rows = self._sent.rows(map(_ref, scripts))
        had = {ref for ref, row in rows.items() if row.has_bytes or row.state in (WAITING, DUE)}
        had -= {ref for ref, row in rows.items() if row.deleted}
        return [script for script in scripts if _ref(script) not in had]

    @staticmethod
    def _is_filed(files: FilesReader, script: Script) -> bool:
        try:
            return files.locate(script.key, script.cluster) is not None
        except SqliteUnavailable:
            # It has not run yet, so it has nothing; to send again does no harm.
            return False

    def close(self) -> None:
        """Let go of the sink's database."""
        if self._files is not None:
            self._files.close()
        if self._sent is not None:
            self._sent.close()


def _ref(script: Script) -> Ref:
    return script.cluster, script.key


def _by_cluster(scripts: Iterable[Script]) -> list[tuple[str, list[Script]]]:
    found: dict[str, list[Script]] = {}
    for script in scripts:
        found.setdefault(script.cluster, []).append(script)
    return list(found.items())


def _bytes_of(script: Script) -> int:
    kept = (script.body.script, script.body.environment)
    return sum(one.length for one in kept if one is not None)
