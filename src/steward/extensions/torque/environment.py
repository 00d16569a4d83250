"""Torque's Variable_List: the environment as it was joined, which cannot be taken apart surely.

Torque writes ``NAME=value`` after ``NAME=value`` with commas between them and escapes
nothing, so a value may hold what looks like the next variable. It is cut at commas
before a ``NAME=`` and kept in the form of Slurm's ``environment`` (a native uint32 with
the number of entries, then each with a NUL behind it), so that all that shows, searches
and sends an environment serves both schedulers. What cannot be known is flagged.

Where it cannot be known how far a secret goes, more is taken out and not less: from
the first sign of a secret on nothing is kept until a variable whose name is one that
systems themselves set (HOME, PATH, PBS_O_…), for anything before that may be a part
of the secret. So a secret is cut short only by a text like ``,PATH=`` in itself.
"""

import re
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from steward.capture.schedulers import MOST_ENVIRONMENT_BYTES
from steward.core.redaction import REDACTED, Redactor
from steward.slurm.environment import Environment, names_told

AMBIGUOUS: Final = "environment-ambiguous"
"""A value holds commas, a name comes twice, or bytes were lost: entries may be pieces."""
CUT: Final = "environment-cut"
"""Entries behind a secret are left out, for they may be pieces of it."""

# A shell's exported functions are BASH_FUNC_name%% or BASH_FUNC_name().
_BOUNDARY: Final = re.compile(rb",(?=[A-Za-z_][A-Za-z0-9_.%()-]{0,200}=)")
_NAME: Final = re.compile(rb"[A-Za-z_][A-Za-z0-9_.%()-]{0,200}=")
# libxml2 reads a byte of another encoding and the two or three behind it, a comma among them,
# as one character: a name, or what is left of one, then stands behind it. Its low bits tell.
_SWALLOWED: Final = re.compile(rb"(?<![\x80-\xff])[\x80-\xff]++[A-Za-z0-9_.-]*+=")
# A name that no shell exports, which env(1) and programs may set all the same.
_ODD_NAME: Final = re.compile(rb",([^,=\n]++)=")
_COMMA_BITS: Final = ord(",") & 0x3F
_SURE: Final = re.compile(
    rb"(?:PBS_[A-Z_]+|HOME|USER|LOGNAME|SHELL|PATH|PWD|OLDPWD|LANG|LANGUAGE|LC_[A-Z]+|MAIL|TERM"
    rb"|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|SHLVL|EDITOR|VISUAL|PAGER|LESS|LESSOPEN|LS_COLORS"
    rb"|HISTSIZE|HISTCONTROL|INPUTRC|DISPLAY|TZ|TMPDIR|MANPATH|INFOPATH|LD_LIBRARY_PATH|CPATH"
    rb"|LIBRARY_PATH|PYTHONPATH|PKG_CONFIG_PATH|MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_"
    rb"|XDG_[A-Z]+(?:_[A-Z]+)*|SSH_(?:CLIENT|CONNECTION|TTY)|OMP_NUM_THREADS|DBUS_[A-Z_]+|_)="
)
_MORE: Final = b"xxxx"
MOST_VARIABLES: Final = 100_000
"""What has more is no environment, and each costs some 10 us."""
_TAIL: Final = 512
"""As much of an entry's end as can make a secret of what follows it."""
_COUNT: Final = struct.Struct("=I")


def read_variables(variables: str, redactor: Redactor) -> Environment:
    """Take a Variable_List apart, without its secrets; never fails.

    Args:
        variables: The text, its XML escapes undone.
        redactor: Knows what is secret.
    """
    raw = variables.encode("utf-8", "backslashreplace").replace(b"\0", b"")
    entries = list(_entries(raw))
    kept, redacted, cut = _without_secrets(raw, entries, redactor)
    flags: tuple[str, ...] = ()
    if _is_ambiguous(entries) or _lost_bytes(variables):
        flags = (AMBIGUOUS,)
    if cut:
        flags += (CUT,)
    data = _COUNT.pack(len(kept)) + b"".join(entry + b"\0" for entry in kept)
    return Environment(data=data, redacted=names_told(redacted), flags=flags)


