"""Real daemon on a scripted spool, for tests of failures."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import msgspec
from job_submission import PATIENCE, wait_until

from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings, JournalSettings, Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.journal import JournalReader
from steward.core.redaction import REDACTED
from steward.core.script_stores import StoreUnavailable, make_stores
from steward.core.sqlite import Connection, open_reader
from steward.slurm.settings import ClusterSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import storm

STORM = str(Path(storm.__file__))


def settings_in(directory: Path, **changes: Any) -> Settings:
    """Return settings of a daemon whose files are all below ``directory``; make the spool."""
    (directory / "spool").mkdir(exist_ok=True)
    settings = Settings(
        state_dir=str(directory / "state"),
        run_dir=str(directory / "state"),
        cluster={"c1": ClusterSettings(slurm=False, spool=str(directory / "spool"))},
        archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(directory / "archive"))}),
        journal=JournalSettings(keep_s=3600.0),
    )
    return msgspec.structs.replace(settings, **changes)


def children_of(pid: int) -> list[int]:
    """Return a process's children; none if it is gone."""
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (FileNotFoundError, ProcessLookupError):
        return []


class Daemon:
    """``steward serve`` with these settings, which a test can start again at will.

    Args:
        settings: Settings of the daemon.
        directory: Directory of its configuration and log.
        prefix: Words before the command (to run it inside a sandbox).
    """

    command = "serve"

    def __init__(self, settings: Settings, directory: Path, prefix: tuple[str, ...] = ()) -> None:
        self.settings = settings
        self.log_path = directory / "steward.log"
        self._config = directory / "steward.toml"
        self._config.write_text(render_config(LoadedConfig(settings)))
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None
        self._unquiet = ""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self.kill()

    @property
    def pid(self) -> int:
        """Return the process id of the supervisor."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the daemon, and wait until its first worker runs."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._prefix,
                    *(sys.executable, "-m", "steward", self.command),
                    *("--config", str(self._config)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.wait(lambda: bool(self.parts()), 20.0)

    def parts(self) -> list[int]:
        """Return the processes of its workers."""
        return children_of(self.pid)

    def kill(self) -> None:
        """Kill the supervisor and its workers with SIGKILL, and wait for their end."""
        assert self._process is not None
        parts = self.parts()
        self._process.kill()
        self._process.wait(PATIENCE * 20)
        self._process = None
        # The kernel ends the parts; the next start must not be faster.
        wait_until(lambda: not any(_lives(pid) for pid in parts), 20.0)

    def stop(self) -> int:
        """Stop the daemon with SIGTERM; return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(PATIENCE * 10)
        self._process = None
        return code

    def log(self) -> str:
        """Return the daemon's log."""
        return self.log_path.read_text()

    def wait(self, ready: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait for a condition while the daemon runs."""
        process = self._process
        assert process is not None
        self._unquiet = ""

        def look() -> bool:
            assert process.poll() is None, f"it ended:\n{self.log()[-3000:]}"
            return ready()

        try:
            wait_until(look, timeout_s)
        except AssertionError:
            print(self.log()[-6000:])
            if self._unquiet:
                print(f"It is not quiet: {self._unquiet}.")
            raise

    def status(self, consumer: str) -> tuple[str, str]:
        """Return state and detail of a consumer, as ``steward journal status`` shows them."""
        reader = JournalReader(self.settings.state_dir)
        try:
            found = {of.name: (of.state, of.detail) for of in reader.list_consumers()}
        finally:
            reader.close()
        return found.get(consumer, ("", ""))

    def is_quiet(self, scripts: int) -> bool:
        """Return whether the journal has this many scripts and every consumer has applied them."""
        self._unquiet = self._why_unquiet(scripts)
        return not self._unquiet

    def _why_unquiet(self, scripts: int) -> str:
        """Return the first missing condition; "" if there is none."""
        captured = len(journalled(self.settings))
        if captured < scripts:
            return f"the journal has had {captured} of {scripts} scripts"
        behind = ask(self.settings, "journal.db", _BEHIND)
        if behind != [(None,)]:
            return f"consumers are behind, as the journal has it: {behind}"
        waiting = ask(self.settings, "archive-files.db", _WAITING)
        if waiting != [(None,)]:
            return f"scripts in the files sink wait for their owners: {waiting}"
        jobs = ask(self.settings, "jobs.db", "SELECT count(*) FROM script")
        if not jobs or jobs[0][0] < scripts:
            return f"jobs.db has this many of {scripts} scripts: {jobs}"
        return ""


_BEHIND = """
    SELECT group_concat(name || ' at ' || position || ' of ' || seq, ', ')
    FROM consumer, (SELECT ifnull(max(seq), 0) AS seq FROM sqlite_sequence WHERE name = 'event')
    WHERE position < seq
"""
_WAITING = "SELECT group_concat(key, ', ') FROM script WHERE state = 0"


def _lives(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ask(settings: Settings, database: str, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return rows of one of Steward's databases."""
    path = os.path.join(settings.state_dir, database)
    if not os.path.exists(path):
        return []
    connection: Connection = open_reader(path)
    try:
        if not connection.execute("PRAGMA user_version").fetchone()[0]:
            return []  # being made
        return [tuple(row) for row in connection.execute(sql, values)]
    finally:
        connection.close()


def filed(settings: Settings) -> int:
    """Return the number of scripts that the sink ``files`` has archived."""
    rows = ask(settings, "archive-files.db", "SELECT count(*) FROM script WHERE state != 0")
    return int(rows[0][0]) if rows else 0


def is_through(settings: Settings, sink: str) -> bool:
    """Return whether a remote sink has applied all events and sent its documents."""
    (head,) = ask(settings, "journal.db", "SELECT max(seq) FROM sqlite_sequence")[0]
    database = f"archive-{sink}.db"
    rows = ask(settings, database, "SELECT position FROM cursor")
    unsent = ask(settings, database, "SELECT 1 FROM script WHERE state != 0 LIMIT 1")
    return bool(rows) and bool(rows[0][0] >= head) and not unsent


def journalled(settings: Settings) -> set[int]:
    """Return the ids of jobs whose scripts the journal has, or has had."""
    keys = ask(
        settings,
        "journal.db",
        "SELECT key FROM event WHERE kind = 'job.script' UNION SELECT key FROM remembered "
        "WHERE key LIKE 'script:%'",
    )
    return {int(key.split(":")[1]) for (key,) in keys}


def stored(settings: Settings) -> set[int]:
    """Return jobs with a complete script in a store, with or without its event."""
    found = set()
    for store in make_stores(settings):
        try:
            names = list(store.iterate_names())
        except StoreUnavailable:
            continue  # not made yet
        for name in names:
            try:
                size = os.stat(os.path.join(store.directory, name.filename)).st_size
            except FileNotFoundError:
                continue
            if name.what == "script" and size == name.length:
                found.add(name.job_id)
    return found


def incoming_bytes(settings: Settings) -> int:
    """Return the size of all files in the stores."""
    return sum(
        entry.stat().st_size
        for store in make_stores(settings)
        if os.path.isdir(store.directory)
        for entry in os.scandir(store.directory)
    )


def archived(settings: Settings, sink: str = "files") -> dict[int, dict[str, bytes]]:
    """Return a sink's files by job id and suffix; fail if any job has one twice."""
    found: dict[int, dict[str, bytes]] = {}
    root = settings.sink_path(sink)
    for directory, names, files in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".")]
        for name in files:
            stem, _, suffix = name.rpartition(".")
            if suffix not in ("sh", "env"):
                continue
            of_job = found.setdefault(int(stem.split("-")[0]), {})
            assert suffix not in of_job, f"{name} is there twice"
            of_job[suffix] = Path(directory, name).read_bytes()
    return found


