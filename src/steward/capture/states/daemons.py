"""How Slurm's own daemons are: one that was started anew, one that went, one that came back.

Whether slurmctld answers is told by the snapshots of the queue; here is told that
it is another than before, and what becomes of slurmdbd.
"""

import socket
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from steward.capture.states.store import DaemonSeen, StateStore
from steward.core.events import ControllerState
from steward.slurm.machine import Ping

SLURMCTLD: Final = "slurmctld"
SLURMDBD: Final = "slurmdbd"


class Daemons:
    """Compares how the daemons are with how they were.

    Args:
        store: Remembers them, and what is to be told.
    """

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def slurmctld(self, started_at: datetime, *, silent: bool = False) -> bool:
        """See when slurmctld started; whether it is another than before.

        Args:
            started_at: Its boot time.
            silent: Whether somebody else tells.

        Raises:
            SqliteUnavailable: It cannot be written down now.
        """
        before = self._store.daemons.get(SLURMCTLD)
        restarted = before is not None and before.started_at != started_at
        told = ControllerState(
            up=True,
            message=f"started at {started_at:%Y-%m-%dT%H:%M:%SZ}",
            daemon=SLURMCTLD,
            restarted=True,
        )
        # Two who watch the same slurmctld tell of one start.
        key = f"started:{int(started_at.timestamp())}"
        self._store.see(
            SLURMCTLD,
            DaemonSeen(up=True, started_at=started_at),
            told if restarted and not silent else None,
            key,
        )
        return restarted

    def tell_reconfigured(self) -> None:
        """Tell that slurmctld has read slurm.conf again.

        Raises:
            SqliteUnavailable: It cannot be written down now.
        """
        seen = self._store.daemons.get(SLURMCTLD)
        if seen is not None:
            message = "slurmctld has read its configuration again"
            told = ControllerState(up=True, message=message, reconfigured=True)
            self._store.see(SLURMCTLD, seen, told)

    def slurmdbd(self, pings: Iterable[Ping], *, silent: bool = False) -> None:
        """See whether slurmdbd answers; nothing is told where there is none.

        Raises:
            SqliteUnavailable: It cannot be written down now.
        """
        found = [ping.up for ping in pings if ping.daemon == SLURMDBD]
        if not found:
            return
        up = any(found)
        before = self._store.daemons.get(SLURMDBD)
        # That it is there at first is no news; that it is not, is.
        is_news = before.up != up if before is not None else not up
        message = "" if up else "slurmdbd does not answer: slurmctld keeps what it is to be told"
        told = ControllerState(up=up, message=message, daemon=SLURMDBD)
        self._store.see(SLURMDBD, DaemonSeen(up=up), told if is_news and not silent else None)


def in_charge(pings: Iterable[Ping]) -> str:
    """The host of the slurmctld in charge: the first that answers; "" where none does."""
    return next((ping.host for ping in pings if ping.daemon == SLURMCTLD and ping.up), "")


def stands_by(pings: Iterable[Ping], own_host: str = "") -> bool:
    """Whether this is the host of a slurmctld that stands by, while another is in charge.

    Args:
        pings: Which daemons answer.
        own_host: This host's name; asked of the kernel if empty.
    """
    pings = tuple(pings)
    own = _short(own_host or socket.gethostname())
    hosts = {_short(ping.host) for ping in pings if ping.daemon == SLURMCTLD}
    charge = _short(in_charge(pings))
    return own in hosts and bool(charge) and charge != own


def _short(host: str) -> str:
    return host.partition(".")[0].lower()
