"""Workers of ``steward serve``: the list that a configuration needs, and its own few processes.

:func:`make_workers` returns the list for the supervisor: the journal's writer, consumers
(``consumer_workers``), sources (``source_workers``), the movers of files sinks, and the socket.
Sources append to the journal and consumers read from it; neither knows the other.

:func:`preload_page_modules` imports the modules of web pages in the socket's process, so that the
processes it forks share them. The first request of the web server calls it.
"""

import importlib
import logging
from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING

from steward.archive.catalog.consumer import CatalogConsumer
from steward.automation.operation import load_operations
from steward.core.access import Caller, list_web_uids, make_access
from steward.core.config import Settings
from steward.core.databases import SINK
from steward.core.errors import Unavailable, UsageError
from steward.core.journal.server import JournalServer
from steward.core.script_stores import make_stores
from steward.core.waits import Backoff, Stop
from steward.daemon.consumer_workers import (
    BACKGROUND_NICENESS,
    get_consumer_factories,
    get_sink_factories,
    make_accounting_workers,
    make_consumer_worker,
    wait_for_resource,
)
from steward.daemon.contexts import make_registry
from steward.daemon.idempotency import IdempotencyStore
from steward.daemon.request_service import RequestService
from steward.daemon.socket import SocketServer
from steward.daemon.source_workers import make_source_workers
from steward.daemon.supervisor import JOURNAL, SendHeartbeat, WorkerSpec

if TYPE_CHECKING:
    from steward.admin.credentials.sessions import CredentialsContext


def preload_page_modules(settings: Settings) -> None:
    """Import the modules that requests of web pages need."""
    for name in _list_page_modules(settings):
        importlib.import_module(name)
    load_operations()


def _list_page_modules(settings: Settings) -> Iterator[str]:
    """Yield the names of modules that requests of web pages need."""
    yield "ClusterShell.NodeSet"
    yield "steward.automation.rules.rulebook"
    yield "steward.automation.rules.templates"
    yield "jinja2.async_utils"
    yield "steward.reports.history.reader"
    yield "steward.accounting.job_page.page"
    if settings.bank.enabled:
        yield "steward.bank.ledger.ledger"
        yield "sqlalchemy.dialects.sqlite"
        yield "steward.bank.reconciliation"


log = logging.getLogger(__name__)

_MOVER_HANG_S = 3600.0


def make_workers(settings: Settings) -> list[WorkerSpec]:
    """Return the workers that a configuration needs, in the order in which they start.

    Raises:
        UsageError: The configuration is a controller's.
    """
    if settings.forward.to:
        raise UsageError("the configuration has [forward]: run 'steward controller' with it")
    workers = [
        WorkerSpec(
            name=JOURNAL,
            run=lambda stop, send_heartbeat: run_journal(settings, stop, send_heartbeat),
            last=True,
        )
    ]
    sinks = tuple(f"archive.{name}" for name in settings.files_sinks())
    workers += [
        make_consumer_worker(
            *(settings, f"archive.{name}", [factory]),
            database=SINK.locate(settings.state_dir, name),
        )
        for name, factory in get_sink_factories(settings).items()
    ]
    workers += [
        make_consumer_worker(
            settings,
            name,
            [factory],
            niceness=BACKGROUND_NICENESS if name == CatalogConsumer.name else 0,
        )
        for name, factory in get_consumer_factories(settings).items()
    ]
    workers += [
        WorkerSpec(
            name=f"mover.{name}", run=partial(run_mover, settings, name), hang_s=_MOVER_HANG_S
        )
        for name, sink in settings.files_sinks().items()
        if sink.move_to
    ]
    workers += make_source_workers(settings, after=(JOURNAL, *sinks))
    workers += make_accounting_workers(settings)
    if settings.bank.enabled:
        from steward.daemon.consumer_workers import make_bank_workers

        workers += make_bank_workers(settings)
    if settings.rules.is_enabled:
        from steward.daemon.consumer_workers import make_rules_worker

        workers.append(make_rules_worker(settings))
    return [*workers, WorkerSpec(name="socket", run=partial(run_socket, settings))]


def run_journal(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the journal's writer."""
    JournalServer(settings.state_dir, settings.journal, make_stores(settings)).run(
        stop, send_heartbeat
    )


def run_mover(settings: Settings, name: str, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the mover of a sink's files; a dead mount hangs only this process."""
    from steward.archive.files.mover import ArchiveMover

    mover = wait_for_resource(lambda: ArchiveMover(settings, name), stop, send_heartbeat)
    backoff = Backoff(1.0, 60.0)
    last_error = ""
    while not stop.is_set():
        send_heartbeat()
        try:
            wait_s = mover.run_once(stop)
            backoff.reset()
            last_error = ""
        except Unavailable as error:
            wait_s = backoff.next_s()
            if str(error) != last_error:
                last_error = str(error)
                log.error("cannot move files of archive.%s, retrying later: %s", name, error)
        stop.wait(wait_s)
    mover.close()


def run_socket(settings: Settings, stop: Stop, send_heartbeat: SendHeartbeat) -> None:
    """Run the server of the daemon's socket."""

    @cache
    def credentials() -> "CredentialsContext":
        # Called in the process that serves a connection, never before the fork.
        from steward.admin.credentials.sessions import CredentialsContext

        return CredentialsContext(settings, access=make_access(settings))

    def knows(secret: str) -> Caller:
        return credentials().find_caller(secret)

    @cache
    def repeats() -> IdempotencyStore:
        # Likewise.
        return IdempotencyStore(settings.state_dir)

    server = SocketServer(
        settings.socket,
        RequestService(
            make_registry(settings),
            identify=knows,
            open_store=repeats,
            state_dir=settings.state_dir,
        ),
        is_web_server=lambda uid: uid in list_web_uids(settings),
        preload_pages=cache(partial(preload_page_modules, settings)),
    )
    server.run(stop, send_heartbeat)