def assert_kept(settings: Settings, job_ids: range) -> None:
    """Check that the archive has exactly these jobs of a storm, byte for byte, each once."""
    found = archived(settings)
    assert sorted(found) == list(job_ids)
    for job_id, files in found.items():
        assert files["sh"] == storm.script_of(job_id)
        assert files["env"] == storm.environment_of(job_id, REDACTED)


def submit(home: Path, jobs: range) -> None:
    """Write jobs into the spool below ``home``."""
    for job_id in jobs:
        storm.write_job(str(home / "spool"), job_id)


def forget(home: Path, jobs: range) -> None:
    """Remove the jobs, as slurmctld does some time after their end."""
    for job_id in jobs:
        storm.remove_job(str(home / "spool"), job_id)


def play(spool: str, jobs: range, *arguments: str) -> "subprocess.Popen[bytes]":
    """Start a storm in a separate process."""
    span = (f"--first={jobs.start}", f"--jobs={len(jobs)}")
    return subprocess.Popen([sys.executable, STORM, spool, *span, *arguments])


def chance_of(variable: str) -> random.Random:
    """Return a random generator; its seed is printed, and the environment variable repeats it."""
    seed = int(os.environ.get(variable, "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"{variable}={seed}")
    return random.Random(seed)


def new_schema_seed() -> str:
    """Return and print the seed of a run of schemathesis; ``STEWARD_SCHEMA_SEED`` sets it."""
    return str(chance_of("STEWARD_SCHEMA_SEED").randrange(2**31))
