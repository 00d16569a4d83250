"""The processes ``mybrc``, which serves the myBRC API, and ``mybrc.remote``, which speaks it."""

import logging
from functools import partial
from typing import TYPE_CHECKING

from steward.bank.errors import GateUnavailable
from steward.core.config import Settings
from steward.core.errors import StewardError
from steward.core.events import utc_now
from steward.core.waiting import Stop
from steward.daemon.feeding import patiently
from steward.daemon.supervise import Beat, Part

if TYPE_CHECKING:
    from steward.bank.gate.link import GateLink
    from steward.bank.ledger.opened import Ledger
    from steward.core.serving import Timeouts

log = logging.getLogger(__name__)

_GATE_S = 1.0
_HANG_S = 120.0


def mybrc_part(settings: Settings) -> Part:
    """The process that serves the myBRC API, where [mybrc] has an address for it."""
    return Part(name="mybrc", run=partial(run_mybrc, settings), hang_s=_HANG_S)


def remote_part(settings: Settings) -> Part:
    """The process that tells a myBRC server elsewhere, where [bank.remote] names one."""
    return Part(name="mybrc.remote", run=partial(run_remote, settings), hang_s=_HANG_S)


class Pusher:
    """Tells the gate at once what clients have had charged, so that the next answer knows it.

    What it cannot tell is told by the bank's process within its next round.

    Args:
        ledger: What has changed.
        link: The gate.
    """

    def __init__(self, ledger: "Ledger", link: "GateLink") -> None:
        self._ledger = ledger
        self._link = link
        self._position = 0

    def push(self) -> None:
        """Tell the gate what has changed in the ledger since the last time."""
        try:
            with self._ledger.reading() as t:
                books = t.books(self._position)
            position = self._link.books(books)
            if position < books.after:
                with self._ledger.reading() as t:
                    books = t.books(position)
                position = self._link.books(books)
            self._position = position
        except GateUnavailable as error:
            log.debug("the gate is not told yet: %s", error)
        except StewardError as error:
            log.warning("the gate cannot be told what was charged: %s", error)


def run_mybrc(
    settings: Settings, stop: Stop, beat: Beat, *, timeouts: "Timeouts | None" = None
) -> None:
    """Serve the myBRC API until the Stop is raised.

    Args:
        settings: The configuration.
        stop: Ends the server when it is raised.
        beat: Called several times a second.
        timeouts: Timeouts of clients. Defaults if None.
    """
    from steward.bank.gate.link import GateLink
    from steward.bank.ledger import open_ledger
    from steward.core.serving import Served, Timeouts, listen, serve
    from steward.extensions.mybrc import (
        Affording,
        Doorkeeper,
        Office,
        Teller,
        UsersFile,
        make_application,
    )
    from steward.slurm.people import People

    ledger = patiently(lambda: open_ledger(settings), stop, beat)
    served = Served(
        name="the myBRC API",
        section="[mybrc]",
        listen=settings.mybrc.listen,
        certificate_file=settings.mybrc.certificate_file,
        key_file=settings.mybrc.key_file,
        timeouts=timeouts or Timeouts(),
    )
    listener = patiently(lambda: listen(served), stop, beat)
    cluster = settings.mybrc.cluster or next(iter(settings.cluster), "")
    link = GateLink(settings.state_dir, timeout_s=_GATE_S)
    people = People()
    office = Office(
        doorkeeper=Doorkeeper(ledger, UsersFile(settings.mybrc.users_file), utc_now),
        teller=Teller(ledger, cluster, people, utc_now),
        affording=Affording(settings, cluster, ledger, link, people),
        ledger=ledger,
        cluster=cluster,
        domain=settings.bank.notify.domain,
        now=utc_now,
        told=Pusher(ledger, link).push,
    )
    serve(served, make_application(office), listener, stop, beat)
    ledger.close()


def run_remote(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Tell the myBRC server elsewhere what is in the outbox, for ever."""
    from steward.bank.gate.link import GateLink
    from steward.bank.ledger import open_ledger
    from steward.extensions.mybrc import Balances, Passing

    ledger = patiently(lambda: open_ledger(settings), stop, beat)
    passing = patiently(lambda: Passing(settings, ledger, utc_now), stop, beat)
    link = GateLink(settings.state_dir, timeout_s=_GATE_S)
    balances = Balances(settings, ledger, link, Pusher(ledger, link).push, utc_now)
    while not stop.is_set():
        beat()
        wait_s = passing.send_once(stop, beat)
        if settings.bank.remote.balances:
            wait_s = min(wait_s, balances.ask_once(stop, beat))
        stop.wait(wait_s)
    balances.close()
    passing.close()
    ledger.close()
