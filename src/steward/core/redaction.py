"""Redaction of secrets in environments, command lines, names and paths; search in scripts.

:class:`Redactor` is the one detector, ``make_redactor`` makes it for a site. Capture calls
``entries`` for an environment and ``record`` for a job record, before Steward writes anything. In
environments the whole value goes, even if only its randomness suggests a secret; in submit
lines, comments, job names and paths only the secret part goes, and only for a secret's name
or an issuer's prefix: workflow tools name jobs by UUIDs and hashes, and look them up by name.
Scripts are never changed, only searched (``find_secrets``).
"""

import hashlib
import hmac
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from heapq import merge
from itertools import filterfalse

import msgspec

from steward.core.config import RedactSettings, Settings
from steward.core.errors import UsageError
from steward.core.records import JobRecord

REDACTED = b"[redacted by steward]"
"""Text that replaces a secret."""
KEY_FILE = "redaction.key"
"""File in the state directory with the key of the digests that replace redacted names."""

DEFAULT_NAMES = (
    # Not words about splitting texts into tokens, such as TOKENIZER.
    r"TOKEN(?!I[SZ])",
    r"SECRET",
    # Words with other meanings count only at the end of a part of the name.
    r"PASS(?!(?:ENGERS?|ENV|ED|ES|IVE|AGES?)(?:_|\Z))",
    r"PASSWD",
    r"PASSWORD",
    r"CREDENTIAL",
    r"API_?KEY",
    r"(?:^|_)KEY$",
    r"^SLURM_JWT$",
    r"^AWS_",
    r"PRIVATE_?KEY",
    r"(?:ACCESS|ACCOUNT)_?KEY",
    r"_PAT$",
    r"_PWD$",
    r"(?:^|_)PW$",
    r"(?:^|_)AUTH$",
    r"AUTHORIZATION",
    r"COOKIE",
    r"^KRB5CCNAME$",
)
"""Patterns on variable names, matched in any case.

Names of variables that only point to a file may match too.
"""


def _require_boundary(pattern: str) -> str:
    """Return a pattern with a word boundary before it, checked last: see ``DEFAULT_VALUES``."""
    return rf"{pattern}(?<=\b{pattern})"


DEFAULT_VALUES = (
    # To the end of the value: the key follows.
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY.*",
    # A URL with a password before its host; some contain "/" and "@". A port is no password.
    r"://(?<=[A-Za-z0-9+.-]://)[^/\s:@]{0,200}+:(?!\d++[/,])\S[^\s@]{0,399}+@(?:[^\s@]{0,400}+@)*+",
    # A token as user name. It cannot contain what ends a host, so no two attempts overlap.
    r"://(?<=[A-Za-z0-9+.-]://)[^/?#\s:@]{20,}+:?@",
    _require_boundary(r"hooks\.slack\.com/")
    + r"(?:services|workflows|triggers)/[A-Za-z0-9/_-]{8,}+",
    # A shared access signature; JSON and a URL within one write the "&" before it as 26.
    r"sig(?:(?<=\bsig)|(?<=26sig))(?:=|%3[Dd])[A-Za-z0-9%+/_-]{16,}+={0,2}",
    _require_boundary(r"Bearer") + r"\s{1,4}[A-Za-z0-9._~+/=-]{8,}+",
    # Prefixes that issuers give to their tokens.
    _require_boundary(r"gh[pousr]_") + r"[A-Za-z0-9]{20,}+",
    _require_boundary(r"github_pat_") + r"[A-Za-z0-9_]{20,}+",
    _require_boundary(r"glpat-") + r"[A-Za-z0-9_-]{16,}+",
    _require_boundary(r"hf_") + r"[A-Za-z0-9]{20,}+",
    # Requires a word too long for a person to write: sk-learn-grid-search is a job's name.
    _require_boundary(r"sk-") + r"(?:[A-Za-z0-9]{1,12}[-_]){0,3}[A-Za-z0-9]{20,}+[A-Za-z0-9_-]*+",
    _require_boundary(r"sk_(?:live|test)_") + r"[A-Za-z0-9]{16,}+",
    _require_boundary(r"ya29\.") + r"[A-Za-z0-9_-]{20,}+",
    _require_boundary(r"xox[abprs]-") + r"[A-Za-z0-9-]{10,}+",
    _require_boundary(r"A(?:KIA|SIA)") + r"[A-Z0-9]{16}\b",
    _require_boundary(r"AIza") + r"[A-Za-z0-9_-]{30,}+",
    _require_boundary(r"pypi-AgE") + r"[A-Za-z0-9_-]{20,}+",
    _require_boundary(r"npm_") + r"[A-Za-z0-9]{20,}+",
    # A JSON Web Token from its payload on: like the header before it, it begins with '{"'.
    r"\.eyJ(?<=[A-Za-z0-9_-]{8}\.eyJ)[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]*+",
)
"""Patterns on values; their run time must not grow with the square of a value's length.

Each begins with a fixed letter, so that the search skips all other positions at once, and
never backtracks (``++``). A lookbehind (``(?<=``) checks what must precede.
"""

