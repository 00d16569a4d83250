"""Workers of the daemon that run consumers, the bank, the gate, and the myBRC API.

Each ``..._part`` function returns a `Part` for the supervisor, with the function that runs in the
worker's process:

- `run_consumers` feeds consumers from the journal; `patiently` waits for a resource;
- rules (`rules_part`), accounting (`accounting_parts`: job log and third-party plugins);
- bank (`banking_parts`): the gate, the bank's consumer, the myBRC server and the client of a remote
  myBRC server. `Pusher` sends fresh balances to the gate.

`workers.py` assembles these with all others.
"""

import logging
import os
import resource
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from steward.bank.errors import GateUnavailable
from steward.bank.gate.server import GateServer, Precedence
from steward.core.config import Settings
from steward.core.consumers import Consumer, Feed, feed_all
from steward.core.errors import StewardError, Unavailable
from steward.core.events import Event, utc_now
from steward.core.journal import JournalLink, JournalReader
from steward.core.journal.store import rows_of
from steward.core.sqlite import SqliteUnavailable
from steward.core.waits import Backoff, Stop
from steward.daemon.supervisor import Beat, Part
from steward.extensions.jobacct_plugins import (
    LOG,
    Around,
    LogConsumer,
    PluginConsumer,
    consumer_name,
    third_parties,
    types_of,
)

if TYPE_CHECKING:
    from steward.bank.gate.client import GateLink
    from steward.bank.ledger.ledger import Ledger
    from steward.core.http_server import Timeouts


log = logging.getLogger(__name__)

T = TypeVar("T")
MakeConsumer = Callable[[], Consumer]


def run_consumers(
    settings: Settings,
    makers: Sequence[MakeConsumer],
    stop: Stop,
    beat: Beat,
    *,
    registered: bool = True,
) -> None:
    """Run the main function of a worker that feeds consumers."""
    link = JournalLink(settings.state_dir, stop, subscribe=True)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    feeds = []
    for make in makers:
        consumer = patiently(make, stop, beat)
        feeds.append(Feed(consumer, reader, link, registered=registered))
    feed_all(feeds, link, stop, beat)


def patiently(make: Callable[[], T], stop: Stop, beat: Beat) -> T:
    """Call ``make`` until the resource it needs is available; the Stop ends the wait."""
    backoff = Backoff(0.02, 5.0)
    said = ""
    while True:
        try:
            return make()
        except Unavailable as error:
            if stop.is_set():
                raise
            # In the first moments the journal's process has not made its file yet.
            if str(error) != said and not isinstance(error, SqliteUnavailable):
                said = str(error)
                log.error("waiting: %s", error)
            stop.wait(backoff.next_s())
            beat()
            if stop.is_set():
                raise


RULES: Final = "rules"
_RULES_HANG_S: Final = 300.0


def rules_part(settings: Settings) -> Part:
    """Return the worker that runs the rules."""
    return Part(
        name=RULES, run=partial(_run_rules, settings), after=("journal",), hang_s=_RULES_HANG_S
    )


def _run_rules(settings: Settings, stop: Stop, beat: Beat) -> None:
    run_consumers(settings, [partial(_rules_consumer, settings)], stop, beat)


def _rules_consumer(settings: Settings) -> Consumer:
    """Make the consumer that runs the rules."""
    from steward.automation.rules.consumer import RulesConsumer
    from steward.automation.rules.execution import RunnersHand
    from steward.core.access import access_of
    from steward.daemon.contexts import action_registry

    def hand() -> RunnersHand:
        # One per thread: open files of an action context are for one thread.
        return RunnersHand(settings, access_of(settings), action_registry(settings))

    return RulesConsumer(settings, hand)


_JOURNAL: Final = ("journal",)
_NICENESS: Final = 10
"""Niceness of accounting workers: nobody waits for them."""
_CLOSING_HANG_S: Final = 3600.0
"""Time without a heartbeat after which the job log counts as hung, in seconds: closing a day takes
long."""
_PLUGIN_HANG_S: Final = 60.0


def accounting_parts(settings: Settings) -> list[Part]:
    """Return the accounting workers that a configuration needs."""
    parts = []
    if LOG in types_of(settings.accounting.type):
        parts.append(_log(settings))
    return [*parts, *(_plugin(settings, one) for one in third_parties(settings.accounting.type))]


