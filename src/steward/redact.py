"""Secrets: which values of an environment are never kept, and what looks like one in a script.

Redaction happens before anything is written: what it takes out is in none of
Steward's files. A value goes as a whole, since half a password is a hint.
"""

import re
from collections.abc import Iterator, Sequence
from heapq import merge

import msgspec

from steward.config import RedactSettings
from steward.errors import UsageError
from steward.records import JobRecord

REDACTED = b"[redacted by steward]"

DEFAULT_NAMES = (
    r"TOKEN",
    r"SECRET",
    # Words of other meanings, but only where the part of the name ends with them.
    r"PASS(?!(?:ENGERS?|ENV|ED|ES|IVE|AGES?)(?:_|\Z))",
    r"PASSWD",
    r"PASSWORD",
    r"CREDENTIAL",
    r"API_?KEY",
    r"_KEY$",
    r"^SLURM_JWT$",
    r"^AWS_",
    r"PRIVATE_?KEY",
    r"(?:ACCESS|ACCOUNT)_?KEY",
    r"_PAT$",
    r"_PWD$",
    r"_PW$",
    r"(?:^|_)AUTH$",
    r"COOKIE",
    r"^KRB5CCNAME$",
)
"""Patterns on variable names, matched in any case. Names that only point at files may match too."""


def _word(pattern: str) -> str:
    """A word's beginning. What is before it is looked at last: see ``DEFAULT_VALUES``."""
    return rf"{pattern}(?<=\b{pattern})"


DEFAULT_VALUES = (
    # To the end: what follows is the key.
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*",
    # A URL with a password before its host; some hold "/" and "@". A port is none.
    r"://(?<=[A-Za-z0-9+.-]://)[^/\s:@]{0,200}+:(?!\d++[/,])\S[^\s@]{0,399}+@(?:[^\s@]{0,400}+@)*+",
    # A token in place of a user's name; its letters end at what ends a host, so no two tries meet.
    r"://(?<=[A-Za-z0-9+.-]://)[^/?#\s:@]{20,}+:?@",
    _word(r"hooks\.slack\.com/") + r"(?:services|workflows|triggers)/[A-Za-z0-9/_-]{8,}+",
    # A shared access signature; JSON and a URL within one write the "&" before it as 26.
    r"sig(?:(?<=\bsig)|(?<=26sig))(?:=|%3[Dd])[A-Za-z0-9%+/_-]{16,}+={0,2}",
    _word(r"Bearer") + r"\s{1,4}[A-Za-z0-9._~+/=-]{8,}+",
    # Prefixes that issuers give to their tokens.
    _word(r"gh[pousr]_") + r"[A-Za-z0-9]{20,}+",
    _word(r"github_pat_") + r"[A-Za-z0-9_]{20,}+",
    _word(r"glpat-") + r"[A-Za-z0-9_-]{16,}+",
    _word(r"hf_") + r"[A-Za-z0-9]{20,}+",
    _word(r"sk-") + r"[A-Za-z0-9_-]{20,}+",
    _word(r"xox[abprs]-") + r"[A-Za-z0-9-]{10,}+",
    _word(r"A(?:KIA|SIA)") + r"[A-Z0-9]{16}\b",
    _word(r"AIza") + r"[A-Za-z0-9_-]{30,}+",
    _word(r"pypi-") + r"[A-Za-z0-9_-]{20,}+",
    _word(r"npm_") + r"[A-Za-z0-9]{20,}+",
    # A JSON Web Token from its payload on: it begins with '{"', as the header before it does.
    r"\.eyJ(?<=[A-Za-z0-9_-]{8}\.eyJ)[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*+",
)
"""Patterns on values, whose time must not grow with a value's square.

Each begins with a fixed letter, so that the search skips all others at once, and takes no
letter back that it has taken (``++``). What is to be before is asked behind it (``(?<=``).
"""

_AS_IT_IS = b""
"""Stands for an entry that loses nothing: no redacted entry is empty."""
_CACHE_ENTRIES = 20_000
_CACHE_ENTRY_BYTES = 512
_ASSIGNMENT = re.compile(
    rb"(?:^|[\s;&|(\"'])(?P<name>[A-Za-z_][A-Za-z0-9_-]{1,80})[\"']?[ \t]*[=:][ \t]*"
    rb"(?P<value>[\"']?[^\s\"';&|)]{4,200})"
)
# Tried once a word, not once a letter: the time must not grow with a value's square.
_NAME_BEFORE = re.compile(
    rb"(?<![A-Za-z0-9_-])[0-9-]*(?P<name>[A-Za-z_][A-Za-z0-9_-]*)="
    rb"|(?<!\S)--?(?P<option>[A-Za-z][A-Za-z0-9_-]*)[ \t]+(?!-)"
)
# What no shell exports, but qsub -v passes on. Its last part is a name, too, which is tried above.
_ODD_NAME = re.compile(rb"(?<![^\s,\"'])(?P<name>\w(?:[\w.@\[\]~/-]|:(?!//))*+)=")
# A value may hold blanks, which Slurm shows as they are: it ends where the next thing begins.
_VALUE_END = re.compile(rb",[A-Za-z_][A-Za-z0-9_]*=|\s--?[A-Za-z]|\Z")
_WORD_END = re.compile(rb"\s|\Z")
_FUNCTION = b"() {"
_USERS_TEXTS = ("submit_line", "command", "comment", "extra")
_VARIABLE = re.compile(rb"^[\"']?(?:\$|<|`|\{\{|%|/|\.\.?/|~)")


class Finding(msgspec.Struct, frozen=True):
    """Something in a script that looks like a credential.

    Attributes:
        line: Its line, from 1.
        what: The name that it is assigned to, or the kind of token; never the value.
    """

    line: int
    what: str


