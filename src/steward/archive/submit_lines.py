"""SubmitLine of a job, as sbatch's options: Slurm joins the words of the command line by blanks.

Which words were one is not kept. The table of sbatch's options parts them again, with the help
of what Slurm shows of the job; where neither decides, the reading names the option in doubt.
"""

import os
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from steward.core.errors import UsageError
from steward.core.records import JobRecord
from steward.core.redaction import REDACTED

_WORD: Final = re.compile(rf"(?:{re.escape(REDACTED.decode())}|[^ ])+")
_WRAPPED: Final = b"# This script was created by sbatch --wrap.\n\n"
_LONGEST: Final = 1 << 16
"""A longer line is not read: each word is looked up in the table."""


class Option(msgspec.Struct, frozen=True):
    """One option of sbatch; ``value`` is None for a flag."""

    name: str
    value: str | None = None

    @property
    def word(self) -> str:
        """The option as one word of a command line."""
        return f"--{self.name}" if self.value is None else f"--{self.name}={self.value}"


class SubmitLine(msgspec.Struct, frozen=True, kw_only=True):
    """A submit line, parted.

    Attributes:
        components: The options of each component of a het job; of any other job one tuple.
        arguments: The script's own arguments.
        doubts: Options whose values may end elsewhere, ``script`` for the script's name.
    """

    components: tuple[tuple[Option, ...], ...]
    arguments: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()


def read_submit_line(line: str, record: JobRecord, script: bytes) -> SubmitLine | None:
    """Part a submit line into sbatch's options and the script's arguments.

    Args:
        line: What Slurm shows of it.
        record: What Slurm shows of the job.
        script: The script that was kept.

    Returns:
        None for a line that is not sbatch's, or that holds what is no option of sbatch.
    """
    if len(line) > _LONGEST:
        return None
    words = list(_WORD.finditer(line))
    if not words or os.path.basename(words[0][0]) != "sbatch":
        return None
    try:
        return _Reading(line, words, record, script).read()
    except UsageError:
        return None


def wrapped_command(script: bytes) -> str | None:
    """The command that sbatch --wrap made a script of; None for any other script."""
    _, mark, text = script.partition(_WRAPPED)
    return text.decode("utf-8", "replace").rstrip("\n") if mark else None


class _Reading:
    """One pass over the words of a line."""

    def __init__(
        self, line: str, words: list["re.Match[str]"], record: JobRecord, script: bytes
    ) -> None:
        self._line = line
        self._words = words
        wrapped = wrapped_command(script)
        self._texts: Mapping[str, str] = {
            "job-name": record.name,
            "comment": record.comment,
            "wrap": wrapped or "",
            "chdir": record.work_dir,
            "extra": record.extra,
        }
        self._end = len(words) if wrapped is not None else _place_of_script(words, record)
        self._components: list[list[Option]] = [[]]
        self._doubts: list[str] = []

    def read(self) -> SubmitLine:
        at, end = 1, len(self._words) if self._end is None else self._end
        while at < end:
            word = self._words[at][0]
            if word == ":":
                self._components.append([])
                at += 1
            elif word.startswith("-") and word not in ("-", "--"):
                at = self._option(at, end)
            elif word == "--":
                at += 1
                end = self._end = at if self._end is None else self._end
            elif self._end is None:
                end = self._end = at
                self._doubts.append("script")
            else:
                raise UsageError(f"{word!r} is no option of sbatch", word)
        arguments = self._words[end + 1 :] if self._end is not None else []
        return SubmitLine(
            components=tuple(map(tuple, self._components)),
            arguments=tuple(word[0] for word in arguments),
            doubts=tuple(dict.fromkeys(self._doubts)),
        )

    def _option(self, at: int, end: int) -> int:
        """Read the options of one word; returns the place of the next."""
        from steward.slurm.option_table import VALUED, full_name, letters

        match = self._words[at]
        word, after = match[0], at + 1
        if word.startswith("--"):
            name = full_name(word[2:].partition("=")[0])
            if "=" in word:
                return self._valued(name, match.start() + word.index("=") + 1, after, end)
            if name in VALUED:
                return self._valued(name, self._start(after), after + 1, end)
            self._components[-1].append(Option(name))
            return after
        for name, attached in letters(word):
            if attached is None:
                return self._valued(name, self._start(after), after + 1, end)
            if attached:
                return self._valued(name, match.end() - len(attached), after, end)
            self._components[-1].append(Option(name))
        return after

    def _start(self, at: int) -> int:
        if at >= len(self._words):
            raise UsageError("the last option takes a value")
        return self._words[at].start()

    def _valued(self, name: str, start: int, after: int, end: int) -> int:
        """Take an option's value, which begins at a character of the line."""
        stop = self._words[after - 1].end()
        text = self._texts.get(name, "")
        if len(text) > stop - start and self._line.startswith(text, start):
            over = start + len(text)
            if over == len(self._line) or self._line[over] == " ":
                while after < end and self._words[after].start() < over:
                    after += 1
                stop = over
        while self._end is not None and after < end and not self._begins_option(after):
            # What is neither an option nor the script goes on with the value.
            stop = self._words[after].end()
            after += 1
            self._doubts.append(f"--{name}")
        self._components[-1].append(Option(name, self._line[start:stop]))
        return after

    def _begins_option(self, at: int) -> bool:
        from steward.slurm.option_table import full_name, letters

        word = self._words[at][0]
        if word == ":":
            return True
        if not word.startswith("-") or word == "-":
            return False
        try:
            if word.startswith("--"):
                return word == "--" or bool(full_name(word[2:].partition("=")[0]))
            return bool(list(letters(word)))
        except UsageError:
            return False


def _place_of_script(words: list["re.Match[str]"], record: JobRecord) -> int | None:
    """Where the script's name stands among the words; None if Slurm does not show it."""
    command = [match[0] for match in _WORD.finditer(record.command)]
    at = len(words) - len(command)
    if not command or at < 1:
        return None
    name = words[at][0]
    is_name = name == command[0] or os.path.basename(name) == os.path.basename(command[0])
    return at if is_name and [word[0] for word in words[at + 1 :]] == command[1:] else None