def _log(settings: Settings) -> Part:
    """Return the worker of the job log."""

    def run(stop: Stop, beat: Beat) -> None:
        os.nice(_NICENESS)
        run_consumers(settings, [lambda: LogConsumer(settings)], stop, beat)

    return Part(name=LogConsumer.name, run=run, after=_JOURNAL, hang_s=_CLOSING_HANG_S)


def _plugin(settings: Settings, plugin_type: str) -> Part:
    """Return the worker of a third-party accounting plugin."""

    def run(stop: Stop, beat: Beat) -> None:
        os.nice(_NICENESS)
        around = Around(append=Appending(settings.state_dir).append, stop=stop, beat=beat)
        run_consumers(settings, [lambda: PluginConsumer(settings, plugin_type, around)], stop, beat)

    # The alarm within the process fires first.
    hang_s = _PLUGIN_HANG_S + 2 * settings.accounting.hook_timeout_s
    return Part(name=consumer_name(plugin_type), run=run, after=_JOURNAL, hang_s=hang_s)


class Appending:
    """Appends to the journal, without waiting while the journal's writer is down.

    Args:
        state_dir: The directory that holds the journal.
    """

    def __init__(self, state_dir: str) -> None:
        self._link = JournalLink(state_dir, Stop())

    def append(self, new: Sequence[Event]) -> None:
        """Append events durably.

        Raises:
            JournalUnavailable: The journal's writer is down.
        """
        self._link.ask("append", *rows_of(new))


def gate_part(settings: Settings) -> Part:
    """Return the gate's worker."""
    # Ledger workers query the gate until they end, and it goes on deciding meanwhile.
    return Part(name="gate", run=partial(run_gate, settings), last=True)


def run_gate(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Run the gate until the Stop is raised."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    precedence = Precedence()
    precedence.take()

    def beat_first() -> None:
        precedence.renew()
        beat()

    server = patiently(lambda: GateServer(settings), stop, beat_first)
    server.run(stop, beat_first)


_GATE_S = 1.0
"""Time-out of a call to the gate, in seconds."""
_MYBRC_HANG_S = 120.0


def mybrc_part(settings: Settings) -> Part:
    """Return the worker that serves the myBRC API, if [mybrc] has an address."""
    return Part(name="mybrc", run=partial(run_mybrc, settings), hang_s=_MYBRC_HANG_S)


def remote_part(settings: Settings) -> Part:
    """Return the worker that reports to a remote myBRC server, if [bank.remote] names one."""
    return Part(name="mybrc.remote", run=partial(run_remote, settings), hang_s=_MYBRC_HANG_S)


class Pusher:
    """Sends balances to the gate right after clients charge, so that its next answer includes them.

    If that fails, the bank's worker sends them in its next round.

    Args:
        ledger: The ledger.
        link: The client of the gate.
    """

    def __init__(self, ledger: "Ledger", link: "GateLink") -> None:
        self._ledger = ledger
        self._link = link
        self._position = 0

    def push(self) -> None:
        """Send the ledger's changes since the last call to the gate."""
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
    from steward.bank.gate.client import GateLink
    from steward.bank.ledger import open_ledger
    from steward.core.http_server import Served, Timeouts, listen, serve
    from steward.extensions.mybrc import (
        Affording,
        Doorkeeper,
        Office,
        Teller,
        UsersFile,
        make_application,
    )
    from steward.slurm.users import People

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
    """Send the outbox to the remote myBRC server and fetch balances until the Stop is raised."""
    from steward.bank.gate.client import GateLink
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


BANK: Final = "bank"
_JOURNAL_PART: Final = "journal"
_BANK_HANG_S: Final = 1800.0
"""Time without a heartbeat after which the bank counts as hung, in seconds: comparing a long period
with slurmdbd's records takes long."""


def banking_parts(settings: Settings) -> list[Part]:
    """Return the bank's workers, for a configuration with a bank."""
    parts = [
        gate_part(settings),
        Part(
            name=BANK, run=partial(_run_bank, settings), after=(_JOURNAL_PART,), hang_s=_BANK_HANG_S
        ),
    ]
    if settings.mybrc.listen:
        parts.append(mybrc_part(settings))
    if settings.bank.remote.url:
        parts.append(remote_part(settings))
    return parts


def _run_bank(settings: Settings, stop: Stop, beat: Beat) -> None:
    run_consumers(settings, [partial(_bank_consumer, settings)], stop, beat)


def _bank_consumer(settings: Settings) -> Consumer:
    from steward.bank.consumer import BankConsumer

    return BankConsumer(settings)
