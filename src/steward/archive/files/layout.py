"""Where in the tree a script lies: presets and templates, cut by the cluster's dates.

The preset ``job_archive`` is the tree of NAU's job_archive, ``sarchive`` that of
itkovian's SArchive (its periods are YYYY, YYYYMM and YYYYMMDD): sites that come
from these keep their paths. A script whose user is not known for certain lies
under ``unverified/`` when its layout has a place for the user.
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, tzinfo
from functools import lru_cache, partial
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from steward.archive.errors import LayoutError
from steward.core.config import Settings
from steward.core.config.problems import Problem

LONGEST = 200
"""Longest encoded name in bytes: room is left in NAME_MAX (255) for ids and suffixes."""

RESERVED = frozenset({"unverified"})
"""Directories that Steward itself makes where a user's or cluster's could stand."""

_STRICT = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z0-9_+=@,][A-Za-z0-9_+=@,.:-]*")
_ENCODED = re.compile(rb"%([0-9A-F]{2})")
# "/" and NUL cannot stand in a name; "%" marks our encoding and "~" our suffixes.
_NEVER = frozenset("/%~\\")
_KEPT = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-")


def _byte_text(character: str) -> str:
    # Lone surrogates that do not stand for bytes cannot be encoded otherwise.
    raw = character.encode("utf-8", "surrogatepass")
    if "\udc80" <= character <= "\udcff":
        raw = character.encode("utf-8", "surrogateescape")
    return "".join(f"%{byte:02X}" for byte in raw)


def _cut(encoded: str, original: str, longest: int) -> str:
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    head = encoded.encode("utf-8")[: longest - 17]
    kept = head.decode("utf-8", "ignore")
    # Never cut through an escape: "%4" would read as something else.
    return re.sub(r"%[0-9A-F]?$", "", kept) + "~" + digest


@lru_cache(maxsize=4096)
def encode_name(name: str, *, is_plain: bool = False) -> str:
    """A job's, user's or cluster's name as a part of a path.

    Args:
        name: Any text at all, surrogates for bytes that are not UTF-8 included.
        is_plain: Whether it keeps blanks, quotes and other letters that a path can hold, as
            job_archive and SArchive do.

    Returns:
        At most :data:`LONGEST` bytes without "/", NUL, control or invisible
        characters; no leading "." or "-"; "" for an empty name.
    """
    usual = _PLAIN if is_plain else _STRICT
    if usual.fullmatch(name) and len(name) <= LONGEST and name not in RESERVED:
        return name
    parts = []
    for index, character in enumerate(name):
        first = index == 0 and (character in ".- " or name in RESERVED)
        if is_plain:
            is_kept = character not in _NEVER and character.isprintable()
        else:
            is_kept = character in _KEPT
        if first or not is_kept:
            parts.append(_byte_text(character))
        else:
            parts.append(character)
    encoded = "".join(parts)
    if len(encoded.encode("utf-8")) > LONGEST:
        return _cut(encoded, name, LONGEST)
    return encoded


@lru_cache(maxsize=4096)
def encode_user(name: str, *, is_plain: bool = False) -> str:
    """A user's name as a part of a path; one of digits alone is never taken for a uid."""
    encoded = encode_name(name, is_plain=is_plain)
    if encoded.isdecimal():
        return _byte_text(encoded[0]) + encoded[1:]
    return encoded


def decode_name(encoded: str) -> str:
    """The name that :func:`encode_name` was given; what was cut off stays lost."""
    raw = encoded.encode("utf-8", "surrogateescape")
    raw = _ENCODED.sub(lambda found: bytes((int(found.group(1), 16),)), raw)
    return raw.decode("utf-8", "surrogateescape")


def fit(component: str, longest: int = 240) -> str:
    """A whole path component, cut (with a digest of what it was) if it is too long.

    Args:
        component: Encoded parts put together.
        longest: In bytes; the default leaves room for a suffix below NAME_MAX.
    """
    if len(component) * 4 <= longest or len(component.encode("utf-8")) <= longest:
        return component
    return _cut(component, component, longest)


UNVERIFIED: Final = "unverified"

PRESETS: Final = {
    "default": "{cluster}/{user}/{year}/{month}/{day}/{job_id}-{name}",
    "job_archive": "{user}/{year}/{month}/{job_id}-{name}",
    "sliced": "{cluster}/{slice1}/{slice2}/{job_id}",
}
"""``sarchive`` is not here: its path depends on the period."""

_SARCHIVE = {
    "yearly": "{year}/job.{job_id}_",
    "monthly": "{year}{month}/job.{job_id}_",
    "daily": "{year}{month}{day}/job.{job_id}_",
    "none": "job.{job_id}_",
}
_UNVERIFIED = f"{UNVERIFIED}/{{cluster}}/{{year}}/{{month}}/{{day}}/{{job_id}}-{{name}}"

