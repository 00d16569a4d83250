"""From what was asked to which jobs: times, states, pages, filters of jobs.db and catalogue."""

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
    """A page that no answer gave."""


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The time that is looked at.

    Attributes:
        since: Its beginning; None for all time.
        until: Its end; None for now.
        default_days: How many days it is, where it was not asked for.
    """

    since: datetime | None = None
    until: datetime | None = None
    default_days: int = 0


def span(library: Library, wanted: Selection, *, default: bool = True) -> Span:
    """The time that a selection means.

    Args:
        library: Knows the clusters' zones and the present time.
        wanted: The selection.
        default: Whether no time means the last seven days, unless jobs are named.

    Raises:
        TimeError: A time or the zone cannot be understood.
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
        # Before the first days that can be written there is nothing.
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
    """The filter of jobs.db for a selection, within what may be seen.

    Raises:
        StateError: There is no such state.
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
    """All jobs of a filter, newest first, read in batches; at most ``limit``, 0 for all."""
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
    """The filter of the catalogue for a selection, within what may be read.

    The catalogue does not know of states and of tasks: :func:`job_filter` does.

    Raises:
        UsageError: A uid is none, or the names are more than may be looked for.
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
    for user in users:
        if user.isdecimal() and (len(user) > 10 or int(user) >= 2**32):
            raise UsageError(f"{user[:20]} is no uid: it is too large", user)


def _as_kept(texts: Iterable[str]) -> tuple[str, ...]:
    """Texts as records have them: bytes that are not UTF-8 are written as escapes."""
    return tuple(
        text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for text in texts
    )


def _owner(scopes: dict[str, Scope] | None) -> Owner | None:
    """The widest that the scopes allow; every hit is decided on by itself besides."""
    if scopes is None or any(scope.everything for scope in scopes.values()):
        return None
    first = next(iter(scopes.values()), Scope())
    accounts = frozenset[str]().union(*(scope.accounts for scope in scopes.values()))
    return Owner(first.uid, first.user, tuple(sorted(accounts)))


def page_after(position: Position) -> str:
    """The name of the page of a list that begins after this job."""
    return _encode((position[0].isoformat(), *position[1:]))


def list_position(page: str) -> Position | None:
    """The job that a page of a list begins after; None for the first page.

    Raises:
        PageError: No answer gave such a page.
    """
    if not page:
        return None
    position: Position = _decode(page, _ListPlace)
    if position[0].tzinfo != UTC:
        raise _no_page()
    return position


def hits_after(place: tuple[int, str, str]) -> str:
    """The name of the page of hits that begins after this use."""
    return _encode(place)


def hits_place(page: str) -> tuple[int, str, str] | None:
    """The use that a page of hits begins after; None for the first page.

    Raises:
        PageError: No answer gave such a page.
    """
    return _decode(page, _HitPlace) if page else None


def limited(limit: int) -> int:
    """A limit that is one.

    Raises:
        UsageError: It is not.
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
