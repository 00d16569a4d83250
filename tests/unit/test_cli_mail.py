"""``steward mail``: what users can write into a mail, and the mails after failures."""

import base64
import email
import email.policy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from email.header import decode_header, make_header
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.job_page import answer_of, launch, run_line, run_of, task
from steward.accounting.job_page.requests import PageAnswer
from steward.cli import mail
from steward.cli.mail import is_page_final, parse_addresses
from steward.client import DaemonAway
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.core.notifications import MailNotSent, OutgoingMail, build_mail_message, send_mail
from steward.core.printable import escape_line

HOSTILE = "Slurm Job_id=7 Name=x\nBcc: all@example.org\n\nfree money"
Mailer = Callable[..., str]


@pytest.fixture
def mailer(tmp_path: Path) -> Mailer:
    """Return a function that makes a mailer from the body of a shell script."""

    def make(body: str, name: str = "mailer") -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return make


def keeps(directory: Path) -> str:
    """Return the body of a mailer that stores its input."""
    return (
        f'printf "%s\\0" "$@" > {directory}/words; cat > {directory}/new; '
        f"mv {directory}/new {directory}/mail"
    )


def letter(program: str = "/bin/false", timeout_s: float = 30.0) -> OutgoingMail:
    return OutgoingMail(
        to=("ada@example.org",),
        subject="done",
        body=b"said",
        program=program,
        sender="",
        timeout_s=timeout_s,
    )


def run(*words: str, body: bytes = b"", **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command as slurmctld does: with only the job's variables in the environment."""
    return subprocess.run(
        [sys.executable, "-m", "steward", "mail", *words],
        input=body,
        capture_output=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
    )


@pytest.mark.parametrize(
    "text",
    [
        "-oQ/tmp",
        "ada@example.org\nBcc: all@example.org",
        "|sh",
        "/etc/passwd",
        "",
        ",",
        "a b",
        "a" * 600,
    ],
)
def test_what_is_no_address_gets_no_mail(text: str) -> None:
    with pytest.raises(UsageError):
        parse_addresses(text)


def test_addresses() -> None:
    assert parse_addresses("ada") == ("ada",)
    assert parse_addresses("ada.b+x@example.org, bob@h") == ("ada.b+x@example.org", "bob@h")


def test_a_message_has_the_headers_that_it_should_and_no_others() -> None:
    built = email.message_from_bytes(
        build_mail_message(letter(), "München\n.\nFrom here"), policy=email.policy.default
    )
    assert set(built) == {
        *("To", "Subject", "Date", "Auto-Submitted"),
        *("Content-Type", "Content-Transfer-Encoding", "MIME-Version"),
    }
    assert built.get_content() == "München\n.\nFrom here\n"


WORDS = "Job Name=a =?utf-8?q?x=0aBcc:all@example.org=0a=0aHello?= Ended"
PIECES = st.sampled_from(
    ["=?", "?=", "=?utf-8?q?", "=?UTF-8?B?", "=0a", "=0d=0a", "Cg==", "Bcc:x", ":", "\n", "\r", " "]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=9)), max_size=12).map("".join))
@example(WORDS)
@example("=?utf-8?b?" + base64.b64encode(b"x\nBcc: all@example.org\n\n").decode() + "?=")
@example("\udce4 \u2028Bcc: x \x85Bcc: y")
@example("x " * 400)
@example("x" * 1200)
def test_no_subject_makes_headers_or_a_body(subject: str) -> None:
    sent = msgspec.structs.replace(
        letter(), subject=escape_line(subject), sender="Jörg <a@example.org>"
    )
    head, _, body = build_mail_message(sent, "hello").partition(b"\n\n")
    names = [line.partition(b":")[0] for line in head.split(b"\n") if line[:1] not in b" \t"]
    assert set(names) - {b"Subject"} == {
        *(b"To", b"From", b"Date", b"Auto-Submitted"),
        *(b"Content-Type", b"Content-Transfer-Encoding", b"MIME-Version"),
    }
    assert len(names) == len(set(names))
    assert b"\r" not in head
    assert max(map(len, head.split(b"\n"))) <= 998
    assert body == b"hello\n"


def test_a_subject_is_shown_as_it_was_written() -> None:
    for subject in (WORDS, "Slurm Job_id=1 Name=x Ended, Run time 00:00:01", "Jäger=?", ""):
        sent = msgspec.structs.replace(letter(), subject=subject)
        shown = email.message_from_bytes(build_mail_message(sent, "hello")).get("Subject", "")
        assert str(make_header(decode_header(shown))) == subject


@pytest.mark.parametrize("name", ["sendmail", "sendmail.postfix", "msmtp"])
def test_a_subject_with_newlines_becomes_one_line(
    tmp_path: Path, mailer: Mailer, name: str
) -> None:
    sendmail = mailer(keeps(tmp_path), name)
    config = tmp_path / "steward.toml"
    config.write_text(
        f'[cluster.c1]\nslurm = false\nspool = "{tmp_path}/spool"\n[mail]\nprogram = "{sendmail}"\n'
    )
    done = run("--stay", "--config", str(config), "-s", HOSTILE, "ada", body=b"hello\n")
    assert done.returncode == 0, done.stderr
    built = email.message_from_bytes((tmp_path / "mail").read_bytes(), policy=email.policy.default)
    assert built["Bcc"] is None
    assert built["Subject"].startswith("Slurm Job_id=7 Name=x\\nBcc: all@example.org\\n")
    assert built.get_content() == "hello\n"
    assert (tmp_path / "words").read_bytes() == b"-i\0-t\0"


