"""``archive consume``: errors in options are reported before anything is created."""

from pathlib import Path

import pytest

from harness.commands import steward


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--server", "k1"], "invalid broker 'k1': write host:port"),
        (["--server", ""], "--server has no value: give one"),
        (["--server", "k1:9092", "--topic", "a b"], "invalid topic 'a b'"),
        (
            ["--server", "k1:9092", "--sasl", "PLAIN"],
            "'--sasl' has no effect without '--sasl-user' and '--password-file': set them",
        ),
        (
            ["--server", "k1:9092", "--sasl-user", "u"],
            "needs both '--sasl-user' and '--password-file'",
        ),
        (["--server", "k1:9092", "--key-file", "k"], ": needs both '--certificate-file' and"),
        (["--server", "k1:9092", "--sasl", "GUESS"], "'--sasl': 'GUESS' is not one of 'PLAIN',"),
        (["--server", "k1:9092", "--layout", "{nothing}"], "layout"),
        (["--server", "k1:9092", "--clusters", ""], "--clusters has no value: give one"),
    ],
    ids=str,
)
def test_wrong_options(words: list[str], said: str, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    done = steward("archive", "consume", "--from", "kafka", "--archive", str(archive), *words)
    assert done.returncode == 2
    assert said in done.stderr.decode()
    assert not archive.exists()


def test_an_archive_that_watch_keeps_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    archive, settings = tmp_path / "archive", tmp_path / "archive/.steward/steward.toml"
    watched = ["--cluster", "c", "--spool", str(tmp_path / "spool"), "--no-slurm", "--once"]
    assert steward("archive", "watch", *watched, "--archive", str(archive)).returncode == 0
    before = settings.read_bytes()
    words = ["--from", "kafka", "--server", "k1:9092", "--archive", str(archive)]
    done = steward("archive", "consume", *words)
    assert done.returncode == 1
    assert b"is in use by another command" in done.stderr
    assert settings.read_bytes() == before
    assert steward("archive", "watch", *watched, "--archive", str(archive)).returncode == 0


def test_kafka_is_what_can_be_consumed(tmp_path: Path) -> None:
    words = ["--from", "mail", "--server", "k1:9092", "--archive", str(tmp_path / "a")]
    done = steward("archive", "consume", *words)
    assert done.returncode == 2
    assert b"kafka" in done.stderr
    done = steward("archive", "consume")
    assert b"missing option '--from'. Choose from: kafka (see" in done.stderr