def is_too_large(variables: str) -> bool:
    """Whether taking a Variable_List apart would hold up the jobs behind it."""
    if len(variables) > MOST_ENVIRONMENT_BYTES:
        return True
    raw = variables.encode("utf-8", "backslashreplace")
    if len(raw) > MOST_ENVIRONMENT_BYTES:
        return True
    return any(count >= MOST_VARIABLES for count, _ in enumerate(_BOUNDARY.finditer(raw)))


def _entries(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """The pieces between the commas that a ``NAME=`` follows, each with where it begins."""
    begin = 0
    for comma in _BOUNDARY.finditer(raw):
        yield begin, raw[begin : comma.start()]
        begin = comma.end()
    if begin < len(raw):
        yield begin, raw[begin:]


def _without_secrets(
    raw: bytes, entries: Sequence[tuple[int, bytes]], redactor: Redactor
) -> tuple[list[bytes], list[str], bool]:
    """What may be kept, the names that lost their value, and whether entries were left out."""
    spans = redactor.secret_spans(raw)
    begin, end = next(spans, (len(raw), len(raw)))
    kept: list[bytes] = []
    redacted: list[str] = []
    is_secret = cut = False
    for (start, entry), lone in zip(entries, _shown(entries, redactor), strict=True):
        stop = start + len(entry)
        # A secret may have been cut by a comma, so that no piece looks like one.
        while end <= start and begin < len(raw):
            begin, end = next(spans, (len(raw), len(raw)))
        if is_secret and (begin < start or _SURE.match(entry) is None):
            cut = True
            continue
        is_glued = begin < stop and start <= begin
        shown = _name_of(entry) + REDACTED if is_glued and not lone else lone
        is_secret = bool(shown)
        if shown.endswith(REDACTED):
            redacted.append(entry.partition(b"=")[0].decode("utf-8", "backslashreplace"))
        kept.append(shown or entry)
    return kept, redacted, cut


def _shown(entries: Sequence[tuple[int, bytes]], redactor: Redactor) -> Iterator[bytes]:
    """What is kept of each entry that may not be kept as it is; empty for the others."""
    # All at one go, as it costs more to ask for each. None holds a NUL.
    alone = redactor.entries(b"\0".join(entry for _, entry in entries)).data.split(b"\0")
    # What makes it a secret may begin behind the comma that it was cut at.
    tails = [_tail(entry) + _MORE for _, entry in entries]
    longer = redactor.entries(b"\0".join(tails)).data.split(b"\0")
    pieces = zip(entries, alone, tails, longer, strict=False)
    for (_, entry), by_itself, tail, followed in pieces:
        name = _name_of(entry)
        if not name:
            # No variable's beginning: the piece before the first name, of what is damaged.
            yield REDACTED
        elif (
            by_itself != entry
            or followed != tail
            or _SWALLOWED.search(entry, len(name))
            or any(redactor.is_secret(odd[1]) for odd in _ODD_NAME.finditer(entry, len(name)))
        ):
            yield name + REDACTED
        else:
            yield b""


def _name_of(entry: bytes) -> bytes:
    """The name that an entry begins with, and its ``=``; empty where it begins with none."""
    named = _NAME.match(entry)
    return named[0] if named else b""


def _tail(entry: bytes) -> bytes:
    """An entry, of a long one the name and the end."""
    if len(entry) <= 2 * _TAIL:
        return entry
    return _name_of(entry) + entry[-_TAIL:]


def _is_ambiguous(entries: Sequence[tuple[int, bytes]]) -> bool:
    names = {entry.partition(b"=")[0] for _, entry in entries}
    return len(names) < len(entries) or any(
        b"," in entry or _NAME.match(entry) is None for _, entry in entries
    )


def _lost_bytes(variables: str) -> bool:
    """Whether a character may be one that libxml2 made of a broken one and a comma."""
    if variables.isascii():
        return False
    return any(
        _COMMA_BITS in ((code := ord(letter)) & 0x3F, code >> 6 & 0x3F, code >> 12 & 0x3F)
        for letter in set(variables)
        if letter > "\x7f"
    )
