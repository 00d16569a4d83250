"""Archive layout: directory and file names of scripts, from presets or templates.

:func:`encode_name` and :func:`encode_user` make names safe in paths; :func:`decode_name` reverses
them.

:func:`compile_layout` makes an :class:`ArchiveLayout` from a preset or a template;
:meth:`ArchiveLayout.make_place` renders the :class:`ArchivePlace` of a :class:`PathSubject` with
the dates of the cluster's time zone. The preset ``job_archive`` is the tree of NAU's job_archive,
``sarchive`` that of itkovian's SArchive (its periods are YYYY, YYYYMM and YYYYMMDD): sites that
used these keep their paths. A script whose user is unconfirmed goes to ``unverified/`` if its
layout has a place for the user.
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
from steward.core.config.problems import ConfigProblem

MAX_ENCODED_NAME_BYTES = 200
"""Size limit of an encoded name, in bytes: leaves room within NAME_MAX (255) for ids and suffixes.
"""

RESERVED = frozenset({"unverified"})
"""Directories of Steward's own, at places where a user's or cluster's name could be."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_+][A-Za-z0-9._+-]*", re.ASCII)
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_+=@,][A-Za-z0-9_+=@,.:-]*")
_ENCODED = re.compile(rb"%([0-9A-F]{2})")
# A name cannot contain "/" and NUL; "%" marks this encoding and "~" Steward's suffixes.
_UNSAFE_CHARACTERS = frozenset("/%~\\")
_SAFE_CHARACTERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._+-")


def _escape_character(character: str) -> str:
    """Escape a character as %XX per byte."""
    # Lone surrogates that do not represent bytes have no other encoding.
    raw = character.encode("utf-8", "surrogatepass")
    if "\udc80" <= character <= "\udcff":
        raw = character.encode("utf-8", "surrogateescape")
    return "".join(f"%{byte:02X}" for byte in raw)