def test_a_program_is_called_as_mailprog_is(tmp_path: Path, mailer: Mailer) -> None:
    program = mailer(keeps(tmp_path))
    done = run("--stay", "--program", program, "-s", "$(touch x)", "ada@example.org")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "words").read_bytes() == b"-s\0$(touch x)\0ada@example.org\0"


def test_the_plain_mail_goes_out_where_there_is_no_page(tmp_path: Path, mailer: Mailer) -> None:
    program = mailer(keeps(tmp_path))
    config = tmp_path / "steward.toml"
    config.write_text(
        f'run_dir = "{tmp_path}/nobody"\nstate_dir = "{tmp_path}/state"\n'
        f'[cluster.c1]\nslurm = false\nspool = "{tmp_path}/spool"\n[mail]\nwait_s = 0\n'
    )
    done = run(
        *("--stay", "--program", program, "--config", str(config), "-s", "x", "ada"),
        body=b"hello\n",
        SLURM_JOB_MAIL_TYPE="Ended",
        SLURM_JOB_ID="7",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mail").read_bytes() == b"hello"


def test_a_configuration_that_is_wrong_delays_no_mail(tmp_path: Path, mailer: Mailer) -> None:
    config = tmp_path / "steward.toml"
    config.write_text("[mail]\nwait_s = 'long'\n")
    done = run(
        *("--stay", "--program", mailer(keeps(tmp_path)), "--config", str(config), "ada"),
        SLURM_JOB_MAIL_TYPE="Ended",
        SLURM_JOB_ID="7",
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mail").exists()


def test_slurmctld_does_not_wait(tmp_path: Path, mailer: Mailer) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    program = mailer(f"read line < {gate}; {keeps(tmp_path)}")
    done = run("--program", program, "-s", "x", "ada")
    # It returned, although the mailer has not even begun to read.
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "mail").exists()
    gate.write_text("go\n")
    deadline = time.monotonic() + 60
    while not (tmp_path / "mail").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


NO_PROCESS = """
import errno, os, sys
from steward.cli.app import run

def fails():
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

os.fork = fails
sys.exit(run(sys.argv[1:]))
"""


def test_a_mail_goes_out_though_no_process_can_be_had(tmp_path: Path, mailer: Mailer) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-c", NO_PROCESS, "mail"),
            *("--program", mailer(keeps(tmp_path)), "-s", "x", "ada"),
        ],
        input=b"",
        capture_output=True,
        timeout=60,
        check=False,
        env={"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mail").exists()


def test_a_mailer_that_hangs_is_ended(tmp_path: Path, mailer: Mailer) -> None:
    program = mailer(f"echo $$ > {tmp_path}/pid; exec sleep 1000")
    with pytest.raises(MailNotSent, match="did not end within"):
        send_mail(letter(program, timeout_s=1.0), "")
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_mailer_that_fails_is_told_of(mailer: Mailer) -> None:
    done = run("--stay", "--program", mailer("exit 75"), "-s", "x", "ada")
    assert done.returncode == 1
    assert b"exited with code 75" in done.stderr
    done = run("--stay", "--program", "/no/such/mailer", "-s", "x", "ada")
    assert b"cannot start /no/such/mailer" in done.stderr


def test_a_longer_text_that_is_refused_goes_as_the_short_one(
    tmp_path: Path, mailer: Mailer, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, refused = tmp_path / "text", tmp_path / "refused"
    program = mailer(
        f"cat > {text}; if grep -q Efficiency {text}; then mv {text} {refused}; exit 1; fi"
    )
    over = run_of(run_line(10), launch(task(), peak_bytes=1))
    send(monkeypatch, program, lambda: answer_of(over, hears_nodes=True))
    assert refused.read_text().startswith("said\n")
    assert text.read_text() == "said"


def test_a_page_is_whole_when_nodes_have_reported() -> None:
    over = run_of(run_line(10), launch(task(), peak_bytes=1))
    assert is_page_final(answer_of(over, hears_nodes=True))
    assert not is_page_final(answer_of(run_of(run_line(10)), hears_nodes=True))
    assert is_page_final(answer_of(run_of(run_line(10)), hears_nodes=False))
    running = run_of(run_line(0, end_us=0, state="RUNNING"), launch(task(), peak_bytes=1))
    assert not is_page_final(answer_of(running, hears_nodes=True))
    lost = run_of(run_line(10, doubts="no-end"), launch(task(), ended=False))
    assert not is_page_final(answer_of(lost, hears_nodes=True))


def test_nobody_is_waited_for_where_no_steward_is_said_to_be(
    tmp_path: Path, mailer: Mailer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask() -> PageAnswer:
        asked.append(1)
        raise DaemonAway("no daemon answers", "")

    program = mailer(keeps(tmp_path))
    monkeypatch.setattr(mail, "find_readable_settings", lambda _place: None)
    monkeypatch.setattr(mail, "CLIENT_PATH", str(tmp_path / "nobody's"))
    send(monkeypatch, program, ask)
    assert len(asked) == 1
    assert (tmp_path / "mail").read_text() == "said"
    monkeypatch.setattr(mail, "REPORTS_WAIT_S", 1.5)
    monkeypatch.setattr(mail, "find_readable_settings", lambda _place: Settings())
    send(monkeypatch, program, ask)
    assert len(asked) > 3


def send(monkeypatch: pytest.MonkeyPatch, program: str, ask: Callable[[], PageAnswer]) -> None:
    """Send the mail of a job's end in this process; ``ask`` replaces the request to the daemon."""
    monkeypatch.setenv("SLURM_JOB_MAIL_TYPE", "Ended")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(mail, "read_mail_body", lambda: b"said")
    monkeypatch.setattr(mail, "call_action", lambda *_: ask())
    mail.mail("ada", "done", program, stay=True)
