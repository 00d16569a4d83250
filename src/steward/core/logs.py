"""Logging of the daemon's processes: one line per record, logfmt or JSON, to stderr or a file.

``configure_logging`` installs a handler with a :class:`LineFormatter` or :class:`JsonFormatter`,
and ``set_log_worker`` names the process after a fork. :class:`LogLimit` limits lines that would
repeat. The module uses only the standard library: a
structured logging package costs more memory per process than the rest of a small daemon. Text from
users cannot break a line or send a control sequence to a terminal. A line is logfmt
(https://brandur.org/logfmt), ``warning steward.capture.spool msg="…" job=7``, or a JSON object. If
systemd reads stderr, each line begins with its priority, sd-daemon(3). A log file may be rotated at
any time by renaming it; no process needs a signal.
"""

import logging
import mmap
import os
import re
import struct
import sys
import time
import traceback
from typing import Any, Literal, TextIO

import msgspec

from steward.core.errors import Unavailable

LogFormat = Literal["logfmt", "json"]

_PLAIN = re.compile(r"[A-Za-z0-9_.,:;/+@%{}\[\]()*!?<>~^$#&|-]+")
_PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every log record, which are no fields of the message."""
_LONGEST_VALUE = 8192
"""Longest value, in characters; longer ones are cut."""
_FRAMES = 12
"""Most code locations of an error in a line."""


def quote_value(value: object) -> str:
    """Render a value for ``key=``: plain, or in quotes with special characters escaped.

    Nothing in it can end the line or the value, and no control sequence reaches a terminal.
    """
    text = str(value)
    if len(text) > _LONGEST_VALUE:
        text = text[:_LONGEST_VALUE] + "…"
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    if not escaped.isprintable():
        escaped = "".join(
            letter if letter.isprintable() else letter.encode("unicode_escape").decode()
            for letter in escaped
        )
    return f'"{escaped}"'


class LogUnavailable(Unavailable):
    """The log file cannot be written."""


class LineFormatter(logging.Formatter):
    """Formatter for logfmt lines.

    Args:
        worker: Name of this process in the daemon; "" for none.
        for_journal: Whether systemd reads the lines: it needs a priority and adds the time.
    """

    def __init__(self, worker: str = "", for_journal: bool = False) -> None:
        super().__init__()
        self.worker = worker
        self._for_journal = for_journal

    def get_prefix(self, record: logging.LogRecord) -> str:
        """Return the priority prefix for systemd, "" if it does not read the lines."""
        return f"<{_PRIORITIES.get(record.levelno, 6)}>" if self._for_journal else ""

    def collect_fields(self, record: logging.LogRecord) -> dict[str, object]:
        """Return a record's fields by name, except its message."""
        fields: dict[str, object] = {"worker": self.worker} if self.worker else {}
        for name, value in vars(record).items():
            if name not in _OWN_ATTRIBUTES:
                fields[_clean_key(name)] = value
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            fields["error"] = f"{type(error).__name__}: {error}"
            fields["at"] = _format_frames(error)
        return fields

    def format(self, record: logging.LogRecord) -> str:
        """Render a record as one line, without a newline."""
        level = record.levelname.lower()
        head = (
            f"{self.get_prefix(record)}{level}"
            if self._for_journal
            else f"{_format_time(record)} {level}"
        )
        pairs = [f"msg={quote_value(_get_message(record))}"]
        pairs += [
            f"{name}={quote_value(value)}" for name, value in self.collect_fields(record).items()
        ]
        return f"{head} {quote_value(record.name)} {' '.join(pairs)}"


class JsonFormatter(LineFormatter):
    """Formatter for JSON objects: numbers stay numbers, all else becomes text."""

    def format(self, record: logging.LogRecord) -> str:
        """Render a record as one line, without a newline."""
        fields: dict[str, Any] = {
            "time": _format_time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _simplify(_get_message(record)),
        }
        for name, value in self.collect_fields(record).items():
            fields.setdefault(name, _simplify(value))
        return self.get_prefix(record) + _escape_json(msgspec.json.encode(fields).decode())


