"""Health checks of this host: settings, file permissions, SQLite, disks, daemon, web, MUNGE.

Most public checks take the context of the checks and yield findings; ``checks.py`` lists them.
``check_config_file``, ``check_free_space`` and ``list_written_places`` take a file, directory or
settings.
"""

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from typing import Final

from pysqlite3 import dbapi2

import steward
from steward.admin.doctor.context import CheckContext, get_user_name
from steward.admin.doctor.findings import (
    CheckFinding,
    format_count,
    make_ok,
    make_skipped,
    make_warning,
    make_wrong,
)
from steward.admin.status import workers
from steward.core.config import Settings
from steward.core.config.checks import find_extension_problems, find_missing_resources
from steward.core.databases import CATALOG_MONTH, list_files
from steward.core.errors import PermissionRefused
from steward.core.events import utc_now
from steward.core.files import find_network_type
from steward.core.munge import Munge, MungeUnavailable
from steward.core.rpc import connect_socket
from steward.core.section import list_values
from steward.core.sqlite import (
    OLDEST_SAFE_VERSION,
    SqliteError,
    SqliteUnavailable,
    open_reader,
    translate_errors,
)
from steward.web.settings import HEALTH_PATH, HEALTHY_BODY

_SECRETS: Final = ("key_file", "password_file", "token_file", "secret_file")
_LITTLE: Final = 0.10
"""Share of free space or inodes below which a check warns."""
_TOO_LITTLE: Final = 0.02
"""Share of free space or inodes below which a check reports an error."""
_ENOUGH_BYTES: Final = 20 << 30
"""Free space, in bytes, that is enough whatever its share."""
_GIB: Final = 1 << 30


def check_settings_resources(context: CheckContext) -> Iterator[CheckFinding]:
    """Check the files, users and Python packages that the settings name."""
    checked = "files, users and packages that the settings name"
    has_problem = False
    for problem in find_extension_problems(context.settings):
        has_problem = True
        yield make_wrong(checked, problem.what, "steward config check")
    if not context.is_root and context.uid != context.steward_uid:
        yield make_skipped(checked, "not readable: run as root or Steward's user")
        return
    for problem in find_missing_resources(context.settings):
        has_problem = True
        yield make_warning(checked, problem.what, "steward config check")
    if not has_problem:
        yield make_ok(checked, "all exist on this host")


def check_config_file(path: str) -> CheckFinding:
    """Check who may read and change the configuration file."""
    try:
        status = os.stat(path)
    except OSError as error:
        return make_wrong(path, f"{error.strerror}", "steward init")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o002 or (mode & 0o020 and status.st_uid != 0):
        return make_wrong(
            path, "other users can change it, and thus what Steward runs", f"chmod 0640 {path}"
        )
    if mode & 0o004:
        return make_warning(path, "every user can read it", f"chmod o-r {path}")
    return make_ok(path, f"owner {get_user_name(status.st_uid)}, mode {mode:04o}")


