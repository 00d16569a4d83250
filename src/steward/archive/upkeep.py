"""The operators' actions: verify, purge, reindex."""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from steward.archive.bulk_answers import (
    ProblemLine,
    Progress,
    PurgeAnswer,
    PurgeLine,
    PurgeRequest,
    ReindexAnswer,
    ReindexRequest,
    VerifyAnswer,
    VerifyRequest,
)
from steward.archive.catalog.reindexing import Reindexing
from steward.archive.exporting import scripts_of
from steward.archive.files.verify import Checked, trees_to_verify
from steward.archive.library import Library
from steward.archive.selecting import job_filter, span
from steward.core.access import Asker
from steward.core.errors import Refused, StewardError, Unavailable, UsageError
from steward.core.events import ARCHIVE_PURGE, ArchivePurge, ArchiveResend, Event
from steward.core.journal import JournalReader
from steward.jobs import Job, Script

log = logging.getLogger(__name__)

_KEYS_AN_EVENT = 1000
_LONGEST_REASON = 1000


class OperatorsOnly(Refused):
    """The asker is no operator."""


class OrderError(StewardError):
    """Nothing can be ordered from here."""


def verify_sinks(
    library: Library, asker: Asker, request: VerifyRequest
) -> Iterator[ProblemLine | Progress | VerifyAnswer]:
    """Recompute every checksum; operators only."""
    only_operators(library, asker, "verify the archive")
    return _verify(library, _trees(library, request.sink))


def reindex(
    library: Library, asker: Asker, request: ReindexRequest
) -> Iterator[Progress | ReindexAnswer]:
    """Make the catalogue again from the files; operators only."""
    only_operators(library, asker, "make the catalogue again")
    sinks = _trees(library, request.sink)
    if not sinks:
        raise UsageError("there is no sink of files, from which a catalogue could be made")
    return _reindex(library, Reindexing(library.settings, sinks[0]).run())


def _reindex(
    library: Library, items: Iterator[Progress | ReindexAnswer]
) -> Iterator[Progress | ReindexAnswer]:
    for item in items:
        if isinstance(item, ReindexAnswer):
            try:
                tell_refilled(library, "catalogue", None)
            except Unavailable as error:
                # The catalogue is complete; that the journal goes on to advise it does no harm.
                log.debug("the journal was not told of the new catalogue: %s", error)
        yield item


def tell_refilled(library: Library, consumer: str, since: datetime | None) -> None:
    """Have the journal know that a consumer gets again what it missed, if it missed anything.

    Args:
        library: Knows the way to the journal.
        consumer: The consumer's name.
        since: Submit time of the oldest job that it gets again; None for all of them.

    Raises:
        Unavailable: The journal cannot be told now.
    """
    reader = JournalReader(library.settings.state_dir)
    try:
        missed = any(one.missed for one in reader.consumers() if one.name == consumer)
    finally:
        reader.close()
    if missed and library.refilled is not None:
        library.refilled(consumer, int(since.timestamp()) if since else 0)


def purge(library: Library, asker: Asker, request: PurgeRequest) -> PurgeAnswer:
    """Order scripts to be forgotten, or say which would be; operators only."""
    only_operators(library, asker, "purge scripts", request.clusters)
    if not request.jobs and not request.users:
        raise UsageError("say whose scripts are to be purged: jobs or users")
    if request.sink:
        sinks_called(library, request.sink)
    when = span(library, request, default=False)
    wanted = job_filter(request, when, library.scopes(asker, scripts=True))
    found = list(scripts_of(library, asker, wanted, every=True))
    lines = tuple(
        PurgeLine(
            job=library.line(asker, job, script),
            script=library.script_line(script, request.sink),
        )
        for job, script in found
    )
    if request.yes and found:
        if library.order is None:
            raise OrderError("nothing can be purged from here: ask the daemon")
        library.order(_orders(library, asker, request, found))
    sizes = ((line.script.length or 0) + (line.script.environment_length or 0) for line in lines)
    return PurgeAnswer(
        done=request.yes,
        scripts=lines,
        total_bytes=sum(sizes),
        sinks=tuple(sinks_called(library, request.sink)),
    )


def _orders(
    library: Library, asker: Asker, request: PurgeRequest, found: Sequence[tuple[Job, Script]]
) -> list[Event]:
    keys: dict[str, list[str]] = {}
    for _, script in found:
        keys.setdefault(script.cluster, []).append(script.key)
    events = []
    for cluster, of_cluster in keys.items():
        for first in range(0, len(of_cluster), _KEYS_AN_EVENT):
            body = ArchivePurge(
                script_keys=tuple(of_cluster[first : first + _KEYS_AN_EVENT]),
                sink=request.sink,
                asked_by=asker.user or str(asker.uid),
                reason=request.reason[:_LONGEST_REASON],
            )
            events.append(order_event(library, cluster, ARCHIVE_PURGE, body, body.script_keys))
    return events


def order_event(
    library: Library,
    cluster: str,
    kind: str,
    body: ArchivePurge | ArchiveResend,
    script_keys: Sequence[str],
) -> Event:
    """The event of an order about scripts; each is one of its own, to be given as often as wanted.

    Args:
        library: Knows the present time.
        cluster: The scripts' cluster.
        kind: ``archive.purge`` or ``archive.resend``.
        body: The order.
        script_keys: Keys of the scripts.
    """
    now = library.now()
    verb = kind.rpartition(".")[2]
    digest = hashlib.sha256("\n".join(script_keys).encode()).hexdigest()[:16]
    return Event(
        kind=kind,
        cluster=cluster,
        key=f"{verb}:{time.time_ns()}:{digest}",
        at=now,
        seen_at=now,
        source=verb,
        body=body,
    )


def _verify(
    library: Library, sinks: Sequence[str]
) -> Iterator[ProblemLine | Progress | VerifyAnswer]:
    problems = files = total_bytes = 0
    for sink in sinks:
        for tree in trees_to_verify(library.settings, sink):
            so_far = Checked(files=0, total_files=0, total_bytes=0)
            for item in tree:
                if isinstance(item, Checked):
                    so_far = item
                    yield Progress(done=item.files, total=item.total_files, what="files")
                    continue
                problems += 1
                yield ProblemLine(
                    sink=sink,
                    problem=item.kind,
                    path=item.path,
                    script_key=item.script_key,
                    detail=item.detail,
                )
            files += so_far.files
            total_bytes += so_far.total_bytes
    yield VerifyAnswer(files=files, total_bytes=total_bytes, problems=problems)


def sinks_called(library: Library, name: str) -> list[str]:
    """The sink of that name, or all of them.

    Raises:
        UsageError: No sink is called so.
    """
    names = list(library.settings.archive.sink)
    if name and name not in names:
        raise UsageError(f"no sink is called {name!r}; there is {', '.join(names)}", name)
    return [name] if name else names


def _trees(library: Library, name: str) -> list[str]:
    """The sink of files of that name, or all of them."""
    trees = library.settings.files_sinks()
    sinks = [sink for sink in sinks_called(library, name) if sink in trees]
    if name and not sinks:
        raise UsageError(f"sink {name!r} is none of files, so nothing can be read there", name)
    return sinks


def only_operators(library: Library, asker: Asker, what: str, clusters: Sequence[str] = ()) -> None:
    """Let operators pass, of these clusters or of all.

    Raises:
        OperatorsOnly: The asker is none.
    """
    is_operator = (
        all(library.access.is_operator(asker, cluster) for cluster in clusters)
        if clusters
        else library.is_operator(asker)
    )
    if not is_operator:
        raise OperatorsOnly(f"only operators may {what}", asker)
