"""Consumer workers: processes of the daemon that run consumers, bank, gate and the myBRC API.

Each ``make_..._worker`` function returns a `WorkerSpec` for the supervisor, with the function that
runs in the worker's process. `run_consumers` feeds consumers from the journal, and
`wait_for_resource` waits for a resource. The workers:

- sinks, jobs, history and catalog: a process for each consumer (`make_consumer_worker`);
- ``rules`` (`make_rules_worker`) decides on events and runs the actions of rules;
- accounting (`make_accounting_workers`): the job log, and a process for each third-party plugin, so
  that one which hangs, crashes or uses up its memory delays nothing else (`JournalAppender`);
- the bank (`make_bank_workers`): ``gate``, ``bank`` (the ledger), ``mybrc`` (the API) and
  ``mybrc.remote``. Each is a process: a decision must not wait for a ledger on another machine, nor
  a charge for a slow remote server. `BalancePusher` sends fresh balances to the gate.

`workers.py` assembles these with all others.
"""

import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from steward.archive.catalog.consumer import CatalogConsumer
from steward.archive.contents import make_script_contents
from steward.archive.files.sink import FilesSink
from steward.archive.sinks import make_sink
from steward.bank.errors import GateUnavailable
from steward.core import databases
from steward.core.config import Settings
from steward.core.consumers import Consumer, Feed, feed_all
from steward.core.errors import StewardError, Unavailable
from steward.core.events import Event, utc_now
from steward.core.journal import JournalLink, JournalReader
from steward.core.journal.store import encode_rows
from steward.core.script_stores import make_stores
from steward.core.sqlite import SqliteUnavailable, lock_database
from steward.core.waits import Backoff, Stop
from steward.daemon.supervisor import JOURNAL, SendHeartbeat, WorkerSpec
from steward.jobs import JobsConsumer
from steward.reports.history.consumer import HistoryConsumer

if TYPE_CHECKING:
    from steward.bank.gate.client import GateClient
    from steward.bank.ledger.ledger import Ledger
    from steward.core.http_server import Timeouts


log = logging.getLogger(__name__)

T = TypeVar("T")
ConsumerFactory = Callable[[], Consumer]


def run_consumers(
    settings: Settings,
    factories: Sequence[ConsumerFactory],
    stop: Stop,
    send_heartbeat: SendHeartbeat,
    *,
    registered: bool = True,
    database: str = "",
) -> None:
    """Run the main function of a worker that feeds consumers.

    Args:
        settings: The whole configuration.
        factories: Make the consumers.
        stop: Ends the worker when it is raised.
        send_heartbeat: Called several times a second.
        registered: Whether the journal keeps events for the consumers.
        database: Path of a database that other processes write too, if only one process may run
            these consumers; "" if not.
    """
    with ExitStack() as stack:
        if database:
            lock = wait_for_resource(lambda: lock_database(database), stop, send_heartbeat)
            stack.enter_context(closing(lock))
        link = JournalLink(settings.state_dir, stop)
        reader = wait_for_resource(lambda: JournalReader(settings.state_dir), stop, send_heartbeat)
        feeds = []
        for factory in factories:
            consumer = wait_for_resource(factory, stop, send_heartbeat)
            feeds.append(Feed(consumer, reader, link, registered=registered))
        feed_all(feeds, link, stop, send_heartbeat)


DATABASE_PATIENCE_S: Final = 5.0
"""Delay before the worker logs an error of a database, in seconds: at start, its writer may not
have created it yet."""


def wait_for_resource(make: Callable[[], T], stop: Stop, send_heartbeat: SendHeartbeat) -> T:
    """Call ``make`` until the resource it needs is available; the Stop ends the wait."""
    backoff = Backoff(0.02, 5.0)
    began = time.monotonic()
    last_error = ""
    while True:
        try:
            return make()
        except Unavailable as error:
            if stop.is_set():
                raise
            is_database = isinstance(error, SqliteUnavailable)
            is_late = time.monotonic() - began >= DATABASE_PATIENCE_S
            if str(error) != last_error and (is_late or not is_database):
                last_error = str(error)
                advice = "; run 'steward doctor --only state'" if is_database else ""
                log.error("waiting: %s%s", error, advice)
            stop.wait(backoff.next_s())
            send_heartbeat()
            if stop.is_set():
                raise


RULES: Final = "rules"
_RULES_HANG_S: Final = 300.0


