"""Start of ``steward serve``: prepare the state directory and logs, then run the supervisor.

`run_daemon` also reloads the configuration on SIGHUP and on request; `workers.make_parts` says
which workers a configuration needs.
"""

import logging
import os
from collections.abc import Callable

from steward.admin.status.workers import DaemonStatusWriter
from steward.core.config import Settings
from steward.core.drivers import list_needed_drivers
from steward.core.errors import StewardError, UsageError
from steward.core.journal.store import check_journal_version
from steward.core.logs import configure_logging
from steward.core.processes import refuse_core_dumps
from steward.core.sqlite import use_scratch_directory
from steward.daemon.reload import ReloadListener
from steward.daemon.supervisor import Supervisor, WorkerSpec
from steward.daemon.workers import make_workers

log = logging.getLogger(__name__)


class ServeError(StewardError):
    """The daemon cannot start."""


def run_daemon(
    settings: Settings,
    reload: Callable[[], Settings] | None = None,
    make_workers: Callable[[Settings], list[WorkerSpec]] = make_workers,
) -> int:
    """Run the daemon until SIGTERM or SIGINT; return the exit code.

    Args:
        settings: The configuration.
        reload: Reads the configuration file again, on SIGHUP and on request.
        make_workers: Returns the workers of a configuration.

    Raises:
        ServeError: The state directory cannot be used.
        SqliteError: A newer Steward wrote it.
        UsageError: The configuration has no cluster.
    """
    refuse_core_dumps()
    _set_up_logs(settings)
    _prepare_state_dir(settings)
    try:
        use_scratch_directory(settings.state_dir)
    except OSError as error:
        raise ServeError(
            f"cannot use {settings.state_dir}/scratch: {error.strerror}; remove that directory",
            settings.state_dir,
        ) from error

    def parts_again() -> list[WorkerSpec]:
        if reload is None:
            raise UsageError("no configuration file to reload: the daemon was started without one")
        fresh = reload()
        if fresh.state_dir != settings.state_dir:
            raise UsageError("state_dir has changed: restart the daemon", fresh.state_dir)
        _prepare_state_dir(fresh)
        made = make_workers(fresh)
        _set_up_logs(fresh)
        listener.open(fresh.socket)
        return made

    report_status = DaemonStatusWriter(settings.state_dir).write
    listener = ReloadListener()
    supervisor = Supervisor(make_workers(settings), parts_again, report_status, listener)
    listener.open(settings.socket)
    return supervisor.run()


def _set_up_logs(settings: Settings) -> None:
    configure_logging(settings.log_level, line_format=settings.log_format, path=settings.log_file)


def _prepare_state_dir(settings: Settings) -> None:
    """Create the state directory and check it before the first worker starts."""
    if not settings.cluster and not settings.consume:
        raise UsageError("no cluster is configured: add a table [cluster.NAME]")
    try:
        os.makedirs(settings.state_dir, mode=0o700, exist_ok=True)
        if not os.access(settings.state_dir, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ServeError(
            f"cannot use state_dir {settings.state_dir}: {error.strerror}; set 'state_dir' to "
            "a writable directory, or run this as its owner",
            settings.state_dir,
        ) from error
    # Each worker checks its own database; without the journal nothing can run.
    check_journal_version(settings.state_dir)
    for key, driver in list_needed_drivers(settings):
        if not driver.is_installed:
            log.warning("%s is unavailable: %s", ".".join(key), driver.missing_error)
    # Steward's databases and sockets are private, whatever umask it was started with.
    os.umask(0o077)
