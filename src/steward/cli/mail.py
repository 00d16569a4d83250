"""``steward mail``: Slurm's MailProg, which appends the job page to the mail of a job's end.

slurmctld starts it for every mail, as SlurmUser, and does not wait. The reports of nodes arrive
within a minute; a background process, of which at most 16 run at once, waits for them. On any
failure it sends the mail that Slurm would have sent. Subjects, names and addresses come from users:
newlines, options and commands in them have no effect.
"""

import os
import re
import socket as sockets
import syslog
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Final

from steward.accounting.job_page.requests import PageAnswer, PageRequest
from steward.accounting.settings import MailSettings
from steward.cli.charts import ASCII, render_plain
from steward.cli.job import layout_reply
from steward.cli.options import Archive, Config, Socket
from steward.cli.parameters import Argument, Option
from steward.client import DaemonAway
from steward.client.calls import call_action
from steward.client.places import CLIENT_PATH, ClientPlace, find_readable_settings
from steward.core.errors import PermissionRefused, StewardError, UsageError
from steward.core.notifications import MailRejected, OutgoingMail, read_mail_body, send_mail
from steward.core.printable import escape_line
from steward.daemon.registry import get_action

_END_MAIL_TYPES: Final = frozenset({"Ended", "Failed"})
"""SLURM_JOB_MAIL_TYPE of mails about a job's end (Slurm 22.05 to 26.05)."""
_MAX_WAITING_PROCESSES: Final = 16
"""Largest number of waiting processes on a host; each takes some 40 MB."""
REPORTS_WAIT_S: Final = 120.0
"""Longest wait for the nodes' reports, in seconds."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 15.0
_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+=~-]{0,127}(?:@[A-Za-z0-9.-]{1,255})?")
"""A mail address or local user, without characters that a mailer could interpret."""
_MAX_ADDRESSES: Final = 10
"""Most addresses of one mail."""


def mail(
    address: Annotated[str, Argument(metavar="ADDRESS", help="Recipients: addresses or users.")],
    subject: Annotated[
        str, Option("--subject", "-s", metavar="TEXT", help="Subject of the mail.")
    ] = "",
    program: Annotated[
        str,
        Option(
            "--program",
            metavar="PATH",
            help="Program that sends the mail, called as Slurm calls MailProg.",
        ),
    ] = "",
    stay: Annotated[
        bool, Option("--stay", help="Wait until the mail is sent. Default: return at once.")
    ] = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Send one of Slurm's job mails, with the job page appended.

    Set it as MailProg in slurm.conf, see docs/job.md. It takes the job from the environment
    that Slurm sets.
    """
    place = ClientPlace(config=config, socket=socket, archive=archive)
    site_settings = _read_mail_settings(place)
    settings = MailSettings() if site_settings is None else site_settings
    # A Steward is expected here if anything says where it is; only then wait for a restart.
    is_expected = (
        site_settings is not None or bool(socket or archive) or os.path.exists(CLIENT_PATH)
    )
    message = OutgoingMail(
        to=parse_addresses(address),
        subject=escape_line(subject),
        body=read_mail_body(),
        program=program or settings.program,
        sender=settings.sender,
    )
    if stay:
        _send_with_page(message, place, is_expected)
    elif _detach_process():
        try:
            _send_with_page(message, place, is_expected)
        except Exception as error:
            _warn_syslog(f"cannot send a mail to {address!r}: {error}")
        finally:
            os._exit(0)


def parse_addresses(text: str) -> tuple[str, ...]:
    """Parse a comma-separated list of mail addresses.

    Raises:
        UsageError: A part is no valid address; users may write anything there.
    """
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        if not _ADDRESS.fullmatch(address):
            raise UsageError(
                f"invalid mail address {address!r}: give user@host or the name of a user", address
            )
    if not addresses or len(addresses) > _MAX_ADDRESSES:
        raise UsageError(f"{len(addresses)} recipients given: give 1 to {_MAX_ADDRESSES}", text)
    return addresses


def _read_mail_settings(place: ClientPlace) -> MailSettings | None:
    """Return [mail] if this user may read the configuration, else None."""
    try:
        settings = find_readable_settings(place)
    except StewardError as error:
        _warn_syslog(f"configuration ignored: {error}")
        settings = None
    return None if settings is None else settings.mail