FIELDS: Final = (
    "cluster",
    "user",
    "year",
    "month",
    "day",
    "hour",
    "job_id",
    "name",
    "slice1",
    "slice2",
    "account",
    "partition",
)
_FROM_IDENTITY = frozenset({"user", "account", "partition"})
_FIELD = re.compile(r"\{([^{}]*)\}")
_OTHERS: Final = frozenset({"job_archive", "sarchive"})
_REMEMBERED = 1024
_QUARTER_NS = 900 * 10**9


class Place(msgspec.Struct, frozen=True):
    """A directory below the archive's root, "" for the root, and a file name without suffix."""

    directory: str
    stem: str


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What a path can be made of.

    Attributes:
        cluster: The cluster's name, as it is.
        job_id: The job's id.
        spool_mtime_ns: The script's time in the spool, ns since the epoch.
        name: The job's name, as it is (claimed or verified).
        user_directory: The user's directory as ``owners`` assigned it: safe already.
        account: The account, as it is.
        partition: The partition, as it is.
    """

    cluster: str
    job_id: int
    spool_mtime_ns: int
    name: str = ""
    user_directory: str = ""
    account: str = ""
    partition: str = ""


@lru_cache(maxsize=64)
def zone(name: str) -> tzinfo | None:
    """The zone called ``name``; None, the system's own, for "".

    Raises:
        LayoutError: There is no such zone.
    """
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise LayoutError(
            f"timezone {name!r} is unknown: use an IANA name such as Europe/Paris", name
        ) from error


@lru_cache(maxsize=512)
def _date_parts(quarter: int, zone_name: str) -> tuple[str, str, str, str]:
    moment = datetime.fromtimestamp(quarter * 900, UTC).astimezone(zone(zone_name))
    return (
        f"{moment.year:04d}",
        f"{moment.month:02d}",
        f"{moment.day:02d}",
        f"{moment.hour:02d}",
    )


class _Template:
    """One compiled template: literal pieces and fields, directory and stem apart."""

    def __init__(self, text: str, *, is_plain: bool) -> None:
        head, _, tail = text.rpartition("/")
        self.directory = _compile(head, is_plain=is_plain)
        self.stem = _compile(tail, is_plain=is_plain)
        # Most directories are those of scripts before: one look-up instead of a rendering.
        self._rendered: dict[tuple[str, ...], str] = {}
        self.directory_fields = frozenset(_FIELD.findall(head))

    def render(self, subject: Subject, zone_name: str) -> Place:
        quarter = subject.spool_mtime_ns // _QUARTER_NS
        dates = _date_parts(quarter, zone_name)
        what = (
            *dates,
            subject.cluster,
            subject.user_directory,
            subject.account,
            subject.partition,
        )
        if self.directory_fields.isdisjoint(("job_id", "name", "slice1", "slice2")):
            found = self._rendered.get(what)
            if found is None:
                if len(self._rendered) >= _REMEMBERED:
                    self._rendered.clear()
                found = self._rendered[what] = self._directory(subject, dates)
            directory = found
        else:
            directory = self._directory(subject, dates)
        return Place(directory, fit(_join(self.stem, subject, dates)))

    def _directory(self, subject: Subject, dates: "_Dates") -> str:
        rendered = _join(self.directory, subject, dates)
        # A field may be empty (a job without a name), but no component may.
        return "/".join([fit(part) or "none" for part in rendered.split("/")]) if rendered else ""


_Dates = tuple[str, str, str, str]
_Part = str | Callable[[Subject, _Dates], str]


def _slice(subject: Subject, place: int) -> str:
    # Reversed slices: the fastest digits come first and fill all directories evenly.
    return f"{subject.job_id // 100**place % 100:02d}"


_RENDER: dict[str, Callable[[Subject, _Dates], str]] = {
    "user": lambda subject, _: subject.user_directory,
    "year": lambda _, dates: dates[0],
    "month": lambda _, dates: dates[1],
    "day": lambda _, dates: dates[2],
    "hour": lambda _, dates: dates[3],
    "job_id": lambda subject, _: str(subject.job_id),
    "slice1": lambda subject, _: _slice(subject, 0),
    "slice2": lambda subject, _: _slice(subject, 1),
}

_NAMES: dict[str, Callable[[Subject, Callable[[str], str]], str]] = {
    "cluster": lambda subject, encode: encode(subject.cluster),
    "name": lambda subject, encode: encode(subject.name),
    # A job without a name gives "123", not "123-", as job_archive has it.
    "-name": lambda subject, encode: "-" + encode(subject.name) if subject.name else "",
    "account": lambda subject, encode: encode(subject.account) or "none",
    "partition": lambda subject, encode: encode(subject.partition) or "none",
}
"""Those that somebody has chosen."""


def _compile(text: str, *, is_plain: bool) -> tuple[_Part, ...]:
    encode = partial(encode_name, is_plain=is_plain)

    def named(field: str) -> _Part:
        render = _NAMES[field]
        return lambda subject, _: render(subject, encode)

    parts: list[_Part] = []
    for index, piece in enumerate(_FIELD.split(text.replace("-{name}", "{-name}"))):
        if index % 2:
            parts.append(_RENDER[piece] if piece in _RENDER else named(piece))
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _join(parts: tuple[_Part, ...], subject: Subject, dates: _Dates) -> str:
    return "".join([part if isinstance(part, str) else part(subject, dates) for part in parts])


class Layout:
    """A compiled layout.

    Attributes:
        name: As configured.
        needs_identity: Whether its paths hold what only Slurm can tell (the user …).
        manifests: Whether its directories carry a manifest.
        suffixes: What follows the stem of a script and of an environment.
        shares: Whether identical files of one user may be one, by link.
        is_plain: Whether names stand in its paths as job_archive and SArchive have them.
        user_depth: Number of directories down to the user's own, itself included; 0
            where no directory is one user's.
    """

    def __init__(
        self, name: str, template: str, suffixes: tuple[str, str], manifests: bool
    ) -> None:
        self.name = name
        self.template = template
        self.suffixes = suffixes
        self.manifests = manifests
        fields = frozenset(_FIELD.findall(template))
        self.needs_identity = bool(fields & _FROM_IDENTITY)
        self.user_depth = 0
        self.user_scope = False
        for depth, component in enumerate(template.split("/")[:-1], start=1):
            self.user_scope = self.user_scope or "{cluster}" in component
            if "{user}" in component:
                self.user_depth = depth
                break
        # Without a manifest a file's own time is all that says when its job came, and
        # without a directory of its owner's each file's ACL is its own.
        self.shares = manifests and self.user_depth > 0
        self.is_plain = name in _OTHERS
        self._template = _Template(template, is_plain=self.is_plain)
        self._unverified = _Template(_UNVERIFIED, is_plain=self.is_plain)

    def place(self, subject: Subject, zone_name: str = "") -> Place:
        """Where a script belongs whose identity is known (or not needed)."""
        return self._template.render(subject, zone_name)

    def unverified_place(self, subject: Subject, zone_name: str = "") -> Place:
        """Where a script lies until Slurm has said whose it is."""
        return self._unverified.render(subject, zone_name)

    def owner_scope(self, cluster: str) -> str:
        """Within what a user's directory name is unique: a cluster, or "" for the whole tree."""
        return cluster if self.user_scope else ""


