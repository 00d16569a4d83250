"""How a process of the daemon waits for what it needs, and feeds its consumers."""

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
    """A process that feeds consumers."""
    link = JournalLink(settings.state_dir, stop, subscribe=True)
    reader = patiently(lambda: JournalReader(settings.state_dir), stop, beat)
    feeds = []
    for make in makers:
        consumer = patiently(make, stop, beat)
        feeds.append(Feed(consumer, reader, link, registered=registered))
    feed_all(feeds, link, stop, beat)


def patiently(make: Callable[[], T], stop: Stop, beat: Beat) -> T:
    """What ``make`` makes, as soon as what it needs is there; the Stop ends the waiting."""
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
    """The process of the rules."""
    return Part(
        name=RULES, run=partial(_run_rules, settings), after=("journal",), hang_s=_RULES_HANG_S
    )


def _run_rules(settings: Settings, stop: Stop, beat: Beat) -> None:
    run_consumers(settings, [partial(_rules_consumer, settings)], stop, beat)


def _rules_consumer(settings: Settings) -> Consumer:
    from steward.automation.rules.consumer import RulesConsumer
    from steward.automation.rules.execution import RunnersHand
    from steward.core.access import access_of
    from steward.daemon.contexts import action_registry

    def hand() -> RunnersHand:
        # Each of its own: what rooms hold open is for one thread.
        return RunnersHand(settings, access_of(settings), action_registry(settings))

    return RulesConsumer(settings, hand)


_JOURNAL: Final = ("journal",)
_NICENESS: Final = 10
"""None of it is waited for."""
_CLOSING_HANG_S: Final = 3600.0
_PLUGIN_HANG_S: Final = 60.0


def accounting_parts(settings: Settings) -> list[Part]:
    """The processes of accounting that a configuration asks for."""
    parts = []
    if LOG in types_of(settings.accounting.type):
        parts.append(_log(settings))
    return [*parts, *(_plugin(settings, one) for one in third_parties(settings.accounting.type))]


def _log(settings: Settings) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        os.nice(_NICENESS)
        run_consumers(settings, [lambda: LogConsumer(settings)], stop, beat)

    return Part(name=LogConsumer.name, run=run, after=_JOURNAL, hang_s=_CLOSING_HANG_S)


def _plugin(settings: Settings, plugin_type: str) -> Part:
    def run(stop: Stop, beat: Beat) -> None:
        os.nice(_NICENESS)
        around = Around(append=Appending(settings.state_dir).append, stop=stop, beat=beat)
        run_consumers(settings, [lambda: PluginConsumer(settings, plugin_type, around)], stop, beat)

    # The alarm within the process comes first.
    hang_s = _PLUGIN_HANG_S + 2 * settings.accounting.hook_timeout_s
    return Part(name=consumer_name(plugin_type), run=run, after=_JOURNAL, hang_s=hang_s)


class Appending:
    """Appends to the journal without waiting for it to come back.

    Args:
        state_dir: The directory that holds it.
    """

    def __init__(self, state_dir: str) -> None:
        self._link = JournalLink(state_dir, Stop())

    def append(self, new: Sequence[Event]) -> None:
        """Append events durably.

        Raises:
            JournalUnavailable: The journal's writer is away.
        """
        self._link.ask("append", *rows_of(new))


def gate_part(settings: Settings) -> Part:
    """The gate's process."""
    # Whoever keeps the ledger asks it until they have ended, and it decides meanwhile.
    return Part(name="gate", run=partial(run_gate, settings), last=True)


def run_gate(settings: Settings, stop: Stop, beat: Beat) -> None:
    """Decide until the Stop is raised."""
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
_MYBRC_HANG_S = 120.0


def mybrc_part(settings: Settings) -> Part:
    """The process that serves the myBRC API, where [mybrc] has an address for it."""
    return Part(name="mybrc", run=partial(run_mybrc, settings), hang_s=_MYBRC_HANG_S)


def remote_part(settings: Settings) -> Part:
    """The process that tells a myBRC server elsewhere, where [bank.remote] names one."""
    return Part(name="mybrc.remote", run=partial(run_remote, settings), hang_s=_MYBRC_HANG_S)


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
    """Tell the myBRC server elsewhere what is in the outbox, for ever."""
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
"""A comparison with slurmdbd's records of a long time takes its time."""


def banking_parts(settings: Settings) -> list[Part]:
    """The processes of the bank, of a configuration that has one."""
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