def _send_with_page(message: OutgoingMail, place: ClientPlace, is_expected: bool) -> None:
    """Send a mail with the job page if available."""
    page = _fetch_page_text(message.subject, place, is_expected)
    try:
        send_mail(message, page)
    except MailRejected:
        if not page:
            raise
        # The mailer may accept the mail without the longer text.
        send_mail(message, "")


def _fetch_page_text(subject: str, place: ClientPlace, is_expected: bool) -> str:
    """Return the page of the mail's job, or "" if unavailable."""
    request = _make_page_request(subject)
    if request is None:
        return ""
    try:
        reply = _await_page(
            lambda: call_action(place, get_action("accounting.job"), request), is_expected
        )
        return render_plain(layout_reply(reply, ASCII))
    except Exception as error:
        # Send the mail without the page, whatever the error.
        _warn_syslog(f"mail sent without the page of job {request.job}: {error}")
        return ""


def _make_page_request(subject: str) -> PageRequest | None:
    """Return the request for the job that subject and environment name; None if no page fits."""
    environment = os.environ
    if environment.get("SLURM_JOB_MAIL_TYPE") not in _END_MAIL_TYPES:
        return None
    array_id = environment.get("SLURM_ARRAY_JOB_ID", "")
    # Mails about single tasks, for --mail-type=ARRAY_TASKS only, do not say "Array Summary".
    if array_id.isdecimal() and "Array Summary" in subject:
        return PageRequest(job=array_id, array=True)
    job_id = environment.get("SLURM_JOB_ID", "")
    return PageRequest(job=job_id) if job_id.isdecimal() else None


def _await_page(fetch: Callable[[], PageAnswer], is_expected: bool) -> PageAnswer:
    """Return the job page once it is complete, or as it is when the wait ends.

    If no Steward is known on this host, do not wait for one that does not answer.
    """
    with _take_wait_slot() as may_wait:
        deadline = time.monotonic() + (REPORTS_WAIT_S if may_wait else 0.0)
        pause_s = _FIRST_WAIT_S
        while True:
            remaining_s = deadline - time.monotonic()
            try:
                reply = fetch()
                if remaining_s <= 0 or is_page_final(reply):
                    return reply
            except (UsageError, PermissionRefused):
                raise  # a retry would not help
            except StewardError as error:
                # The daemon restarts, or has not heard of the job yet.
                if remaining_s <= 0 or (isinstance(error, DaemonAway) and not is_expected):
                    raise
            time.sleep(min(pause_s, max(0.0, remaining_s)))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)


def is_page_final(reply: PageAnswer) -> bool:
    """Return True if the page is final: the run is over and its nodes have reported."""
    if reply.array is not None:
        return not any(state in reply.array.states for state in ("RUNNING", "COMPLETING"))
    if not reply.runs or not reply.runs[-1].line.end_us:
        return False
    last_run = reply.runs[-1]
    has_reports = bool(last_run.steps) and not last_run.efficiency.at_least
    return has_reports or not reply.hears_nodes


@contextmanager
def _take_wait_slot() -> Iterator[bool]:
    """Yield whether this process may wait: the number of waiting processes of a user is limited."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as slot_socket:
        for number in range(_MAX_WAITING_PROCESSES):
            try:
                # An abstract socket name, freed when its process ends, however it ends.
                slot_socket.bind(f"\0steward-mail-{os.geteuid()}-{number}")
            except OSError:
                continue
            yield True
            return
    yield False


def _detach_process() -> bool:
    """Continue in a background process: return True there, False in the caller."""
    with suppress(OSError):  # process limit reached: send while the caller waits
        if os.fork():
            return False
        os.setsid()
        if os.fork():
            os._exit(0)
    null_fd = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null_fd, fd)
    os.chdir("/")
    return True


def _warn_syslog(message: str) -> None:
    """Log a warning to syslog."""
    syslog.syslog(syslog.LOG_MAIL | syslog.LOG_WARNING, f"steward mail: {escape_line(message)}")