UNCHANGED = b""
"""Verdict on an entry without secrets: no redacted entry is empty."""
CACHE_BYTES = 8 << 20
"""Most bytes of the verdicts that a redactor remembers."""
_LARGEST_KEY_BYTES = 2048
"""Largest entry that is a key of the cache itself, in bytes: a digest of it costs more time."""
_LONGEST_CACHED_NAME = 100
"""Longest variable name whose verdict is remembered apart from its value, in bytes."""
_MOST_CACHED_NAMES = 4096
"""Most variable names whose verdicts are remembered."""
_VERDICT_BYTES = 280
"""Memory that a verdict takes in addition to its entry and its text, in bytes."""
_ASSIGNMENT = re.compile(
    rb"(?:^|[\s;&|(\"'])(?P<name>[A-Za-z_][A-Za-z0-9_-]{1,80})[\"']?[ \t]*[=:][ \t]*"
    rb"(?P<value>[\"']?[^\s\"';&|)]{4,200})"
)
_BEFORE_VALUE = re.compile(rb"[=:\s]")
"""What stands between a name and its value: most names and paths have none of it."""
# Tried once a word, not once a character, so that the time does not grow with the square.
_NAME_BEFORE = re.compile(
    rb"(?<![A-Za-z0-9_-])[0-9-]*(?P<name>[A-Za-z_][A-Za-z0-9_-]*)="
    rb"|(?<!\S)--?(?P<option>[A-Za-z][A-Za-z0-9_-]*)[ \t]+"
)
# Names that no shell exports, but qsub -v does. _NAME_BEFORE tries the last part of the name.
_ODD_NAME = re.compile(rb"(?<![^\s,\"'])(?P<name>\w(?:[\w.@\[\]~/-]|:(?!//))*+)=")
# JSON, YAML and HTTP headers: "password": "…", password: …, Authorization: Basic ….
_KEY_BEFORE = re.compile(
    rb"(?<![A-Za-z0-9_-])(?P<name>[A-Za-z_][A-Za-z0-9_-]{1,80})(?P<quote>[\"']?)[ \t]*:(?!//)"
    rb"(?![^\s,\"']{0,80}=[^=\s])[ \t]*"
)
# curl -u user:password; numbers and variables are a container's user and group.
_LOGIN = re.compile(
    rb"(?<!\S)(?:-[uU]|--user|--proxy-user)[ \t=]*[\"']?[^\s:/$\"']{1,200}:"
    rb"(?!\d+(?:\s|\Z))(?=[^\s$])"
)
# mysql -ppassword, sshpass -ppassword.
_CLIENT = re.compile(rb"(?:mysql|mariadb|sshpass)[a-z-]{0,20}(?=\s)")
_CLIENT_PASSWORD = re.compile(rb"(?<=\s)-p(?=[^\s])")
# A value may contain blanks, which Slurm shows unquoted: it ends before the next option.
_VALUE_END = re.compile(rb",[A-Za-z_][A-Za-z0-9_]*=|\s--[A-Za-z]|\s-[A-Za-z](?=[\s\d]|\Z)|\Z")
_PHRASE_END = re.compile(rb"\s--?[A-Za-z]|\Z")
_WORD_END = re.compile(rb"\s|\Z")
_ITEM_END = re.compile(rb"[\n,}\]]|\Z")
_COMPONENT_END = re.compile(rb"/|\Z")
_QUOTE_END = {
    b'"': re.compile(rb'(?<!\\)"|\Z'),
    b"'": re.compile(rb"'|\Z"),
}
# A count of tokens, or the number of a key, is no secret.
_COUNT = re.compile(
    rb"(?i:[\d.]{1,9}[kmg]?|true|false|yes|no|none|null|auto|max)(?=[\s,;/_}\]\"']|\Z)"
)
_RANDOM_WORD = re.compile(rb"[A-Za-z0-9][A-Za-z0-9+/_=-]{31,127}")
_RANDOM_BITS = 4.6
"""Entropy per character, in bits, from which a word of 32 or more characters is random."""
_FLAG = re.compile(rb"-[A-Za-z](?=[\s\d]|\Z)")
_NOT_RANDOM = (b"_ModuleTable", b"__LMOD")
"""Prefixes of variables whose values are encoded tables, not secrets."""
_FUNCTION = b"() {"
"""Beginning of an exported shell function, whose text is code."""
_TEXTS = ("submit_line", "command", "comment", "extra", "admin_comment", "system_comment")
"""Fields of a job record that may contain command lines or free text."""
_NAMES = ("name", "wckey")
"""Fields of a job record that are names."""
_PATHS = ("work_dir", "stdin", "stdout", "stderr", "container")
"""Fields of a job record that are paths."""
_DIGEST_DIGITS = 8
"""Hexadecimal digits of the digest in a redacted name."""
_VARIABLE = re.compile(rb"^[\"']?(?:\$|<|`|\{\{|%|/|\.\.?/|~)")
"""Values that refer to a secret rather than contain it: variables, files, templates."""