class ReopeningFileHandler(logging.Handler):
    """Handler that appends to a file, and reopens it after it was renamed or removed.

    Each line is one write at the file's end, so that lines of several processes do not mix.

    Args:
        path: The file.

    Raises:
        LogUnavailable: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._fd = -1
        self._file_id: tuple[int, int] | None = None
        try:
            self._open()
        except OSError as error:
            raise LogUnavailable(f"cannot log to {path}: {error.strerror}", path) from error

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; one that cannot be written is lost, without an exception."""
        try:
            line = self.format(record) + "\n"
            self._reopen_if_rotated()
            os.write(self._fd, line.encode("utf-8", "backslashreplace"))
        except OSError:
            self.handleError(record)

    def close(self) -> None:
        """Close the file."""
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reopen_if_rotated(self) -> None:
        """Reopen the file if it was renamed or removed."""
        try:
            info = os.stat(self._path)
            is_same = self._file_id == (info.st_dev, info.st_ino)
        except FileNotFoundError:
            is_same = False
        if not is_same:
            self._open()

    def _open(self) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        if self._fd >= 0:
            os.close(self._fd)
        info = os.fstat(fd)
        self._fd, self._file_id = fd, (info.st_dev, info.st_ino)


def configure_logging(
    level: str,
    worker: str = "",
    stream: TextIO | None = None,
    *,
    line_format: LogFormat = "logfmt",
    path: str = "",
) -> None:
    """Configure logging of this process: every record as one line to stderr or a file.

    Args:
        level: debug, info, warning or error.
        worker: Name of this process in the daemon; "" for none.
        stream: Stream to use instead of stderr.
        line_format: Format of a line.
        path: Log file; "" for none.

    Raises:
        LogUnavailable: The file cannot be written.
    """
    output = stream or sys.stderr
    handler = ReopeningFileHandler(path) if path else logging.StreamHandler(output)
    formatter = JsonFormatter if line_format == "json" else LineFormatter
    handler.setFormatter(formatter(worker, for_journal=not path and _is_journal(output)))
    root = logging.getLogger()
    for former in root.handlers[:]:
        root.removeHandler(former)
        if isinstance(former, ReopeningFileHandler):
            former.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    # httpx logs each URL, and a webhook's URL lets anybody post there.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # A log that cannot be written (its reader is gone) must not cause further errors.
    logging.raiseExceptions = False


def set_log_worker(worker: str) -> None:
    """Name the worker in every line of this process, after a fork."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LineFormatter):
            handler.formatter.worker = worker


def _is_journal(stream: TextIO) -> bool:
    """Return whether ``stream`` is systemd's journal, by the test in systemd.exec(5)."""
    journal_id = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False  # a stream without a file is not the journal
    return journal_id == f"{status.st_dev}:{status.st_ino}"


def _get_message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        # A wrong log call is a bug in Steward, but its text must not be lost.
        return f"{record.msg!r} {record.args!r}"


def _format_time(record: logging.LogRecord) -> str:
    moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{moment}.{int(record.msecs):03d}Z"


def _escape_json(text: str) -> str:
    """Escape unprintable characters in JSON text; they can only be in its strings."""
    if text.isprintable():
        return text
    return "".join(
        letter
        if letter.isprintable()
        else re.sub("....", r"\\u\g<0>", letter.encode("utf-16-be").hex())
        for letter in text
    )


def _simplify(value: object) -> object:
    """Convert a value to one that JSON can hold: a number, or text of limited length."""
    if isinstance(value, bool | int | float | None) and value == value:
        return value
    text = str(value)
    if len(text) > _LONGEST_VALUE:
        text = text[:_LONGEST_VALUE] + "…"
    return text.encode("utf-8", "backslashreplace").decode()


def _clean_key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else re.sub(r"[^A-Za-z0-9_.]", "_", name) or "_"


def _format_frames(error: BaseException) -> str:
    """Return the innermost code locations of an error, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(
        f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
    )


class LogLimit:
    """Limit of lines that would repeat: at most one an hour for each subject.

    Processes that are forked later share it, such as those that serve one request each. Its size is
    fixed: two subjects in one slot repeat their lines sooner.
    """

    _INTERVAL_S = 3600.0
    _SLOTS = 4096
    _SLOT = struct.Struct("=qd")
    """Hash of the last subject, and the monotonic time of its line."""

    def __init__(self) -> None:
        self._table = mmap.mmap(-1, self._SLOTS * self._SLOT.size)

    def choose_level(self, level: int, *subject: object) -> int:
        """Return the level of a line: as given if one is due, else DEBUG."""
        number, now = hash(subject), time.monotonic()
        place = number % self._SLOTS * self._SLOT.size
        last, logged_at = self._SLOT.unpack_from(self._table, place)
        if logged_at and last == number and now - logged_at < self._INTERVAL_S:
            return logging.DEBUG
        self._SLOT.pack_into(self._table, place, number, now)
        return level

    def reset(self, *subject: object) -> None:
        """Forget a subject: its next line is due."""
        place = hash(subject) % self._SLOTS * self._SLOT.size
        self._SLOT.pack_into(self._table, place, 0, 0.0)
