"""Job and user names are anyone's to choose; here they become safe parts of a path.

The encoding is one-to-one: two different names never give the same text, and
:func:`decode_name` gives the name back (but for names cut for their length).
A byte that may not stand in a path is written ``%XX``, as in a URL. Steward's own layouts
keep letters of ASCII, digits and ``._+-``, so that no shell reads anything into a name; the
layouts of job_archive and SArchive keep whatever a path can hold, as those programs do.
"""

import hashlib
import re
from functools import lru_cache

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