def make_rules_worker(settings: Settings) -> WorkerSpec:
    """Return the worker that runs the rules."""
    return WorkerSpec(
        name=RULES, run=partial(_run_rules, settings), after=("journal",), hang_s=_RULES_HANG_S
    )


def _run_rules(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    factories = [partial(_make_rules_consumer, settings)]
    path = databases.RULES.locate(settings.state_dir)
    run_consumers(settings, factories, stop, send_heartbeat, database=path)


def _make_rules_consumer(settings: Settings) -> Consumer:
    """Make the consumer that runs the rules."""
    from steward.automation.rules.consumer import RulesConsumer
    from steward.automation.rules.execution import RunnerPerformer
    from steward.core.access import make_access
    from steward.daemon.contexts import make_registry

    def hand() -> RunnerPerformer:
        # One per thread: open files of an action context are for one thread.
        return RunnerPerformer(settings, make_access(settings), make_registry(settings))

    return RulesConsumer(settings, hand)


_NICENESS: Final = 10
"""Niceness of accounting workers: nobody waits for them."""
_CLOSING_HANG_S: Final = 3600.0
"""Time without a heartbeat after which the job log counts as hung, in seconds: closing a day takes
long."""
_PLUGIN_HANG_S: Final = 60.0


def make_accounting_workers(settings: Settings) -> list[WorkerSpec]:
    """Return the accounting workers that a configuration needs."""
    from steward.extensions.jobacct_plugins import (
        LOG_TYPE,
        parse_plugin_types,
        third_party_types,
    )

    workers = []
    if LOG_TYPE in parse_plugin_types(settings.accounting.type):
        workers.append(_make_log_worker(settings))
    return [
        *workers,
        *(
            _make_plugin_worker(settings, plugin_type)
            for plugin_type in third_party_types(settings.accounting.type)
        ),
    ]


def _make_log_worker(settings: Settings) -> WorkerSpec:
    """Return the worker of the job log."""
    from steward.extensions.jobacct_plugins import LogConsumer

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        os.nice(_NICENESS)
        run_consumers(settings, [lambda: LogConsumer(settings)], stop, send_heartbeat)

    return WorkerSpec(name=LogConsumer.name, run=run, after=(JOURNAL,), hang_s=_CLOSING_HANG_S)


def _make_plugin_worker(settings: Settings, plugin_type: str) -> WorkerSpec:
    """Return the worker of a third-party accounting plugin."""
    from steward.extensions.jobacct_plugins import PluginConsumer, PluginHost, consumer_name

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        os.nice(_NICENESS)
        around = PluginHost(
            append=JournalAppender(settings.state_dir).append, stop=stop, beat=send_heartbeat
        )
        run_consumers(
            settings, [lambda: PluginConsumer(settings, plugin_type, around)], stop, send_heartbeat
        )

    # The alarm within the process fires first.
    hang_s = _PLUGIN_HANG_S + 2 * settings.accounting.hook_timeout_s
    return WorkerSpec(name=consumer_name(plugin_type), run=run, after=(JOURNAL,), hang_s=hang_s)


class JournalAppender:
    """Appends to the journal, without waiting while the journal's writer is down.

    Args:
        state_dir: The directory that holds the journal.
    """

    def __init__(self, state_dir: str) -> None:
        self._link = JournalLink(state_dir, Stop())

    def append(self, events: Sequence[Event]) -> None:
        """Append events durably.

        Raises:
            JournalUnavailable: The journal's writer is down.
        """
        self._link.append_once(encode_rows(events))


def make_gate_worker(settings: Settings) -> WorkerSpec:
    """Return the gate's worker."""
    # Ledger workers query the gate until they end, and it goes on deciding meanwhile.
    return WorkerSpec(name="gate", run=partial(run_gate, settings), last=True)


def run_gate(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the gate until the Stop is raised."""
    # Only this worker: every process would hold the 3 MB of the gate's modules.
    from steward.bank.gate.server import GateServer

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    send_heartbeat = _run_before_others(send_heartbeat)
    server = wait_for_resource(lambda: GateServer(settings), stop, send_heartbeat)
    server.run(stop, send_heartbeat)


def _run_before_others(send_heartbeat: SendHeartbeat) -> SendHeartbeat:
    """Give this process real-time priority; return a heartbeat that renews it."""
    from steward.bank.gate.server import RealTimePriority

    priority = RealTimePriority()
    priority.acquire()

    def renew() -> None:
        priority.renew()
        send_heartbeat()

    return renew


def run_gate_server(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Serve gates on other hosts, which ask the gate of this one, until the Stop is raised."""
    from steward.bank.gate.client import GateClient
    from steward.bank.gate.http_server import GateApplication, make_server_config
    from steward.bank.gate.server import lower_niceness
    from steward.core.http_server import open_http_listener, serve_http

    # Not at real-time priority: hosts without a certificate can start handshakes.
    lower_niceness()
    config = make_server_config(settings.gate)
    listener = wait_for_resource(lambda: open_http_listener(config), stop, send_heartbeat)
    gate = GateClient(settings.state_dir)
    serve_http(config, GateApplication(gate, settings.cluster), listener, stop, send_heartbeat)


_GATE_TIMEOUT_S = 1.0
"""Time-out of a call to the gate, in seconds."""
_MYBRC_HANG_S = 120.0


def make_mybrc_worker(settings: Settings) -> WorkerSpec:
    """Return the worker that serves the myBRC API, if [mybrc] has an address."""
    return WorkerSpec(name="mybrc", run=partial(run_mybrc, settings), hang_s=_MYBRC_HANG_S)


def make_remote_worker(settings: Settings) -> WorkerSpec:
    """Return the worker that reports to a remote myBRC server, if [bank.remote] names one."""
    return WorkerSpec(name="mybrc.remote", run=partial(run_remote, settings), hang_s=_MYBRC_HANG_S)


class BalancePusher:
    """Sends balances to the gate right after clients charge, so that its next answer includes them.

    If that fails, the bank's worker sends them in its next round.

    Args:
        ledger: The ledger.
        gate: The client of the gate.
    """

    def __init__(self, ledger: "Ledger", gate: "GateClient") -> None:
        self._ledger = ledger
        self._gate = gate
        self._position = 0

    def push(self) -> None:
        """Send the ledger's changes since the last call to the gate."""
        try:
            with self._ledger.reading() as transaction:
                books = transaction.export_books(self._position)
            position = self._gate.send_books(books)
            if position < books.after:
                with self._ledger.reading() as transaction:
                    books = transaction.export_books(position)
                position = self._gate.send_books(books)
            self._position = position
        except GateUnavailable as error:
            log.debug("cannot notify the gate yet: %s", error)
        except StewardError as error:
            log.warning("cannot report charges to the gate: %s", error)


def run_mybrc(
    settings: Settings,
    stop: Stop,
    send_heartbeat: SendHeartbeat,
    *,
    timeouts: "Timeouts | None" = None,
) -> None:
    """Serve the myBRC API until the Stop is raised.

    Args:
        settings: The configuration.
        stop: Ends the server when it is raised.
        send_heartbeat: Called several times a second.
        timeouts: Timeouts of clients. Defaults if None.
    """
    from steward.bank.gate.client import GateClient
    from steward.bank.ledger import open_ledger
    from steward.core.http_server import ServerConfig, Timeouts, open_http_listener, serve_http
    from steward.extensions.mybrc import (
        ApiServices,
        JobRegistry,
        SubmitChecks,
        TokenAuthority,
        UsersFile,
        make_application,
    )
    from steward.slurm.users import NameResolver

    ledger = wait_for_resource(lambda: open_ledger(settings), stop, send_heartbeat)
    config = ServerConfig(
        name="clients of the myBRC API",
        section="[mybrc]",
        listen=settings.mybrc.listen,
        tls=settings.mybrc.tls,
        timeouts=timeouts or Timeouts(),
    )
    listener = wait_for_resource(lambda: open_http_listener(config), stop, send_heartbeat)
    cluster = settings.mybrc.cluster or next(iter(settings.cluster), "")
    gate = GateClient(settings.state_dir, timeout_s=_GATE_TIMEOUT_S)
    resolver = NameResolver()
    services = ApiServices(
        tokens=TokenAuthority(ledger, UsersFile(settings.mybrc.users_file), utc_now),
        jobs=JobRegistry(ledger, cluster, resolver, utc_now),
        submit_checks=SubmitChecks(settings, cluster, ledger, gate, resolver),
        ledger=ledger,
        cluster=cluster,
        domain=settings.bank.notify.domain,
        now=utc_now,
        told=BalancePusher(ledger, gate).push,
    )
    serve_http(config, make_application(services), listener, stop, send_heartbeat)
    ledger.close()


def run_remote(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Send the outbox to the remote myBRC server and fetch balances until the Stop is raised."""
    from steward.bank.gate.client import GateClient
    from steward.bank.ledger import open_ledger
    from steward.extensions.mybrc import OutboxSender, RemoteBalances

    ledger = wait_for_resource(lambda: open_ledger(settings), stop, send_heartbeat)
    sender = wait_for_resource(
        lambda: OutboxSender(settings, ledger, utc_now), stop, send_heartbeat
    )
    gate = GateClient(settings.state_dir, timeout_s=_GATE_TIMEOUT_S)
    balances = RemoteBalances(settings, ledger, gate, BalancePusher(ledger, gate).push, utc_now)
    while not stop.is_set():
        send_heartbeat()
        wait_s = sender.send_once(stop, send_heartbeat)
        if settings.bank.remote.balances:
            wait_s = min(wait_s, balances.poll_once(stop, send_heartbeat))
        stop.wait(wait_s)
    balances.close()
    sender.close()
    ledger.close()


BANK: Final = "bank"
_BANK_HANG_S: Final = 1800.0
"""Time without a heartbeat after which the bank counts as hung, in seconds: comparing a long period
with slurmdbd's records takes long."""


def make_bank_workers(settings: Settings) -> list[WorkerSpec]:
    """Return the bank's workers, for a configuration with a bank."""
    workers = [
        make_gate_worker(settings),
        WorkerSpec(
            name=BANK, run=partial(_run_bank, settings), after=(JOURNAL,), hang_s=_BANK_HANG_S
        ),
    ]
    if settings.gate.listen:
        workers.append(
            WorkerSpec(name="gate.server", run=partial(run_gate_server, settings), last=True)
        )
    if settings.mybrc.listen:
        workers.append(make_mybrc_worker(settings))
    if settings.bank.remote.url:
        workers.append(make_remote_worker(settings))
    return workers


def _run_bank(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    factories = [partial(_make_bank_consumer, settings)]
    path = databases.LEDGER.locate(settings.state_dir)
    run_consumers(settings, factories, stop, send_heartbeat, database=path)


def _make_bank_consumer(settings: Settings) -> Consumer:
    from steward.bank.consumer import IDLE_S, BankConsumer

    return BankConsumer(settings, idle_s=IDLE_S)


CONSUMER_HANG_S = 300.0
BACKGROUND_NICENESS = 10
"""Niceness of workers that must not delay the archive: indexing may take seconds longer."""


def get_sink_factories(settings: Settings) -> dict[str, ConsumerFactory]:
    """Return the factory of each sink's consumer, by the sink's name."""
    return {name: partial(_make_sink_consumer, settings, name) for name in settings.archive.sink}


def _make_sink_consumer(settings: Settings, name: str) -> Consumer:
    """Make a sink's consumer, and prepare its directories if possible."""
    sink = make_sink(settings, name)
    if isinstance(sink, FilesSink):
        try:
            # Capture starts after the sinks, and then finds the store that it prefers.
            sink.prepare()
        except Unavailable as error:
            # The feed retries; 'steward journal status' shows it.
            log.debug("%s is not ready: %s", sink.name, error)
    return sink


def get_consumer_factories(settings: Settings) -> dict[str, ConsumerFactory]:
    """Return the factory of each consumer in the state directory, by name."""
    factories: dict[str, ConsumerFactory] = {
        JobsConsumer.name: lambda: JobsConsumer(settings),
        HistoryConsumer.name: lambda: HistoryConsumer(settings),
    }
    if settings.archive.catalog:
        directory = f"{settings.state_dir}/catalog"
        factories[CatalogConsumer.name] = lambda: CatalogConsumer(
            directory, make_script_contents(settings, make_stores(settings))
        )
    return factories


def make_consumer_worker(
    settings: Settings,
    name: str,
    factories: Sequence[ConsumerFactory],
    *,
    registered: bool = True,
    database: str = "",
    niceness: int = 0,
) -> WorkerSpec:
    """Return a worker that feeds consumers, see :func:`run_consumers`."""

    def run(stop: Stop, send_heartbeat: SendHeartbeat) -> None:
        os.nice(niceness)
        run_consumers(
            *(settings, factories, stop, send_heartbeat), registered=registered, database=database
        )

    return WorkerSpec(name=name, run=run, after=(JOURNAL,), hang_s=CONSUMER_HANG_S)