def compile_layout(text: str, period: str = "yearly") -> Layout:
    """The layout that a configuration names.

    Args:
        text: A preset's name, or a template such as ``{cluster}/{user}/{job_id}-{name}``.
        period: For ``sarchive``: yearly, monthly, daily or none.

    Raises:
        LayoutError: No such preset, an unknown field, or paths that would not be safe.
    """
    if text == "sarchive":
        if period not in _SARCHIVE:
            raise LayoutError(f"period {period!r} is unknown: use {', '.join(_SARCHIVE)}", period)
        return Layout(text, _SARCHIVE[period], ("script", "environment"), manifests=False)
    if text in PRESETS:
        return Layout(text, PRESETS[text], (".sh", ".env"), manifests=text == "default")
    _check(text)
    return Layout(text, text, (".sh", ".env"), manifests=True)


def _check(text: str) -> None:
    if "{" not in text:
        known = "default, job_archive, sarchive, sliced"
        raise LayoutError(
            f"layout {text!r} is unknown: use {known} or a template with {{job_id}}", text
        )
    unknown = [field for field in _FIELD.findall(text) if field not in FIELDS]
    if unknown:
        raise LayoutError(
            f"layout {text!r}: unknown field {{{unknown[0]}}}: the fields are {', '.join(FIELDS)}",
            text,
        )
    if "{" in _FIELD.sub("", text) or "}" in _FIELD.sub("", text):
        raise LayoutError(f"layout {text!r}: a brace is not closed", text)
    components = text.split("/")
    if "{job_id}" not in components[-1]:
        raise LayoutError(
            f"layout {text!r}: the file name must hold {{job_id}}, else two jobs share a file", text
        )
    for component in components:
        if component in {"", ".", "..", "MANIFEST.jsonl"} or component.startswith((".", "-")):
            raise LayoutError(
                f"layout {text!r}: the part {component!r} may not stand in a path", text
            )
        if not component.isprintable() or "~" in component or "\\" in component:
            raise LayoutError(f"layout {text!r}: the part {component!r} has unsafe letters", text)
    if components[0] == UNVERIFIED:
        raise LayoutError(f"layout {text!r}: {UNVERIFIED}/ is where unknown jobs go", text)


def check_layouts(settings: Settings) -> Iterator[Problem]:
    """Yield what is wrong with the layouts of files sinks."""
    for name, sink in settings.files_sinks().items():
        try:
            compile_layout(sink.layout, sink.period)
        except LayoutError as error:
            yield Problem(("archive", "sink", name, "layout"), str(error))
