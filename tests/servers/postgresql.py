"""PostgreSQL: one server for each test run, as an ordinary user, with its data in memory.

PostgreSQL refuses to run as root, so root's tests run it as `postgres` if that user exists, else
as `nobody`. No server outlives the tests: the kernel kills its first process when they end, and
the other processes end with that one.
"""

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from servers.server import HOST, UP_TIMEOUT_S, DidNotStart, Server, free_port

_INIT_TIMEOUT_S: Final = 120.0
_MEMORY: Final = Path("/dev/shm")
_DEBIAN: Final = Path("/usr/lib/postgresql")


class PostgreSQL(Server):
    """Server of PostgreSQL, with one superuser.

    Args:
        is_durable: Whether it syncs its commits. Otherwise a power loss loses commits; a kill of
            the server does not.
    """

    user = "steward"

    def __init__(self, *, is_durable: bool = False) -> None:
        where = _MEMORY if _MEMORY.is_mount() else Path(tempfile.gettempdir())
        super().__init__(
            "postgresql", Path(tempfile.mkdtemp(prefix="steward-postgresql-", dir=where))
        )
        self._port = free_port()
        self._is_durable = is_durable
        self._made = 0

    def command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            self._initialize(data)
        # A killed server's pid file would count as a running server if its pid is used again.
        (data / "postmaster.pid").unlink(missing_ok=True)
        settings = {
            "listen_addresses": HOST,
            "port": self._port,
            "unix_socket_directories": "",
            "fsync": "on" if self._is_durable else "off",
            "shared_buffers": "32MB",
            "max_connections": 60,
            "dynamic_shared_memory_type": "mmap",
        }
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return (*_as_ordinary_user(), program("postgres"), "-D", str(data), *words)

    def answers(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(self.dsn("postgres"), connect_timeout=5) as connection:
                return connection.execute("SELECT 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    def dsn(self, database: str) -> str:
        """Return the connection string of a database for libpq."""
        return f"host={HOST} port={self._port} user={self.user} dbname={database}"

    def url(self, database: str) -> str:
        """Return the URL of a database for SQLAlchemy and ``[bank].database``."""
        return f"postgresql+psycopg://{self.user}@{HOST}:{self._port}/{database}"

    def new_database(self, template: str = "template1") -> str:
        """Create a database, empty or as a copy of an unused one; return its name."""
        import psycopg

        self._made += 1
        name = f"test_{os.getpid()}_{self._made}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        return name

    def kill(self) -> None:
        """Kill all processes of the server with SIGKILL, and wait for their end."""
        if self._process is not None:
            for pid in [self._process.pid, *_below(self._process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        super().kill()

    def pause(self) -> None:
        """Stop all processes with SIGSTOP."""
        super().pause()
        for pid in _below(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all processes."""
        for pid in _below(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        super().resume()

    def stop(self) -> None:
        """End the server permanently, and remove its data."""
        self.kill()
        deadline = time.monotonic() + UP_TIMEOUT_S
        while self.directory.exists():
            # A process that is being killed may still write.
            shutil.rmtree(self.directory, ignore_errors=True)
            assert time.monotonic() < deadline, f"{self.directory} cannot be removed"

    def _initialize(self, data: Path) -> None:
        if os.geteuid() == 0:
            who = _ordinary_user()
            os.chown(self.directory, who.pw_uid, who.pw_gid)
        result = subprocess.run(
            [
                *_as_ordinary_user(),
                *(program("initdb"), "-D", str(data), "-U", self.user, "-A", "trust"),
                *("-E", "UTF8", "--locale=C.UTF-8", "--no-sync"),
            ],
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_INIT_TIMEOUT_S,
            check=False,
        )
        if result.returncode:
            raise DidNotStart(f"initdb failed:\n{result.stdout}{result.stderr}")


def program(name: str) -> str:
    """Return the path of a PostgreSQL program: Debian keeps the server's out of PATH.

    Raises:
        DidNotStart: The program is not installed.
    """
    versions = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    found = str(versions[-1]) if versions else shutil.which(name)
    if not found:
        raise DidNotStart(f"{name} is not there: make setup-databases installs PostgreSQL")
    return found


def _ordinary_user() -> pwd.struct_passwd:
    with contextlib.suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


def _as_ordinary_user() -> Sequence[str]:
    if os.geteuid() != 0:
        return ()
    who = _ordinary_user()
    # A change of user clears the parent-death signal, so set it again afterwards.
    return (
        *("setpriv", f"--reuid={who.pw_uid}", f"--regid={who.pw_gid}", "--clear-groups", "--"),
        *("setpriv", "--pdeathsig", "KILL", "--"),
    )


def _below(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has just ended
            found += map(int, task.read_text().split())
    return found