def _shorten_with_digest(encoded: str, original: str, max_bytes: int) -> str:
    """Shorten an encoded name to a size limit, with a digest of the original."""
    digest = hashlib.sha256(original.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    head = encoded.encode("utf-8")[: max_bytes - 17]
    shortened = head.decode("utf-8", "ignore")
    # Never cut an escape in two: "%4" would have another meaning.
    return re.sub(r"%[0-9A-F]?$", "", shortened) + "~" + digest


@lru_cache(maxsize=4096)
def encode_name(name: str, *, is_plain: bool = False) -> str:
    """Encode a job, user or cluster name as part of a path.

    Args:
        name: Any text, surrogates for bytes that are not UTF-8 included.
        is_plain: Whether to keep blanks, quotes and other characters that a path may contain, as
            job_archive and SArchive do.

    Returns:
        At most :data:`MAX_ENCODED_NAME_BYTES` bytes without "/", NUL, control or invisible
        characters; no leading "." or "-"; "" for an empty name.
    """
    safe_pattern = _PLAIN_NAME if is_plain else _SAFE_NAME
    if (
        safe_pattern.fullmatch(name)
        and len(name) <= MAX_ENCODED_NAME_BYTES
        and name not in RESERVED
    ):
        return name
    parts = []
    for index, character in enumerate(name):
        is_reserved = index == 0 and (character in ".- " or name in RESERVED)
        if is_plain:
            is_safe = character not in _UNSAFE_CHARACTERS and character.isprintable()
        else:
            is_safe = character in _SAFE_CHARACTERS
        if is_reserved or not is_safe:
            parts.append(_escape_character(character))
        else:
            parts.append(character)
    encoded = "".join(parts)
    if len(encoded.encode("utf-8")) > MAX_ENCODED_NAME_BYTES:
        return _shorten_with_digest(encoded, name, MAX_ENCODED_NAME_BYTES)
    return encoded


@lru_cache(maxsize=4096)
def encode_user(name: str, *, is_plain: bool = False) -> str:
    """Encode a user name as part of a path; a name of digits cannot be mistaken for a uid."""
    encoded = encode_name(name, is_plain=is_plain)
    if encoded.isdecimal():
        return _escape_character(encoded[0]) + encoded[1:]
    return encoded


def decode_name(encoded: str) -> str:
    """Decode a name of :func:`encode_name`, except a part that was cut off."""
    raw = encoded.encode("utf-8", "surrogateescape")
    raw = _ENCODED.sub(lambda match: bytes((int(match.group(1), 16),)), raw)
    return raw.decode("utf-8", "surrogateescape")


def shorten_component(component: str, max_bytes: int = 240) -> str:
    """Cut a path component to a size limit, with a digest of the whole.

    Args:
        component: Encoded parts, joined.
        max_bytes: Size limit in bytes; the default leaves room for a suffix within NAME_MAX.
    """
    if len(component) * 4 <= max_bytes or len(component.encode("utf-8")) <= max_bytes:
        return component
    return _shorten_with_digest(component, component, max_bytes)


UNVERIFIED: Final = "unverified"

PRESETS: Final = {
    "default": "{cluster}/{user}/{year}/{month}/{day}/{job_id}-{name}",
    "job_archive": "{user}/{year}/{month}/{job_id}-{name}",
    "sliced": "{cluster}/{slice1}/{slice2}/{job_id}",
}
"""Templates of the presets; ``_SARCHIVE`` has those of SArchive, whose file names differ."""

_SARCHIVE = {
    "sarchive": "{year}/job.{job_id}_",
    "sarchive-monthly": "{year}{month}/job.{job_id}_",
    "sarchive-daily": "{year}{month}{day}/job.{job_id}_",
    "sarchive-flat": "job.{job_id}_",
}
"""Templates of SArchive's layouts, one for each period of a directory."""
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
_PLAIN_LAYOUTS: Final = frozenset({"job_archive", *_SARCHIVE})
_MAX_CACHED = 1024
_QUARTER_NS = 900 * 10**9


class ArchivePlace(msgspec.Struct, frozen=True):
    """Directory below the archive's root ("" for the root) and file name without suffix."""

    directory: str
    stem: str


class PathSubject(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a script from which a path is made.

    Attributes:
        cluster: Cluster name, unencoded.
        job_id: The job's id.
        spool_mtime_ns: The script's time in the spool, ns since the epoch.
        name: Job name, unencoded (claimed or verified).
        user_directory: User's directory as ``owners`` assigned it, already safe.
        account: Account, unencoded.
        partition: Partition, unencoded.
    """

    cluster: str
    job_id: int
    spool_mtime_ns: int
    name: str = ""
    user_directory: str = ""
    account: str = ""
    partition: str = ""


@lru_cache(maxsize=64)
def load_time_zone(name: str) -> tzinfo | None:
    """Return the time zone of a name; None, the system's, for "".

    Raises:
        LayoutError: The zone does not exist.
    """
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise LayoutError(
            f"unknown timezone {name!r}: use an IANA name such as Europe/Paris", name
        ) from error


@lru_cache(maxsize=512)
def _get_date_parts(quarter: int, zone_name: str) -> tuple[str, str, str, str]:
    """Return year, month, day and hour of a quarter hour since the epoch, in a time zone."""
    moment = datetime.fromtimestamp(quarter * 900, UTC).astimezone(load_time_zone(zone_name))
    return (
        f"{moment.year:04d}",
        f"{moment.month:02d}",
        f"{moment.day:02d}",
        f"{moment.hour:02d}",
    )


class _PathTemplate:
    """Compiled template: literal parts and fields, for directory and stem."""

    def __init__(self, text: str, *, is_plain: bool) -> None:
        head, _, tail = text.rpartition("/")
        self.directory = _compile_path_template(head, is_plain=is_plain)
        self.stem = _compile_path_template(tail, is_plain=is_plain)
        # Most scripts share the directory of earlier ones: one lookup instead of rendering.
        self._directory_cache: dict[tuple[str, ...], str] = {}
        self.directory_fields = frozenset(_FIELD.findall(head))

    def render(self, subject: PathSubject, zone_name: str) -> ArchivePlace:
        """Render directory and stem for a script."""
        quarter = subject.spool_mtime_ns // _QUARTER_NS
        dates = _get_date_parts(quarter, zone_name)
        cache_key = (
            *dates,
            subject.cluster,
            subject.user_directory,
            subject.account,
            subject.partition,
        )
        if self.directory_fields.isdisjoint(("job_id", "name", "slice1", "slice2")):
            cached = self._directory_cache.get(cache_key)
            if cached is None:
                if len(self._directory_cache) >= _MAX_CACHED:
                    self._directory_cache.clear()
                cached = self._directory_cache[cache_key] = self._render_directory(subject, dates)
            directory = cached
        else:
            directory = self._render_directory(subject, dates)
        return ArchivePlace(directory, shorten_component(_render_parts(self.stem, subject, dates)))

    def _render_directory(self, subject: PathSubject, dates: "_Dates") -> str:
        rendered = _render_parts(self.directory, subject, dates)
        # A field may be empty (a job without a name), but no path component may.
        return (
            "/".join([shorten_component(part) or "none" for part in rendered.split("/")])
            if rendered
            else ""
        )


_Dates = tuple[str, str, str, str]
_Part = str | Callable[[PathSubject, _Dates], str]


def _get_slice(subject: PathSubject, position: int) -> str:
    """Return two digits of the job id, from the right."""
    # Reversed slices: the digits that change fastest come first and fill all directories evenly.
    return f"{subject.job_id // 100**position % 100:02d}"


_RENDER: dict[str, Callable[[PathSubject, _Dates], str]] = {
    "user": lambda subject, _: subject.user_directory,
    "year": lambda _, dates: dates[0],
    "month": lambda _, dates: dates[1],
    "day": lambda _, dates: dates[2],
    "hour": lambda _, dates: dates[3],
    "job_id": lambda subject, _: str(subject.job_id),
    "slice1": lambda subject, _: _get_slice(subject, 0),
    "slice2": lambda subject, _: _get_slice(subject, 1),
}

_RENDER_NAME: dict[str, Callable[[PathSubject, Callable[[str], str]], str]] = {
    "cluster": lambda subject, encode: encode(subject.cluster),
    "name": lambda subject, encode: encode(subject.name),
    # A job without a name gives "123", not "123-", as in job_archive.
    "-name": lambda subject, encode: "-" + encode(subject.name) if subject.name else "",
    "account": lambda subject, encode: encode(subject.account) or "none",
    "partition": lambda subject, encode: encode(subject.partition) or "none",
}
"""Fields with names that people choose, which must be encoded."""


def _compile_path_template(text: str, *, is_plain: bool) -> tuple[_Part, ...]:
    """Compile a template to literal texts and functions that render fields."""
    encode = partial(encode_name, is_plain=is_plain)

    def make_name_part(field: str) -> _Part:
        render = _RENDER_NAME[field]
        return lambda subject, _: render(subject, encode)

    parts: list[_Part] = []
    for index, piece in enumerate(_FIELD.split(text.replace("-{name}", "{-name}"))):
        if index % 2:
            parts.append(_RENDER[piece] if piece in _RENDER else make_name_part(piece))
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _render_parts(parts: tuple[_Part, ...], subject: PathSubject, dates: _Dates) -> str:
    return "".join([part if isinstance(part, str) else part(subject, dates) for part in parts])


class ArchiveLayout:
    """Compiled layout of a tree.

    Attributes:
        name: Name or template, as configured.
        needs_identity: Whether its paths contain fields known only from Slurm (user, account,
            partition).
        has_manifests: Whether its directories have a manifest.
        suffixes: Suffixes of script and environment files.
        can_share_files: Whether identical files of one user may be hard links of one file.
        is_plain: Whether its paths contain names as in job_archive and SArchive.
        user_depth: Depth of the user's directory, itself included; 0 if no directory belongs to a
            user.
    """

    def __init__(
        self, name: str, template: str, suffixes: tuple[str, str], has_manifests: bool
    ) -> None:
        self.name = name
        self.template = template
        self.suffixes = suffixes
        self.has_manifests = has_manifests
        fields = frozenset(_FIELD.findall(template))
        self.needs_identity = bool(fields & _FROM_IDENTITY)
        self.user_depth = 0
        self.is_user_per_cluster = False
        for depth, component in enumerate(template.split("/")[:-1], start=1):
            self.is_user_per_cluster = self.is_user_per_cluster or "{cluster}" in component
            if "{user}" in component:
                self.user_depth = depth
                break
        # Without a manifest, only a file's own time tells when its job was submitted, and without a
        # directory of its owner, each file has its own ACL.
        self.can_share_files = has_manifests and self.user_depth > 0
        self.is_plain = name in _PLAIN_LAYOUTS
        self._path_template = _PathTemplate(template, is_plain=self.is_plain)
        self._unverified_template = _PathTemplate(_UNVERIFIED, is_plain=self.is_plain)

    def make_place(self, subject: PathSubject, zone_name: str = "") -> ArchivePlace:
        """Return the place of a script whose identity is known or not needed."""
        return self._path_template.render(subject, zone_name)

    def make_unverified_place(self, subject: PathSubject, zone_name: str = "") -> ArchivePlace:
        """Return the place of a script until Slurm confirms its owner."""
        return self._unverified_template.render(subject, zone_name)

    def get_owner_scope(self, cluster: str) -> str:
        """Return the scope in which user directories are unique: a cluster, or "" for the tree."""
        return cluster if self.is_user_per_cluster else ""


def compile_layout(text: str) -> ArchiveLayout:
    """Compile the layout of a configuration.

    Args:
        text: Name of a preset, or a template such as ``{cluster}/{user}/{job_id}-{name}``.

    Raises:
        LayoutError: Unknown preset or field, or unsafe paths.
    """
    if text in _SARCHIVE:
        return ArchiveLayout(text, _SARCHIVE[text], ("script", "environment"), has_manifests=False)
    if text in PRESETS:
        return ArchiveLayout(text, PRESETS[text], (".sh", ".env"), has_manifests=text == "default")
    _check_template(text)
    return ArchiveLayout(text, text, (".sh", ".env"), has_manifests=True)


def _check_template(text: str) -> None:
    """Raise LayoutError for a template with unknown fields or unsafe paths."""
    if "{" not in text:
        presets = ", ".join((*PRESETS, *_SARCHIVE))
        raise LayoutError(
            f"unknown layout {text!r}: use {presets}, or a template with {{job_id}}", text
        )
    unknown = [field for field in _FIELD.findall(text) if field not in FIELDS]
    if unknown:
        raise LayoutError(
            f"layout {text!r}: unknown field {{{unknown[0]}}}: the fields are {', '.join(FIELDS)}",
            text,
        )
    if "{" in _FIELD.sub("", text) or "}" in _FIELD.sub("", text):
        raise LayoutError(f"layout {text!r}: unmatched brace", text)
    components = text.split("/")
    if "{job_id}" not in components[-1]:
        raise LayoutError(
            f"layout {text!r}: the file name must contain {{job_id}}, or two jobs would share a "
            "file",
            text,
        )
    for component in components:
        if component in {"", ".", "..", "MANIFEST.jsonl"} or component.startswith((".", "-")):
            raise LayoutError(
                f"layout {text!r}: the component {component!r} is not allowed in a path", text
            )
        if not component.isprintable() or "~" in component or "\\" in component:
            raise LayoutError(
                f"layout {text!r}: the component {component!r} has unsafe characters", text
            )
    if components[0] == UNVERIFIED:
        raise LayoutError(
            f"layout {text!r}: {UNVERIFIED}/ is reserved for unverified jobs: choose another name",
            text,
        )


def check_layouts(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield a problem for each invalid layout of a files sink."""
    for name, sink in settings.files_sinks().items():
        try:
            compile_layout(sink.layout)
        except LayoutError as error:
            yield ConfigProblem(("archive", "sink", name, "layout"), str(error))