def check_secret_files(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that files with keys, passwords and tokens are closed to others."""
    checked = "files of keys, passwords and tokens"
    values = list_values(context.settings)
    files = sorted({value for key, value, _ in values if value and key[-1] in _SECRETS})
    files += [f"{context.settings.state_dir}/gate.key"]
    has_problem, count = False, 0
    for path in files:
        try:
            mode = stat.S_IMODE(os.stat(path).st_mode)
        except OSError:
            continue  # the check "settings" reports missing files
        count += 1
        if mode & 0o007:
            has_problem = True
            yield make_wrong(
                path, f"every user can access it: mode {mode:04o}", f"chmod o= {path}", name=path
            )
    if not has_problem:
        yield make_ok(checked, f"{format_count(count, 'file')}, private")


def check_sqlite_library(_context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the SQLite library has no known corruption bug."""
    checked = "the SQLite library"
    version = dbapi2.sqlite_version
    if dbapi2.sqlite_version_info < OLDEST_SAFE_VERSION:
        oldest = ".".join(map(str, OLDEST_SAFE_VERSION))
        yield make_wrong(
            checked,
            f"SQLite {version} can corrupt a database that two processes use: {oldest} is required",
            "reinstall Steward's package, which contains SQLite",
        )
    else:
        yield make_ok(checked, f"SQLite {version}")


def check_state_directory(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the state directory is local and private, and its databases undamaged."""
    path = context.settings.state_dir
    try:
        status = os.stat(path)
        network_type = find_network_type(path)
    except OSError as error:
        yield make_wrong(
            path, f"{error.strerror}: the daemon creates it when it starts", _get_start_command()
        )
        return
    if network_type:
        yield make_wrong(
            path,
            f"on {network_type}, where SQLite's locks are unsafe",
            "set state_dir to a directory on a local disk",
        )
    elif stat.S_IMODE(status.st_mode) & 0o077:
        yield make_wrong(path, "other users can read it", f"chmod 0700 {path}")
    elif not context.is_root and context.uid != context.steward_uid:
        yield make_skipped(path, "not readable: run as root or Steward's user")
    else:
        yield from _check_owners(context, path)
        yield from _check_databases(path)


def _check_databases(state_dir: str) -> Iterator[CheckFinding]:
    """Check the databases for damage; yield nothing for those without."""
    for file, path in list_files(state_dir):
        if file is CATALOG_MONTH:
            continue  # reading all months takes minutes; a damaged one is rebuilt
        try:
            with closing(open_reader(path)) as connection, translate_errors(path):
                (result,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        except (SqliteError, SqliteUnavailable) as error:
            result = str(error)
        if result != "ok":
            yield make_wrong(
                path,
                f"the database is damaged or unreadable: {result}",
                "journalctl -u steward -p warning",
                "stop the daemon, and restore the last backup with 'steward restore'",
            )


def _check_owners(context: CheckContext, path: str) -> Iterator[CheckFinding]:
    """Check that Steward owns its files: one that root owns stops a daemon that is not root."""
    foreign = [name for name, uid in _list_file_owners(path) if uid != context.steward_uid]
    if foreign and context.steward_uid != 0:
        yield make_wrong(
            path,
            f"{min(foreign)} does not belong to {context.steward_user}: the daemon cannot use it",
            f"chown -R {context.steward_user}: {path}",
        )
    else:
        yield make_ok(path, f"on a local disk, private to {context.steward_user}")


def _list_file_owners(path: str) -> Iterator[tuple[str, int]]:
    """Yield name and owner's uid of each file in the state directory and in the catalog's."""
    for directory in (path, f"{path}/catalog"):
        try:
            entries = list(os.scandir(directory))
        except FileNotFoundError:
            continue
        for entry in entries:
            # SQLite deletes its side files when the last connection closes a database.
            with contextlib.suppress(FileNotFoundError):
                yield entry.name, entry.stat(follow_symlinks=False).st_uid


def check_disks(context: CheckContext) -> Iterator[CheckFinding]:
    """Check the free space of every file system that Steward writes to."""
    for purpose, path in list_written_places(context.settings):
        try:
            status = os.statvfs(path)
        except OSError as error:
            yield make_warning(path, f"{error.strerror}", name=purpose)
            continue
        yield check_free_space(purpose, path, status)


def list_written_places(settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield the directories that Steward writes to, with their purpose."""
    yield "state", settings.state_dir
    for name, sink in settings.files_sinks().items():
        yield f"archive.{name}", settings.sink_path(name)
        if sink.move_to:
            yield f"archive.{name} (move_to)", sink.move_to


def check_free_space(purpose: str, path: str, status: os.statvfs_result) -> CheckFinding:
    """Check free space and free inodes of one file system.

    Args:
        purpose: Purpose of the directory.
        path: The directory.
        status: Result of statvfs(3).
    """
    free = status.f_bavail * status.f_frsize
    share = status.f_bavail / status.f_blocks if status.f_blocks else 1.0
    # Some file systems (btrfs, many network file systems) have no inode count.
    inodes = status.f_favail / status.f_files if status.f_files else 1.0
    text = f"{free / _GIB:.1f} GiB ({share:.0%}) free, {inodes:.0%} of its inodes free"
    checked = f"the file system of {path}"
    fix = (
        f"df -h {path}; df -i {path}",
        "free space, or lower retention_days in [archive.sink.NAME]",
    )
    if (share < _TOO_LITTLE and free < _ENOUGH_BYTES) or inodes < _TOO_LITTLE:
        return make_wrong(checked, f"nearly full: {text}", *fix, name=purpose)
    if (share < _LITTLE and free < _ENOUGH_BYTES) or inodes < _LITTLE:
        return make_warning(checked, f"filling up: {text}", *fix, name=purpose)
    return make_ok(checked, text, name=purpose)


def _get_start_command() -> str:
    return "systemctl start steward"


_MUNGE: Final = "/run/munge"
_VENDOR: Final = "web/static/vendor"
_CONNECT_S: Final = 5.0
"""Time-out of connecting to the daemon's socket, in seconds."""
_WEB_S: Final = 10.0
"""Time-out of requests to the web pages, in seconds."""
_OFTEN: Final = 3
"""Restarts of a worker that count as an error."""
_LATELY: Final = timedelta(minutes=10)
"""Age of a worker's error up to which it is reported."""


def check_daemon(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the daemon answers on its socket."""
    path = context.settings.socket
    fix = ("systemctl start steward", "journalctl -u steward -p warning")
    if context.settings.forward.to or not path:
        yield make_skipped(
            path or "socket", "a controller has no socket for commands: see the check workers"
        )
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connect_socket(connection, path)
        except OSError as error:
            yield make_wrong(path, f"the daemon does not answer: {error.strerror or error}", *fix)
            return
    mode = os.stat(os.path.dirname(path)).st_mode
    if not mode & 0o001:
        directory = os.path.dirname(path)
        yield make_wrong(path, "users cannot reach the daemon's socket", f"chmod o+x {directory}")
    else:
        yield make_ok(path, "the daemon listens")


def check_workers(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that each worker of the daemon runs and does not restart repeatedly."""
    checked = f"{context.settings.state_dir}/daemon.json"
    fix = ("journalctl -u steward -p warning", "systemctl restart steward")
    daemon_status = workers.read_daemon_status(context.settings.state_dir)
    if daemon_status is None:
        yield make_wrong(checked, "the daemon is not running", "systemctl start steward")
        return
    if not daemon_status.is_known:
        problem = "the daemon runs, but wrote no status of its workers"
        yield make_warning(checked, problem, f"df {context.settings.state_dir}")
        return
    has_problem = False
    for worker in daemon_status.workers:
        if not worker.pid:
            has_problem = True
            yield make_wrong(checked, f"not running: {worker.error}", *fix, name=worker.name)
        elif worker.error_at is not None and worker.error_at > utc_now() - _LATELY:
            has_problem = True
            is_frequent = worker.restarts >= _OFTEN
            make_finding = make_wrong if is_frequent else make_warning
            yield make_finding(
                checked,
                f"restarted {format_count(worker.restarts, 'time')}: {worker.error}",
                *fix,
                name=worker.name,
            )
    if not has_problem:
        yield make_ok(checked, f"{format_count(len(daemon_status.workers), 'worker')} running")


def check_web_server(check_context: CheckContext) -> Iterator[CheckFinding]:
    """Check that the web pages answer and their static files are installed."""
    web = check_context.settings.web
    if not web.listen:
        yield make_skipped("[web] listen", "web pages are disabled")
        return
    import http.client
    import ssl

    vendor = os.path.join(os.path.dirname(steward.__file__), _VENDOR)
    if not os.path.isdir(vendor):
        yield make_wrong(
            vendor,
            "stylesheets and scripts are missing; packages contain them",
            "in a clone: make setup-web",
            name="static",
        )
    if not web.url:
        problem = (
            f"'steward login' prints links to {web.listen}, which browsers on other hosts "
            "cannot open"
        )
        yield make_warning("[web] url", problem, 'url = "https://steward.example.org"', name="url")
    host, _, port = web.listen.rpartition(":")
    host = host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 -- nothing is bound
    fix = ("systemctl start steward-web", "journalctl -u steward-web -p warning")
    connection = http.client.HTTPConnection(host, int(port), timeout=_WEB_S)
    if web.tls:
        context = ssl.create_default_context()
        # This connects to our own host: browsers check the name in the certificate.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, int(port), timeout=_WEB_S, context=context)
    try:
        connection.request("GET", f"{web.path}{HEALTH_PATH}")
        reply = connection.getresponse()
        status, body = reply.status, reply.read(len(HEALTHY_BODY) + 1)
    except (OSError, http.client.HTTPException) as error:
        yield make_wrong(web.listen, f"the web pages do not answer: {error}", *fix)
        return
    finally:
        connection.close()
    if status >= 500:
        yield make_wrong(web.listen, f"the web pages answer with status {status}", *fix)
    elif (status, body) != (200, HEALTHY_BODY):
        problem = (
            f"another program answers there, not 'steward web' (status {status} at {HEALTH_PATH})"
        )
        yield make_wrong(
            web.listen, problem, "journalctl -u steward-web -p warning", "[web] listen: a free port"
        )
    else:
        yield make_ok(web.listen, "the web pages answer")


def check_munge(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that MUNGE can identify users of commands on other hosts."""
    web = context.settings.web
    checked = web.munge_socket or _MUNGE
    if not web.listen or not web.munge_from:
        yield make_skipped("[web] munge_from", "MUNGE authentication is disabled")
        return
    if not web.munge_socket and not os.path.exists(_MUNGE):
        yield make_skipped(_MUNGE, "MUNGE is not installed: commands on other hosts need tokens")
        return
    munged = Munge(web.munge_socket)
    try:
        munged.decode(munged.encode(b"steward doctor"))
    except (MungeUnavailable, PermissionRefused) as error:
        yield make_warning(
            checked,
            f"MUNGE fails, so commands on other hosts need tokens: {error}",
            "systemctl restart munge",
            "or set munge_socket in [web], or munge_from = []",
        )
        return
    yield make_ok(checked, "munged creates and decodes credentials")
