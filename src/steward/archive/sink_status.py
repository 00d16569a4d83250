"""How each sink stands: from the journal, the configuration, and the sink's own database.

All three are read without the daemon, so that a site can look at what stopped it.
"""

from datetime import UTC, datetime, timedelta

import msgspec

from steward.archive.files.records import WAITING
from steward.archive.files.records import Records as FilesRecords
from steward.archive.library import Library
from steward.archive.remote.records import Records as RemoteRecords
from steward.archive.remote.sink import RemoteSink
from steward.archive.settings import FilesSinkSettings
from steward.archive.sink_answers import SinkLine, SinksAnswer, SinksRequest, State
from steward.archive.upkeep import only_operators
from steward.core.access import Asker
from steward.core.config import Settings
from steward.core.errors import Unavailable
from steward.core.journal import ConsumerStatus, JournalReader, refill_command

_PREFIX = "archive."


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What a sink says of itself.

    Attributes:
        cursor: The last event that it put to use or took in.
        scripts: How many scripts it took in and has not archived yet.
        since_ns: Since when it has the oldest of them, ns since the epoch.
    """

    cursor: int = 0
    scripts: int = 0
    since_ns: int | None = None


def sinks(library: Library, asker: Asker, _request: SinksRequest) -> SinksAnswer:
    """How each sink stands; operators only."""
    only_operators(library, asker, "look at the sinks")
    configured = library.settings.archive.sink
    reader = JournalReader(library.settings.state_dir)
    try:
        known = {
            one.name.removeprefix(_PREFIX): one
            for one in reader.consumers()
            if one.name.startswith(_PREFIX)
        }
        names = [*configured, *(name for name in known if name not in configured)]
        lines = tuple(_line(library, reader, name, known.get(name)) for name in names)
    finally:
        reader.close()
    return SinksAnswer(sinks=lines)


def _line(
    library: Library, reader: JournalReader, name: str, status: ConsumerStatus | None
) -> SinkLine:
    of = library.settings.archive.sink.get(name)
    held = held_by(library.settings, name) if of is not None else Held()
    # Its own cursor is the truth, but is not moved for what is none of its business.
    after = max(held.cursor, status.position) if status is not None else held.cursor
    backlog = reader.backlog(name, after, RemoteSink.kinds)
    since = [backlog.oldest] if backlog.oldest else []
    if held.since_ns is not None:
        since.append(datetime.fromtimestamp(held.since_ns / 1e9, UTC))
    line = SinkLine(
        name=name,
        kind=of.kind if of is not None else "",
        state="new",
        backlog=backlog.scripts + held.scripts,
        behind=backlog.events + held.scripts,
        oldest_s=max(timedelta(), library.now() - min(since)).total_seconds() if since else None,
    )
    if status is None:
        return line
    return msgspec.structs.replace(
        line,
        state=_state(status, is_configured=of is not None),
        detail=status.detail,
        position=status.position,
        error=status.error,
        error_at=datetime.fromtimestamp(status.error_at, UTC) if status.error_at else None,
        rate=status.rate,
        set_aside=status.dead,
        missed=status.missed,
        refill=refill_command(status.name, status.missed_from) if status.missed else "",
    )


def _state(status: ConsumerStatus, *, is_configured: bool) -> State:
    if not is_configured:
        return "removed"
    if status.detached:
        return "detached"
    return "running" if status.state == "running" else "waiting"


def held_by(settings: Settings, name: str) -> Held:
    """What the sink of that name says of itself; nothing before it has run."""
    if isinstance(settings.archive.sink[name], FilesSinkSettings):
        try:
            files = FilesRecords(settings, name, reading=True)
        except Unavailable:
            return Held()
        try:
            ((scripts, since_ns),) = files.query(
                "SELECT count(*), min(since_ns) FROM script WHERE state = ?", WAITING
            )
            return Held(cursor=files.cursor(), scripts=scripts, since_ns=since_ns)
        finally:
            files.close()
    try:
        remote = RemoteRecords(f"{settings.state_dir}/archive-{name}.db", reading=True)
    except Unavailable:
        return Held()
    try:
        scripts, since_ns = remote.held()
        return Held(cursor=remote.cursor(), scripts=scripts, since_ns=since_ns)
    finally:
        remote.close()
