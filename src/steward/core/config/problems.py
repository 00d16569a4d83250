"""Configuration problems, and the line of each key in a TOML file for error messages.

``find_key_lines`` scans a TOML file for the line of each key, which the standard library's parser
does not report. The scan follows the grammar of TOML 1.0 (https://toml.io/en/v1.0.0) as far
as keys need it: it skips comments, every kind of string, arrays and inline tables. It is
correct only for text that ``tomllib`` accepts. :class:`ConfigProblem` is the result of a check;
``run_offered_check`` runs a check that another package offers by entry point.
"""

import re
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from steward.core.errors import StewardError
from steward.core.extensions import load_offer

if TYPE_CHECKING:
    from steward.core.config import Settings


KeyPath = tuple[str, ...]
"""Keys from the file's root down to a value, without the indexes of arrays."""

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_BASIC = re.compile(r'"(?:\\.|[^"\\\n])*"')
_LITERAL = re.compile(r"'[^'\n]*'")
_LONG_BASIC = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}', re.DOTALL)
_LONG_LITERAL = re.compile(r"'''.*?'{3,5}", re.DOTALL)
_PLAIN_VALUE = re.compile(r"[^,\]}#\n]*")


def find_key_lines(text: str) -> dict[KeyPath, int]:
    """Return the line, counted from 1, of the first occurrence of each key and each table.

    Args:
        text: A file's content, which ``tomllib`` has accepted.
    """
    return _KeyScanner(text).lines


class _KeyScanner:
    """Scanner of a TOML text that records the line of each key and table."""

    def __init__(self, text: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self._text = text
        self._position = 0
        self._line = 1
        self._line_position = 0
        table: KeyPath = ()
        self._skip(_BLANK)
        while self._position < len(text):
            start = self._position
            if self._skip_character("["):
                self._skip_character("[")
                table = self._scan_key(())
                self._skip_character("]")
                self._skip_character("]")
            else:
                self._scan_pair(table)
            self._skip(_BLANK)
            if self._position == start:  # not TOML: rather no lines than no end
                return

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._position)
        if match is None:
            return ""
        self._position = match.end()
        return match[0]

    def _skip_character(self, character: str) -> bool:
        """Skip blanks and ``character``, if it follows; return whether it did."""
        self._skip(_BLANK)
        if self._text.startswith(character, self._position):
            self._position += len(character)
            return True
        return False

    def _scan_key(self, table: KeyPath) -> KeyPath:
        """Scan a dotted key, record its line, and return its path."""
        path = table
        while True:
            self._skip(_BLANK)
            path = (*path, self._scan_simple_key())
            if path not in self.lines:
                self.lines[path] = self._get_line()
            if not self._skip_character("."):
                return path

    def _scan_simple_key(self) -> str:
        quoted = self._skip(_BASIC) or self._skip(_LITERAL)
        if not quoted:
            return self._skip(_BARE_KEY)
        value: str = tomllib.loads(f"key = {quoted}")["key"]
        return value

    def _get_line(self) -> int:
        self._line += self._text.count("\n", self._line_position, self._position)
        self._line_position = self._position
        return self._line

    def _scan_pair(self, table: KeyPath) -> None:
        path = self._scan_key(table)
        if self._skip_character("="):
            self._skip(_BLANK)
            self._skip_value(path)

    def _skip_value(self, path: KeyPath) -> None:
        """Skip a value, recording keys of inline tables."""
        if self._skip_character("["):
            while not self._skip_character("]") and self._position < len(self._text):
                self._skip_value(path)
                if not self._skip_character(",") and not self._text.startswith("]", self._position):
                    return
        elif self._skip_character("{"):
            while not self._skip_character("}") and self._position < len(self._text):
                self._scan_pair(path)
                if not self._skip_character(",") and not self._text.startswith("}", self._position):
                    return
        else:
            for pattern in (_LONG_BASIC, _LONG_LITERAL, _BASIC, _LITERAL, _PLAIN_VALUE):
                if self._skip(pattern):
                    return


CHECKS: Final = "steward.settings_check"
"""Entry point group of packages' own checks: each takes the settings and yields problems."""


class ConfigProblem(msgspec.Struct, frozen=True):
    """An error in the configuration.

    Attributes:
        key: Keys down to the wrong value.
        what: The error and what to do, in one line.
    """

    key: KeyPath
    what: str


def run_offered_check(name: str, key: KeyPath, settings: "Settings") -> Iterator[ConfigProblem]:
    """Run a check that a package offers by entry point, and yield its problems.

    Args:
        name: Name of the entry point.
        key: Key to report if the check is not installed or cannot be imported.
        settings: The settings.
    """
    try:
        check = load_offer(CHECKS, name)
    except StewardError as error:
        yield ConfigProblem(key, str(error))
        return
    yield from check(settings)
