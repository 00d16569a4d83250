"""Libraries that each worker of a real daemon has loaded, by the files mapped into its memory."""

from pathlib import Path

import msgspec
from spool_daemon import Daemon, settings_in, submit

from servers.mybrc import mybrc_settings
from servers.server import free_port
from steward.admin.status.workers import read_daemon_status
from steward.automation.settings import RulesSettings
from steward.capture.settings import NodesSettings

LEDGER_WORKERS = {"bank", "mybrc"}
"""Workers that open the ledger; ``socket`` opens it for the first request that needs it."""


def test_only_workers_of_the_ledger_load_sqlalchemy_and_none_loads_a_second_sqlite(
    tmp_path: Path,
) -> None:
    bank = mybrc_settings(tmp_path)
    settings = msgspec.structs.replace(
        settings_in(tmp_path),
        bank=bank.bank,
        mybrc=bank.mybrc,
        rules=RulesSettings(mode="on"),
        nodes=NodesSettings(listen=f"127.0.0.1:{free_port()}"),
    )

    def find_workers(library: str) -> set[str]:
        status = read_daemon_status(settings.state_dir)
        workers = [line for line in status.workers if line.pid] if status else []
        return {
            line.name for line in workers if library in Path(f"/proc/{line.pid}/maps").read_text()
        }

    with Daemon(settings, tmp_path) as daemon:
        submit(tmp_path, range(1, 4))
        daemon.wait(lambda: daemon.is_quiet(3))
        daemon.wait(lambda: find_workers("/sqlalchemy/") >= LEDGER_WORKERS)
        others = {"journal", "archive.files", "jobs", "history", "gate", "rules", "nodes", "socket"}
        daemon.wait(lambda: find_workers("/pysqlite3/") >= LEDGER_WORKERS | others)
        assert find_workers("/sqlalchemy/") <= LEDGER_WORKERS | {"socket"}
        # The module of pysqlite3 has the same name; Python's is among its own extensions.
        assert not find_workers("/lib-dynload/_sqlite3.")
        assert not find_workers("/libsqlite3.so")
