"""``steward mail``: Slurm's MailProg, which puts the page of a job into the mail of its end.

slurmctld starts it for every mail, as SlurmUser, and goes on at once: what has
to be waited for (the facts from the nodes come within a minute) is waited for by
a process of its own, of which there are only so many. Whatever fails on the way,
the mail that Slurm would have sent is sent. Subjects, names and addresses are
what users wrote: newlines, options and commands in them come to nothing.
"""

import os
import re
import socket as sockets
import syslog
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Final

import typer

from steward.accounting.job_page.requests import PageAnswer, PageRequest
from steward.accounting.settings import MailSettings
from steward.cli.charts import ASCII, plain
from steward.cli.job import rows_of
from steward.cli.options import Archive, Config, Socket
from steward.client import DaemonAway
from steward.client.calls import call
from steward.client.places import CLIENT_PATH, Place, settings_readable
from steward.core.errors import Refused, StewardError, UsageError
from steward.core.notifications import Letter, NotTaken, read_body, send_letter
from steward.core.printable import safe
from steward.daemon.registry import action

_WITH_PAGE: Final = frozenset({"Ended", "Failed"})
"""SLURM_JOB_MAIL_TYPE of the mails that tell of a job's end (slurm 22.05 to 26.05)."""
_MOST_WAITING: Final = 16
"""Processes that wait at a time, for all mails of a host: each takes some 40 MB."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 15.0
_ADDRESS: Final = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.+=~-]{0,127}(?:@[A-Za-z0-9.-]{1,255})?")
_MOST_ADDRESSES: Final = 10


def mail(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Who gets it.")],
    subject: Annotated[
        str, typer.Option("--subject", "-s", metavar="TEXT", help="The mail's subject.")
    ] = "",
    program: Annotated[
        str, typer.Option("--program", metavar="PATH", help="What sends it, as MailProg did.")
    ] = "",
    stay: Annotated[
        bool, typer.Option("--stay", help="Return when it is sent, not before.")
    ] = False,
    config: Config = "",
    socket: Socket = "",
    archive: Archive = "",
) -> None:
    """Send a mail of Slurm's, with the job's page at its end.

    For slurm.conf's MailProg, see docs/job.md; the job is taken from the environment
    that Slurm gives it.
    """
    place = Place(config=config, socket=socket, archive=archive)
    found = _settings(place)
    settings = MailSettings() if found is None else found
    # Who says where Steward is may have it restarted; where nobody does, there is none.
    is_here = found is not None or bool(socket or archive) or os.path.exists(CLIENT_PATH)
    letter = Letter(
        to=addresses(address),
        subject=safe(subject),
        body=read_body(),
        program=program or settings.program,
        sendmail=settings.sendmail,
        sender=settings.sender,
        timeout_s=settings.timeout_s,
    )
    if stay:
        _send(letter, place, settings.wait_s, is_here)
    elif _become_independent():
        try:
            _send(letter, place, settings.wait_s, is_here)
        except Exception as error:
            _log(f"a mail to {address!r} could not be sent: {error}")
        finally:
            os._exit(0)


def addresses(text: str) -> tuple[str, ...]:
    """The addresses of a comma-separated list.

    Raises:
        UsageError: One of them is no address; a user may write anything there.
    """
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    for one in found:
        if not _ADDRESS.fullmatch(one):
            raise UsageError(f"{one!r} is no address that a mail can be sent to", one)
    if not found or len(found) > _MOST_ADDRESSES:
        raise UsageError(f"a mail goes to 1 to {_MOST_ADDRESSES} addresses, not {len(found)}", text)
    return found


def _settings(place: Place) -> MailSettings | None:
    """[mail], where this user may read the configuration; None where there is none."""
    try:
        settings = settings_readable(place)
    except StewardError as error:
        _log(f"the configuration is passed over: {error}")
        settings = None
    return None if settings is None else settings.mail


def _send(letter: Letter, place: Place, wait_s: float, is_here: bool) -> None:
    page = _page(letter.subject, place, wait_s, is_here)
    try:
        send_letter(letter, page)
    except NotTaken:
        if not page:
            raise
        # A mailer that would not have the longer text may have the short one.
        send_letter(letter, "")


def _page(subject: str, place: Place, wait_s: float, is_here: bool) -> str:
    """The page of the job that the mail is about; "" where there is none to be had."""
    request = _request(subject)
    if request is None:
        return ""
    try:
        answer = _answer(lambda: call(place, action("accounting.job"), request), wait_s, is_here)
        return plain(rows_of(answer, ASCII))
    except Exception as error:
        # The mail goes out without it, whatever it was.
        _log(f"no page of job {request.job}: {error}")
        return ""


def _request(subject: str) -> PageRequest | None:
    """What subject and environment say that the mail is about; None for a mail without a page."""
    given = os.environ
    if given.get("SLURM_JOB_MAIL_TYPE") not in _WITH_PAGE:
        return None
    array = given.get("SLURM_ARRAY_JOB_ID", "")
    # A mail about one task comes only to who asked for ARRAY_TASKS, and says nothing of a sum.
    if array.isdecimal() and "Array Summary" in subject:
        return PageRequest(job=array, array=True)
    job = given.get("SLURM_JOB_ID", "")
    return PageRequest(job=job) if job.isdecimal() else None


def _answer(ask: Callable[[], PageAnswer], wait_s: float, is_here: bool) -> PageAnswer:
    """The page as soon as it is whole, or as it is when that has been waited for long enough.

    Where no Steward is said to be here, none is waited for that does not answer.
    """
    with _slot() as may_wait:
        deadline = time.monotonic() + (wait_s if may_wait else 0.0)
        pause_s = _FIRST_WAIT_S
        while True:
            left_s = deadline - time.monotonic()
            try:
                answer = ask()
                if left_s <= 0 or is_whole(answer):
                    return answer
            except (UsageError, Refused):
                raise  # that will not change
            except StewardError as error:
                # A daemon that is being restarted, or a job that it has not heard of yet.
                if left_s <= 0 or (isinstance(error, DaemonAway) and not is_here):
                    raise
            time.sleep(min(pause_s, max(0.0, left_s)))
            pause_s = min(2 * pause_s, _LONGEST_WAIT_S)


def is_whole(answer: PageAnswer) -> bool:
    """Whether nothing more is to be expected: the run is over, and its nodes have reported."""
    if answer.array is not None:
        return not any(state in answer.array.states for state in ("RUNNING", "COMPLETING"))
    if not answer.runs or not answer.runs[-1].line.end_us:
        return False
    last = answer.runs[-1]
    reported = bool(last.steps) and not last.efficiency.at_least
    return reported or not answer.hears_nodes


@contextmanager
def _slot() -> Iterator[bool]:
    """Whether this process may wait: so many of this user's at a time, whatever becomes of them."""
    with sockets.socket(sockets.AF_UNIX, sockets.SOCK_DGRAM) as held:
        for number in range(_MOST_WAITING):
            try:
                # A name that is no file: it is gone with the process that holds it.
                held.bind(f"\0steward-mail-{os.geteuid()}-{number}")
            except OSError:
                continue
            yield True
            return
    yield False


def _become_independent() -> bool:
    """Let the caller go on, if a process can be had; True in the process that does the work."""
    with suppress(OSError):  # a limit on processes: the mail goes out while the caller waits
        if os.fork():
            return False
        os.setsid()
        if os.fork():
            os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    os.chdir("/")
    return True


def _log(message: str) -> None:
    syslog.syslog(syslog.LOG_MAIL | syslog.LOG_WARNING, f"steward mail: {safe(message)}")
