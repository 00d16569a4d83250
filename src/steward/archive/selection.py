"""Job selection of archive requests: time spans, job filters, catalog filters and page tokens.

:func:`resolve_selection_span` resolves the requested time, :func:`make_job_filter` builds the
filter for jobs.db, :func:`make_use_filter` the one for the catalog. :func:`iterate_jobs` iterates
over all matches. :func:`make_list_page_token` and :func:`make_hits_page_token` make page tokens;
:func:`parse_list_page_token` and :func:`parse_hits_page_token` read them.
"""

import base64
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import msgspec

from steward.archive.catalog.search import OwnerFilter, UseFilter
from steward.archive.context import ArchiveContext
from steward.archive.requests import JobSelection
from steward.core.access import Caller, VisibleJobs
from steward.core.errors import UsageError
from steward.jobs import Job, JobFilter, ListPosition
from steward.jobs.filters import normalize_patterns
from steward.jobs.queries import check_clusters
from steward.slurm.job_states import expand_state_filter
from steward.slurm.times import load_zone, parse_time

DEFAULT_DAYS: Final = 7
_BATCH: Final = 500

_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_ListPlace = tuple[Annotated[datetime, msgspec.Meta(tz=True)], _Number, _Number]
_HitPlace = tuple[_Number, str, str]


class PageError(UsageError):
    """Error: an invalid page token."""


class SelectionSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Time span of a selection.

    Attributes:
        since: Start; None for all time.
        until: End; None for now.
        default_days: Length in days if the default was used, else 0.
    """

    since: datetime | None = None
    until: datetime | None = None
    default_days: int = 0


def resolve_selection_span(
    context: ArchiveContext, selection: JobSelection, *, default: bool = True
) -> SelectionSpan:
    """Resolve the time span of a selection.

    Args:
        context: Context with time zones and clock.
        selection: The selection.
        default: Whether the default span is the last seven days, unless jobs are named.

    Raises:
        TimeError: A time or the zone is invalid.
        UsageError: A cluster does not exist.
    """
    check_clusters(selection.clusters, context.list_clusters())
    name = selection.zone
    if not name:
        clusters = selection.clusters or tuple(context.settings.cluster)
        name = context.get_time_zone(clusters[0]) if clusters else ""
    zone = load_zone(name)
    now = context.now()
    since = parse_time(selection.since, now, zone) if selection.since else None
    until = parse_time(selection.until, now, zone) if selection.until else None
    if since is None and default and not selection.jobs:
        since = (until or now) - timedelta(days=DEFAULT_DAYS)
        return SelectionSpan(since=since, until=until, default_days=DEFAULT_DAYS)
    return SelectionSpan(since=since, until=until)


def make_job_filter(
    selection: JobSelection,
    span: SelectionSpan,
    scopes: dict[str, VisibleJobs] | None,
    with_script: bool | None = None,
) -> JobFilter:
    """Build the jobs.db filter of a selection, limited to what the user may see.

    Raises:
        StateError: There is no such job state.
    """
    _check_uids(selection.users)
    return JobFilter(
        clusters=_escape_texts(selection.clusters),
        users=_escape_texts(selection.users),
        accounts=_escape_texts(account.lower() for account in selection.accounts),
        partitions=_escape_texts(selection.partitions),
        names=_escape_texts(selection.names),
        states=tuple(name for state in selection.states for name in expand_state_filter(state)),
        jobs=selection.jobs,
        since=span.since,
        until=span.until,
        with_script=with_script,
        scopes=scopes,
    )


def iterate_jobs(context: ArchiveContext, job_filter: JobFilter, limit: int = 0) -> Iterator[Job]:
    """Yield all jobs of a filter, newest first, read in batches; at most ``limit``, 0 for all."""
    position: ListPosition | None = None
    count = 0
    while True:
        size = min(_BATCH, limit - count) if limit else _BATCH
        jobs = context.jobs.list(job_filter, size, position)
        yield from jobs
        count += len(jobs)
        if len(jobs) < size or (limit and count >= limit):
            return
        position = jobs[-1].position


def make_use_filter(
    context: ArchiveContext, caller: Caller, selection: JobSelection, span: SelectionSpan
) -> UseFilter:
    """Build the catalog filter of a selection, limited to what the user may read.

    The catalog has neither states nor array tasks: :func:`make_job_filter` filters by these.

    Raises:
        UsageError: A uid is invalid, or there are too many names.
    """
    _check_uids(selection.users)
    return UseFilter(
        owner=_find_widest_owner(context.get_visible_jobs(caller, scripts=True)),
        clusters=_escape_texts(selection.clusters),
        users=_escape_texts(user for user in selection.users if not user.isdecimal()),
        uids=tuple(int(user) for user in selection.users if user.isdecimal()),
        accounts=_escape_texts(account.lower() for account in selection.accounts),
        partitions=_escape_texts(selection.partitions),
        names=normalize_patterns(_escape_texts(selection.names)),
        since=span.since,
        until=span.until,
    )


def _check_uids(users: Iterable[str]) -> None:
    """Raise UsageError for a uid that is too large."""
    for user in users:
        if user.isdecimal() and (len(user) > 10 or int(user) >= 2**32):
            raise UsageError(f"invalid uid {user[:20]}: too large", user)


def _escape_texts(texts: Iterable[str]) -> tuple[str, ...]:
    """Convert texts to the form of records: bytes that are not UTF-8 become escapes."""
    return tuple(
        text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for text in texts
    )


def _find_widest_owner(scopes: dict[str, VisibleJobs] | None) -> OwnerFilter | None:
    """Return the widest owner that the scopes allow; each hit is checked again."""
    if scopes is None or any(scope.everything for scope in scopes.values()):
        return None
    first = next(iter(scopes.values()), VisibleJobs())
    accounts = frozenset[str]().union(*(scope.accounts for scope in scopes.values()))
    return OwnerFilter(first.uid, first.user, tuple(sorted(accounts)))


def make_list_page_token(position: ListPosition) -> str:
    """Return the token of the list page that begins after this job."""
    return _encode_page_token((position[0].isoformat(), *position[1:]))


def parse_list_page_token(page: str) -> ListPosition | None:
    """Return the job after which a list page begins; None for the first page.

    Raises:
        PageError: The token is invalid.
    """
    if not page:
        return None
    position: ListPosition = _decode_page_token(page, _ListPlace)
    if position[0].tzinfo != UTC:
        raise _make_page_error()
    return position


def make_hits_page_token(position: tuple[int, str, str]) -> str:
    """Return the token of the page of hits that begins after this use."""
    return _encode_page_token(position)


def parse_hits_page_token(page: str) -> tuple[int, str, str] | None:
    """Return time, key and cluster of the hit before a page; None for the first page.

    Raises:
        PageError: The token is invalid.
    """
    return _decode_page_token(page, _HitPlace) if page else None


def _encode_page_token(value: tuple[object, ...]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(value)).decode("ascii").rstrip("=")


def _decode_page_token(page: str, shape: Any) -> Any:
    padded = page.encode("ascii", "replace") + b"=" * (-len(page) % 4)
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(padded), type=shape)
    except (ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise _make_page_error() from error


def _make_page_error() -> PageError:
    return PageError("invalid page token: begin with the first page")