class SecretFinding(msgspec.Struct, frozen=True):
    """A possible credential in a script.

    Attributes:
        line: Line number, from 1.
        what: Name that it is assigned to, or kind of token; never the value.
    """

    line: int
    what: str


class RedactedEnvironment(msgspec.Struct, frozen=True):
    """NUL-separated environment entries without secrets.

    Attributes:
        data: The entries.
        names: Names of the redacted variables.
        nuls: Number of NUL bytes.
    """

    data: bytes
    names: tuple[str, ...]
    nuls: int


class VerdictCache:
    """Verdicts on environment entries, which are nearly the same in every job.

    Two generations: a full one becomes the older one, and what is found there moves to the new
    one, so that the entries of many jobs outlive those of a single job.

    Args:
        judge: Returns the verdict on a new entry: its redacted text, or :data:`UNCHANGED`.
        max_bytes: Most bytes of both generations.
    """

    def __init__(self, judge: Callable[[bytes], bytes], max_bytes: int = CACHE_BYTES) -> None:
        self._judge = judge
        self._generation_bytes = max_bytes // 2
        self._recent: dict[bytes, bytes] = {}
        self._unchanged: set[bytes] = set()
        """Entries without secrets in ``_recent``: most of every environment."""
        self._older: dict[bytes, bytes] = {}
        self._size = 0

    def find_changes(self, entries: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Yield the entries with secrets, in order, with their redacted text.

        An entry contains no NUL.
        """
        # C code passes over the entries that many jobs share.
        for entry in filterfalse(self._unchanged.__contains__, entries):
            key = entry if len(entry) <= _LARGEST_KEY_BYTES else _make_digest(entry)
            verdict = self._recent.get(key)
            if verdict is None:
                verdict = self._add(key, entry)
            if verdict:
                yield entry, verdict

    def _add(self, key: bytes, entry: bytes) -> bytes:
        """Add an entry to the recent generation; return the verdict on it."""
        verdict = self._older.get(key)
        if verdict is None:
            verdict = self._judge(entry)
        size = len(key) + len(verdict) + _VERDICT_BYTES
        if self._size + size > self._generation_bytes:
            self._older, self._recent, self._size = self._recent, {}, 0
            self._unchanged = set()
        if size <= self._generation_bytes:
            self._recent[key] = verdict
            if not verdict:
                self._unchanged.add(key)
            self._size += size
        return verdict


def _make_digest(entry: bytes) -> bytes:
    """Make the key of a large entry; the NUL keeps it apart from every entry."""
    return b"\0" + hashlib.blake2b(entry, digest_size=32).digest()


class Redactor:
    """Remover of secrets from environments, texts, names and paths, by the site's patterns.

    Args:
        settings: The site's patterns; the defaults where it gives none.
        key: Key of the digests that replace redacted names; without one there are no digests
            and all redacted names are equal.
        names: Built-in patterns on names.
        values: Built-in patterns on values.

    Raises:
        UsageError: A pattern is not a regular expression.
    """

    def __init__(
        self,
        settings: RedactSettings,
        key: bytes = b"",
        *,
        names: tuple[str, ...] = DEFAULT_NAMES,
        values: tuple[str, ...] = DEFAULT_VALUES,
    ) -> None:
        self._key = key
        self._name_pattern = _join_patterns("names", (*names, *settings.names), re.IGNORECASE)
        self._value_pattern = _join_patterns("values", (*values, *settings.values), re.DOTALL)
        self._kept_names = frozenset(name.encode() for name in settings.keep)
        self._verdicts = VerdictCache(self._redact_entry)
        self._is_secret_name = lru_cache(maxsize=_MOST_CACHED_NAMES)(self._match_name)

    def redact_entries(self, block: bytes) -> RedactedEnvironment:
        """Redact NUL-separated ``NAME=value`` entries; all other bytes stay unchanged."""
        entries = block.split(b"\0")
        nuls = len(entries) - 1
        names = []
        index = -1
        for entry, redacted in self._verdicts.find_changes(tuple(entries)):
            index = entries.index(entry, index + 1)
            entries[index] = redacted
            names.append(redacted.partition(b"=")[0].decode("utf-8", "backslashreplace"))
        data = b"\0".join(entries) if names else block
        return RedactedEnvironment(data, tuple(names), nuls)

    def find_secret_spans(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Yield the matches of the patterns on values, as (begin, end), in order."""
        if self._value_pattern:
            for match in self._value_pattern.finditer(text):
                yield match.span()

    def is_secret(self, name: bytes) -> bool:
        """Return whether a variable of this name must lose its value."""
        # Jobs set the same variables to other values.
        if len(name) <= _LONGEST_CACHED_NAME:
            return self._is_secret_name(name)
        return self._match_name(name)

    def _match_name(self, name: bytes) -> bool:
        """Return whether the patterns say that a name is secret."""
        if name in self._kept_names or self._name_pattern is None:
            return False
        return self._name_pattern.search(name.replace(b"-", b"_")) is not None

    def _redact_entry(self, entry: bytes) -> bytes:
        """Return one redacted ``NAME=value`` entry, or :data:`UNCHANGED`."""
        name, equals, value = entry.partition(b"=")
        if not equals:
            has_token = self._value_pattern and self._value_pattern.search(entry)
            return REDACTED if has_token and entry != REDACTED else UNCHANGED
        if name in self._kept_names or not value or value == REDACTED:
            return UNCHANGED
        return name + b"=" + REDACTED if self._has_secret(name, value) else UNCHANGED

    def _has_secret(self, name: bytes, value: bytes) -> bool:
        """Return whether a variable must lose its value."""
        if self.is_secret(name) or (self._value_pattern and self._value_pattern.search(value)):
            return True
        if (b"=" in value or b":" in value) and self._has_assignment(value):
            return True
        return (
            self._name_pattern is not None and is_random(value) and not name.startswith(_NOT_RANDOM)
        )

    def _has_assignment(self, value: bytes) -> bool:
        """Return whether a value assigns to a secret name, as SLURM_EXPORT_ENV may."""
        if any(True for _name in self._find_assigned(value)):
            return True
        if value.startswith(_FUNCTION):
            return False
        if any(True for _begin, _end in _find_client_passwords(value)):
            return True
        return any(
            match["name"] and self.is_secret(match["name"]) and value[match.end() :].lstrip(b"\"'$")
            for match in _NAME_BEFORE.finditer(value)
        )

    def redact_text(self, text: str) -> str:
        """Redact a command line or comment: the values of secret names, and known tokens.

        ``sbatch --export=ALL,API_TOKEN=…`` repeats a value that the environment loses.
        """
        return self._remove_values(text, is_path=False)

    def redact_path(self, text: str) -> str:
        """Redact a path; a secret ends with its path component."""
        return self._remove_values(text, is_path=True)

    def name(self, text: str) -> str:
        """Redact a job's name; a name with a secret becomes a keyed digest.

        Jobs of the same name then still share a name, which nobody can reverse without the key.
        """
        if self._remove_values(text, is_path=False) == text:
            return text
        if not self._key:
            return REDACTED.decode()
        digest = hmac.new(self._key, text.encode("utf-8", "surrogatepass"), hashlib.sha256)
        return f"{REDACTED.decode()[:-1]}:{digest.hexdigest()[:_DIGEST_DIGITS]}]"

    def _remove_values(self, text: str, *, is_path: bool) -> str:
        """Replace secret values within a text or path."""
        data = text.encode("utf-8", "surrogatepass")
        parts = []
        copied = 0
        for begin, end in sorted(self._find_values(data, is_path=is_path)):
            if begin >= copied and data[begin:end] != REDACTED:
                parts += [data[copied:begin], REDACTED]
                copied = end
        result = b"".join((*parts, data[copied:])) if parts else data
        if self._value_pattern:
            result = self._value_pattern.sub(REDACTED, result)
        return result.decode("utf-8", "surrogatepass")

    def _find_values(self, data: bytes, *, is_path: bool) -> Iterator[tuple[int, int]]:
        """Yield the values of secret names in a text, as (begin, end)."""
        if self._name_pattern is None or not _BEFORE_VALUE.search(data):
            return
        end = 0
        for match in merge(_NAME_BEFORE.finditer(data), _ODD_NAME.finditer(data), key=re.Match.end):
            option = match.groupdict().get("option")
            name, begin = option or match["name"], match.end()
            if begin < end or not self.is_secret(name) or _is_count(name, data, begin):
                continue
            if option and (data.startswith(b"--", begin) or _FLAG.match(data, begin)):
                continue  # the option has no value
            if is_path:
                end_pattern = _COMPONENT_END
            elif option:
                end_pattern = _PHRASE_END if b"phrase" in name.lower() else _WORD_END
            else:
                end_pattern = _VALUE_END
            end = _find_end(end_pattern, data, begin)
            yield begin, end
        end = 0
        for match in _KEY_BEFORE.finditer(data):
            name, begin = match["name"], match.end()
            if begin < end or not self.is_secret(name) or _is_count(name, data, begin):
                continue
            quote_end = _QUOTE_END.get(data[begin : begin + 1])
            begin += quote_end is not None
            end = _find_end(quote_end or (_COMPONENT_END if is_path else _ITEM_END), data, begin)
            if end > begin:
                yield begin, end
        if not is_path:
            yield from _find_client_passwords(data)

    def redact_record(self, record: JobRecord) -> JobRecord:
        """Redact the fields of a job record that its user wrote."""
        changes = {}
        for fields, redact in (
            (_TEXTS, self.redact_text),
            (_NAMES, self.name),
            (_PATHS, self.redact_path),
        ):
            for field in fields:
                old = getattr(record, field)
                if old and (new := redact(old)) != old:
                    changes[field] = new
        return msgspec.structs.replace(record, **changes) if changes else record

    def find_secrets(self, data: bytes) -> Iterator[SecretFinding]:
        """Yield possible credentials in a script, without their values."""
        for number, line in enumerate(data.split(b"\n"), start=1):
            if self._value_pattern and self._value_pattern.search(line):
                yield SecretFinding(number, "a token, private key or URL with a password")
                continue
            for name in self._find_assigned(line):
                yield SecretFinding(number, name.decode("ascii"))
                break

    def _find_assigned(self, text: bytes) -> Iterator[bytes]:
        """Yield secret names that a program, JSON or YAML text assigns a value to."""
        for match in _ASSIGNMENT.finditer(text):
            if self.is_secret(match["name"]) and not _VARIABLE.match(match["value"]):
                yield match["name"]


def make_redactor(settings: Settings) -> Redactor:
    """Make a site's redactor, with the key in its state directory, creating a missing key.

    Raises:
        OSError: The key can be neither read nor made.
    """
    path = os.path.join(settings.state_dir, KEY_FILE)
    try:
        with open(path, "rb") as file:
            return Redactor(settings.redact, file.read())
    except FileNotFoundError:
        pass
    os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
    temporary = f"{path}.{os.urandom(8).hex()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(os.urandom(32))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was first, and its key is the one
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
    with open(path, "rb") as file:
        return Redactor(settings.redact, file.read())


def is_random(value: bytes) -> bool:
    """Return whether a value is one long random word, as keys are."""
    if not _RANDOM_WORD.fullmatch(value):
        return False
    if not (re.search(rb"[a-z]", value) and re.search(rb"[A-Z]", value)):
        return False
    if not re.search(rb"[0-9]", value):
        return False
    counts = [value.count(letter) for letter in set(value)]
    size = len(value)
    bits = -sum(count / size * math.log2(count / size) for count in counts)
    return bits >= min(_RANDOM_BITS, 0.9 * math.log2(size))


def _find_client_passwords(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the places of passwords in arguments of curl, mysql and sshpass."""
    for match in _LOGIN.finditer(data):
        yield match.end(), _find_end(_WORD_END, data, match.end())
    client = _CLIENT.search(data)
    if client is not None:
        for match in _CLIENT_PASSWORD.finditer(data, client.end()):
            yield match.end(), _find_end(_WORD_END, data, match.end())


def _is_count(name: bytes, data: bytes, begin: int) -> bool:
    """Return whether a secret-like name has a small number as its value: ``max_tokens=4096``."""
    return name.lower().endswith((b"tokens", b"key")) and _COUNT.match(data, begin) is not None


def _find_end(end_pattern: "re.Pattern[bytes]", data: bytes, begin: int) -> int:
    match = end_pattern.search(data, begin)
    assert match is not None
    return match.start()


def _join_patterns(field: str, patterns: Sequence[str], flags: int) -> "re.Pattern[bytes] | None":
    """Compile several patterns into one; None for no patterns."""
    for pattern in patterns:
        try:
            re.compile(pattern.encode(), flags)
        except re.error as error:
            raise UsageError(
                f"[redact] {field}: invalid regular expression {pattern!r}: {error}", pattern
            ) from error
    if not patterns:
        return None
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns).encode(), flags)
