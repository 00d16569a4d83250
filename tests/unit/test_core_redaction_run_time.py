"""Run time of redaction is linear in the length of the text."""

import time
from collections.abc import Callable

import pytest

from steward.core.config import RedactSettings
from steward.core.redaction import Redactor
from steward.extensions.torque.files import read_variables

SMALL, LARGE = 1 << 13, 1 << 16
MOST_TIMES = 3 * LARGE // SMALL
"""Maximum ratio of times: linear time is a third of it, quadratic time three times as much."""
WAYS: dict[str, Callable[[str], object]] = {
    "slurm": lambda text: Redactor(RedactSettings()).redact_entries(text.encode()),
    "torque": lambda text: read_variables(text, Redactor(RedactSettings())),
    "text": lambda text: Redactor(RedactSettings()).redact_text(text),
    "path": lambda text: Redactor(RedactSettings()).redact_path(text),
}
PIECES = [
    "a", "1", "-", "_", "=", ":", " ", "é", "éaaaa", "é,", "a=", " aa:", "aa   ", " -a", "\na",
    "=" + "a" * 1000, "://" + "a" * 1000, "a" * 40 + "://b:", "a" * 20 + "://:", "://", "a://",
    "a://:", "a://b:", "a://b:1", "http://" + "a" * 10 + ":", "a://" + "b" * 199 + ":",
    "x://abcdefghijklmnopqrstuv/", "-eyJ", "-eyJabcdefgh", "eyJabcdefgh.",
    "hooks.slack.com/services/", "sig=", "Bearer ", "ghp_", "PASS", "PASSENGER", "-----BEGIN A",
    ",a", ",AAAA", "," + "A" * 199,
    ",A=" + "b" * 100, ",A=" + "b" * 600, ",x:y=", " " + "a" * 80, "'\"",
    "password: ", "password:'", " -u a:", " -u a", "mysql ", " -pa", "mysql -pa ", '"key": "',
    " --passphrase a", " --token -a",
]  # fmt: skip


def time_s(way: str, text: str) -> float:
    began = time.process_time()
    WAYS[way](text)
    return time.process_time() - began


def is_within(ways: float, of: Callable[[], float], other: Callable[[], float]) -> bool:
    """Return whether one time is within a factor of another; disturbed runs do not count."""
    return any(of() < ways * other() for _ in range(8))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("piece", PIECES)
def test_time_grows_with_the_length_alone(way: str, piece: str) -> None:
    small, large = (f"X={piece * (size // len(piece.encode()))}" for size in (SMALL, LARGE))
    assert is_within(MOST_TIMES, lambda: time_s(way, large), lambda: time_s(way, small))


@pytest.mark.parametrize("way", WAYS)
def test_a_long_scheme_is_tried_once_and_not_once_a_letter(way: str) -> None:
    short, long = ("X=" + ("a" * letters + "://b:") * 2000 for letters in (1, 40))
    assert is_within(10, lambda: time_s(way, long), lambda: time_s(way, short))
