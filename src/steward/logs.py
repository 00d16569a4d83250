"""How the daemon's processes log: one line a record, on stderr, safe against hostile values.

The standard library does it all: a structured logging package costs more
memory per process than the rest of a small daemon. A line is logfmt
(https://brandur.org/logfmt): ``warning steward.capture.spool msg="…" job=7``.
Where systemd reads stderr, each line begins with its priority, sd-daemon(3).
"""

import logging
import os
import re
import sys
import time
import traceback
from typing import TextIO

_PLAIN = re.compile(r"[A-Za-z0-9_.,:;/+@%{}\[\]()*!?<>~^$#&|-]+")
_PRIORITIES = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_LONGEST_VALUE = 8192
_FRAMES = 12


def quote(value: object) -> str:
    """A value as it stands behind ``key=``: plain, or in quotes with all else escaped.

    Nothing in it can end the line or the value, and no byte of it reaches a
    terminal as a control sequence.
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


class LineFormatter(logging.Formatter):
    """Renders a record as one line.

    Args:
        part: Which of the daemon's processes this is; "" for none.
        for_journal: Whether systemd reads the lines: it wants a priority and adds the time.
    """

    def __init__(self, part: str = "", for_journal: bool = False) -> None:
        super().__init__()
        self._part = part
        self._for_journal = for_journal

    def format(self, record: logging.LogRecord) -> str:
        """The line, without its end."""
        level = record.levelname.lower()
        if self._for_journal:
            head = f"<{_PRIORITIES.get(record.levelno, 6)}>{level}"
        else:
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            head = f"{moment}.{int(record.msecs):03d}Z {level}"
        pairs = [f"msg={quote(_message(record))}"]
        if self._part:
            pairs.append(f"part={quote(self._part)}")
        for name, value in vars(record).items():
            if name not in _OWN_ATTRIBUTES:
                pairs.append(f"{_key(name)}={quote(value)}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            pairs.append(f"error={quote(f'{type(error).__name__}: {error}')}")
            pairs.append(f"at={quote(_frames(error))}")
        return f"{head} {quote(record.name)} {' '.join(pairs)}"


def set_up(level: str, part: str = "", stream: TextIO | None = None) -> None:
    """Send every log record of this process to stderr, one line each.

    Args:
        level: debug, info, warning or error.
        part: Which of the daemon's processes this is; "" for none.
        stream: Where to instead of stderr.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(part, for_journal=_is_journal(handler.stream)))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # It tells each URL that is asked, and that of a webhook lets anybody write there.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # A log that cannot be written (its reader is gone) must not add to what went wrong.
    logging.raiseExceptions = False


def _is_journal(stream: TextIO) -> bool:
    """Whether ``stream`` leads to systemd's journal, as systemd.exec(5) says to find out."""
    named = os.environ.get("JOURNAL_STREAM", "")
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False  # a stream without a file is not the journal
    return named == f"{status.st_dev}:{status.st_ino}"


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError):
        # A wrong log call is a mistake of ours, and no reason to lose what it wanted to say.
        return f"{record.msg!r} {record.args!r}"


def _key(name: str) -> str:
    return name if _PLAIN.fullmatch(name) else re.sub(r"[^A-Za-z0-9_.]", "_", name) or "_"


def _frames(error: BaseException) -> str:
    """The innermost places that the error came through, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(
        f"{os.path.basename(frame.filename)}:{frame.lineno} {frame.name}"
        for frame in reversed(frames)
    )