class RedactedEnvironment(msgspec.Struct, frozen=True):
    """A block of NUL-separated entries without its secrets, and the names that lost their value."""

    data: bytes
    names: tuple[str, ...]


class Redactor:
    """Takes secrets out of environments, by the site's patterns.

    Args:
        settings: The site's patterns; the defaults where it gives none.

    Raises:
        UsageError: A pattern is not a regular expression.
    """

    def __init__(self, settings: RedactSettings) -> None:
        names = DEFAULT_NAMES if settings.names is None else settings.names
        values = DEFAULT_VALUES if settings.values is None else settings.values
        self._names = _union("names", (*names, *settings.more_names), re.IGNORECASE)
        self._values = _union("values", (*values, *settings.more_values), re.DOTALL)
        self._keep = frozenset(name.encode() for name in settings.keep)
        self._entries_cache: dict[bytes, bytes] = {}

    def entries(self, block: bytes) -> RedactedEnvironment:
        """Redact NUL-separated ``NAME=value`` entries; all other bytes stay as they are."""
        entries = block.split(b"\0")
        # Looked up by one call of C for all of them: most are the same in every job.
        kept = list(map(self._entries_cache.get, entries))
        if None in kept:
            kept = [
                self._entry(entry) if known is None else known
                for entry, known in zip(entries, kept, strict=True)
            ]
        if kept.count(_AS_IT_IS) == len(kept):
            return RedactedEnvironment(block, ())
        names = []
        for index, redacted in enumerate(kept):
            if redacted:
                entries[index] = redacted
                names.append(redacted.partition(b"=")[0].decode("utf-8", "backslashreplace"))
        return RedactedEnvironment(b"\0".join(entries), tuple(names))

    def secret_spans(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Where in a text the patterns on values match, as (begin, end), in order."""
        if self._values:
            for match in self._values.finditer(text):
                yield match.span()

    def is_secret(self, name: bytes) -> bool:
        """Whether what this name is given is never kept."""
        if name in self._keep or self._names is None:
            return False
        return self._names.search(name.replace(b"-", b"_")) is not None

    def _entry(self, entry: bytes) -> bytes:
        """What becomes of one entry; remembered."""
        redacted = self._redacted(entry)
        if redacted == entry:
            redacted = _AS_IT_IS
        if len(entry) <= _CACHE_ENTRY_BYTES:
            if len(self._entries_cache) >= _CACHE_ENTRIES:
                self._entries_cache.clear()
            self._entries_cache[entry] = redacted
        return redacted

    def _redacted(self, entry: bytes) -> bytes:
        name, equals, value = entry.partition(b"=")
        if not equals:
            return REDACTED if self._values and self._values.search(entry) else entry
        if name in self._keep or not value:
            return entry
        if self.is_secret(name):
            return name + b"=" + REDACTED
        if self._values and self._values.search(value):
            return name + b"=" + REDACTED
        if (b"=" in value or b":" in value) and self._assigns(value):
            return name + b"=" + REDACTED
        return entry

    def _assigns(self, value: bytes) -> bool:
        """Whether a value gives a value to a secret name, as SLURM_EXPORT_ENV may."""
        if any(True for _name in self._assigned(value)):
            return True
        if value.startswith(_FUNCTION):
            return False
        return any(
            match["name"] and self.is_secret(match["name"]) and value[match.end() :].lstrip(b"\"'$")
            for match in _NAME_BEFORE.finditer(value)
        )

    def text(self, text: str) -> str:
        """Redact a command line or comment: assignments, options with a value, known tokens.

        ``sbatch --export=ALL,API_TOKEN=…`` tells a value that the environment loses.
        """
        data = text.encode("utf-8", "surrogatepass")
        parts = []
        done = 0
        found = merge(_NAME_BEFORE.finditer(data), _ODD_NAME.finditer(data), key=re.Match.end)
        for match in found:
            option = match.groupdict().get("option")
            if match.start() < done or not self.is_secret(option or match["name"]):
                continue
            end = (_WORD_END if option else _VALUE_END).search(data, match.end())
            assert end is not None
            parts += [data[done : match.end()], REDACTED]
            done = end.start()
        rest = b"".join((*parts, data[done:]))
        if self._values:
            rest = self._values.sub(REDACTED, rest)
        return rest.decode("utf-8", "surrogatepass")

    def record(self, record: JobRecord) -> JobRecord:
        """A job's record without the secrets in what its user wrote."""
        changes = {}
        for field in _USERS_TEXTS:
            before = getattr(record, field)
            if before and (after := self.text(before)) != before:
                changes[field] = after
        return msgspec.structs.replace(record, **changes) if changes else record

    def find_secrets(self, data: bytes) -> Iterator[Finding]:
        """What looks like a credential written into a script; its value is never told."""
        for number, line in enumerate(data.split(b"\n"), start=1):
            if self._values and self._values.search(line):
                yield Finding(number, "a token, private key or URL with a password")
                continue
            for name in self._assigned(line):
                yield Finding(number, name.decode("ascii"))
                break

    def _assigned(self, text: bytes) -> Iterator[bytes]:
        """Secret names that a text gives a value to as a program, JSON or YAML would."""
        for match in _ASSIGNMENT.finditer(text):
            if self.is_secret(match["name"]) and not _VARIABLE.match(match["value"]):
                yield match["name"]


def _union(where: str, patterns: Sequence[str], flags: int) -> "re.Pattern[bytes] | None":
    for pattern in patterns:
        try:
            re.compile(pattern.encode(), flags)
        except re.error as error:
            raise UsageError(
                f"[redact] {where}: {pattern!r} is no regular expression: {error}", pattern
            ) from error
    if not patterns:
        return None
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns).encode(), flags)
