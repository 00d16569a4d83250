"""Job selection of archive requests: time spans, job filters, catalog filters and page tokens.

:func:`span` resolves the requested time, :func:`job_filter` builds the filter for jobs.db,
:func:`uses_wanted` the one for the catalog. :func:`every_job` iterates over all matches.
:func:`page_after` and :func:`hits_after` make page tokens; :func:`list_position` and
:func:`hits_place` read them.
"""

import base64
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from steward.archive.catalog.search import Owner, Wanted
from steward.archive.context import Library
from steward.archive.requests import Selection
from steward.core.access import Asker, Scope
from steward.core.errors import UsageError
from steward.jobs import Job, JobFilter, Position
from steward.jobs.filters import name_patterns
from steward.slurm.job_states import selected_states
from steward.slurm.times import parse_time, zone_called

DEFAULT_DAYS: Final = 7
MOST_AT_ONCE: Final = 10_000
_BATCH: Final = 500

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_ListPlace = tuple[Annotated[datetime, msgspec.Meta(tz=True)], _Number, _Number]
_HitPlace = tuple[_Number, str, str]


class PageError(UsageError):
    """Error: an invalid page token."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """Time span of a selection.

    Attributes:
        since: Begin; None for all time.
        until: End; None for now.
        default_days: Length in days if the default was used, else 0.
    """

    since: datetime | None = None
    until: datetime | None = None
    default_days: int = 0


def span(library: Library, wanted: Selection, *, default: bool = True) -> Span:
    """Resolve the time span of a selection.

    Args:
        library: Context with time zones and clock.
        wanted: The selection.
        default: Whether the default span is the last seven days, unless jobs are named.

    Raises:
        TimeError: A time or the zone is invalid.
    """
    name = wanted.zone
    if not name:
        clusters = wanted.clusters or tuple(library.settings.cluster)
        name = library.zone(clusters[0]) if clusters else ""
    zone = zone_called(name)
    now = library.now()
    since = parse_time(wanted.since, now, zone) if wanted.since else None
    until = parse_time(wanted.until, now, zone) if wanted.until else None
    if since is None and default and not wanted.jobs:
        # There is nothing before the first representable days.
        last = until or now
        since = last - min(timedelta(days=DEFAULT_DAYS), last - datetime.min.replace(tzinfo=UTC))
        return Span(since=since, until=until, default_days=DEFAULT_DAYS)
    return Span(since=since, until=until)


def job_filter(
    wanted: Selection,
    when: Span,
    scopes: dict[str, Scope] | None,
    with_script: bool | None = None,
) -> JobFilter:
    """Build the jobs.db filter of a selection, limited to what the user may see.

    Raises:
        StateError: There is no such job state.
    """
    _check_uids(wanted.users)
    return JobFilter(
        clusters=_as_kept(wanted.clusters),
        users=_as_kept(wanted.users),
        accounts=_as_kept(account.lower() for account in wanted.accounts),
        partitions=_as_kept(wanted.partitions),
        names=_as_kept(wanted.names),
        states=tuple(one for state in wanted.states for one in selected_states(state)),
        jobs=wanted.jobs,
        since=when.since,
        until=when.until,
        with_script=with_script,
        scopes=scopes,
    )


def every_job(library: Library, wanted: JobFilter, limit: int = 0) -> Iterator[Job]:
    """Yield all jobs of a filter, newest first, read in batches; at most ``limit``, 0 for all."""
    before: Position | None = None
    count = 0
    while True:
        size = min(_BATCH, limit - count) if limit else _BATCH
        jobs = library.jobs.list(wanted, size, before)
        yield from jobs
        count += len(jobs)
        if len(jobs) < size or (limit and count >= limit):
            return
        before = jobs[-1].position


def uses_wanted(library: Library, asker: Asker, wanted: Selection, when: Span) -> Wanted:
    """Build the catalog filter of a selection, limited to what the user may read.

    The catalog has neither states nor array tasks: :func:`job_filter` filters by these.

    Raises:
        UsageError: A uid is invalid, or there are too many names.
    """
    _check_uids(wanted.users)
    return Wanted(
        owner=_owner(library.scopes(asker, scripts=True)),
        clusters=_as_kept(wanted.clusters),
        users=_as_kept(user for user in wanted.users if not user.isdecimal()),
        uids=tuple(int(user) for user in wanted.users if user.isdecimal()),
        accounts=_as_kept(account.lower() for account in wanted.accounts),
        partitions=_as_kept(wanted.partitions),
        names=name_patterns(_as_kept(wanted.names)),
        since=when.since,
        until=when.until,
    )


def _check_uids(users: Iterable[str]) -> None:
    """Raise UsageError for a uid that is too large."""
    for user in users:
        if user.isdecimal() and (len(user) > 10 or int(user) >= 2**32):
            raise UsageError(f"{user[:20]} is no uid: it is too large", user)


def _as_kept(texts: Iterable[str]) -> tuple[str, ...]:
    """Convert texts to the form of records: bytes that are not UTF-8 become escapes."""
    return tuple(
        text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for text in texts
    )


def _owner(scopes: dict[str, Scope] | None) -> Owner | None:
    """Return the widest owner that the scopes allow; each hit is checked again."""
    if scopes is None or any(scope.everything for scope in scopes.values()):
        return None
    first = next(iter(scopes.values()), Scope())
    accounts = frozenset[str]().union(*(scope.accounts for scope in scopes.values()))
    return Owner(first.uid, first.user, tuple(sorted(accounts)))


def page_after(position: Position) -> str:
    """Return the token of the list page that begins after this job."""
    return _encode((position[0].isoformat(), *position[1:]))


def list_position(page: str) -> Position | None:
    """Return the job after which a list page begins; None for the first page.

    Raises:
        PageError: The token is invalid.
    """
    if not page:
        return None
    position: Position = _decode(page, _ListPlace)
    if position[0].tzinfo != UTC:
        raise _no_page()
    return position


def hits_after(place: tuple[int, str, str]) -> str:
    """Return the token of the page of hits that begins after this use."""
    return _encode(place)


def hits_place(page: str) -> tuple[int, str, str] | None:
    """Return the use after which a page of hits begins; None for the first page.

    Raises:
        PageError: The token is invalid.
    """
    return _decode(page, _HitPlace) if page else None


def limited(limit: int) -> int:
    """Check a limit and return it.

    Raises:
        UsageError: It is out of range.
    """
    if not 1 <= limit <= MOST_AT_ONCE:
        raise UsageError(f"a limit is from 1 to {MOST_AT_ONCE}", limit)
    return limit


def _encode(value: tuple[object, ...]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode("ascii").rstrip("=")


def _decode(page: str, shape: Any) -> Any:
    padded = page.encode("ascii", "replace") + b"=" * (-len(page) % 4)
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(padded), type=shape)
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise _no_page() from error


def _no_page() -> PageError:
    return PageError("no answer gave such a page: begin with the first")
