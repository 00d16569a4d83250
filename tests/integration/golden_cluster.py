"""Site without Slurm for golden outputs: fixed settings, users, host name and file times."""

import os
import shutil
import struct
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
from spool_daemon import Daemon, ask

from steward.accounting.settings import AccountingSettings, MailSettings
from steward.archive.settings import FilesSinkSettings
from steward.automation.settings import ActionsSettings, RulesSettings
from steward.bank.errors import GateUnavailable
from steward.bank.gate.client import GateClient
from steward.bank.ledger import OutboxItem, open_ledger
from steward.bank.notices import NOTICE_KIND
from steward.bank.settings import BankSettings, GateSettings
from steward.core.access import ClusterRoles, ClusterRolesFiles
from steward.core.config import ArchiveSettings, JournalSettings, Settings
from steward.core.events import Event
from steward.core.journal import JournalLink
from steward.core.timestamps import to_micros
from steward.core.waits import Stop
from steward.slurm.cluster_model import ClusterModel, NodeShape, PartitionModel
from steward.slurm.settings import ClusterSettings

CLUSTER: Final = "hpc1"
FILES: Final = Path(__file__).parents[1] / "golden" / "site"
UIDS: Final = {"ada": 1001, "bela": 1002, "cleo": 1003}
"""Users of tests/golden/site/etc/passwd."""
GID: Final = 1000
_AGES_S: Final = 86_400 * 36_500
_ACTING: Final = "SELECT 1 FROM execution WHERE phase != 'ended' LIMIT 1"
_CONSUMERS: Final = "SELECT count(*) >= 7 FROM consumer"
_EVENTS: Final = "SELECT count(*) FROM event WHERE kind = ?"
_DEAD: Final = "SELECT 1 FROM dead"
_ENVIRONMENT: Final = ("API_TOKEN=hunter2hunter2", "NOTE=two\nlines")
STANDING: Final = ClusterRoles(
    private_data=frozenset({"jobs"}), coordinators={"chemistry": frozenset({"bela"})}
)
"""Roles and PrivateData that Slurm would report."""
_OLD: Final = datetime(2023, 11, 20, tzinfo=UTC)
"""Time of the site's files, before all events."""
_BANK_BEGAN: Final = "12:00:00"
"""Time at which the bank begins; only a backfill charges earlier ends."""


def at(text: str) -> datetime:
    """Return a time of 8 January 2024 (``09:30:00``), or of another day (``9T06:00:00``)."""
    day, _, clock = text.rpartition("T")
    return datetime.fromisoformat(f"2024-01-{int(day or 8):02}T{clock}+00:00")


def picture() -> ClusterModel:
    """Return the bank's model of the cluster, which has no Slurm to query."""
    shapes = (
        NodeShape(
            nodes="n[1-4]", count=4, cpus=16, usable_cpus=16, cores=16, sockets=2, memory_mib=65536
        ),
        NodeShape(
            nodes="g1",
            cpus=32,
            usable_cpus=32,
            cores=32,
            sockets=2,
            memory_mib=131072,
            tres={"gres/gpu": 4},
        ),
    )
    partitions = {
        "main": PartitionModel(
            name="main", shapes=((0, 4),), nodes=4, max_time_s=86_400, default_time_s=3600
        ),
        "gpu": PartitionModel(
            name="gpu", shapes=((1, 1),), nodes=1, max_time_s=43_200, default_time_s=3600
        ),
    }
    return ClusterModel(
        cluster=CLUSTER,
        taken_us=to_micros(at("00:00:00")),
        zone="UTC",
        partitions=partitions,
        default_partition="main",
        shapes=shapes,
        selects="cr_core_memory",
        max_array=1001,
        accounting=True,
        users={uid: name for name, uid in UIDS.items()},
        accounts={"ada": "physics", "bela": "chemistry", "cleo": "chemistry"},
    )


def settings_in(directory: Path) -> Settings:
    """Return the site's configuration."""
    return Settings(
        state_dir=str(directory / "state"),
        run_dir=str(directory),
        log_file=str(directory / "steward.log"),
        cluster={
            CLUSTER: ClusterSettings(
                slurm=False, spool=str(directory / "spool"), timezone="UTC", jobcomp_lines=""
            )
        },
        archive=ArchiveSettings(sink={"files": FilesSinkSettings(path=str(directory / "archive"))}),
        journal=JournalSettings(keep_s=_AGES_S),
        accounting=AccountingSettings(close_after_days=_AGES_S // 86_400),
        bank=BankSettings(enabled=True, reconcile_s=3600.0),
        gate=GateSettings(plugin_users=()),
        mail=MailSettings(program=str(directory / "in" / "mailer")),
        actions=ActionsSettings(programs_file=str(directory / "in" / "programs")),
        rules=RulesSettings(mode="on", directories=(str(directory / "in" / "rules"), "shipped")),
        history_days=_AGES_S // 86_400,
    )


class GoldenSite:
    """Daemon with fixed settings, not started yet, and waits for its work.

    Args:
        directory: Directory of its state, archive, spool and files.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.settings = settings_in(directory)
        self.files = directory / "in"
        shutil.copytree(FILES, self.files)
        for path in self.files.rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            _set_time(path, _OLD)
        for number in range(10):
            (directory / "spool" / f"hash.{number}").mkdir(parents=True)
        (directory / "state").mkdir(mode=0o700)
        ClusterRolesFiles(self.settings.state_dir).put(CLUSTER, STANDING)
        self.ledger = open_ledger(self.settings)
        with self.ledger.transaction() as t:
            t.set_mark(f"picture:{CLUSTER}", msgspec.json.encode(picture()).decode())
            t.set_mark("began", str(to_micros(at(_BANK_BEGAN))))
        self.gate = GateClient(self.settings.state_dir)
        self._scripts = 0
        self.daemon = Daemon(self.settings, directory, own_host(self.files))

    def append(self, events: Sequence[Event]) -> None:
        """Append events to the journal, and wait until every consumer has applied them."""
        link = JournalLink(self.settings.state_dir, Stop())
        link.append(events)
        link.close()
        self.settle()

    def submit(self, job_id: int, when: datetime, user: str, spool: str = "spool") -> None:
        """Put a job's script and environment into a spool at once, with a fixed time."""
        made = self.directory / f"job.{job_id}"
        made.mkdir()
        lines = (f"HOME=/home/{user}", f"USER={user}", *_ENVIRONMENT)
        block = b"".join(line.encode() + b"\0" for line in lines)
        (made / "environment").write_bytes(struct.pack("=I", len(lines)) + block)
        script = (self.files / "scripts" / f"{job_id}.sh").read_bytes()
        (made / "script").write_bytes(script + b"\0")
        _set_time(made / "script", when)
        made.rename(self.directory / spool / f"hash.{job_id % 10}" / made.name)

    def capture(self, job_id: int, when: datetime, user: str) -> None:
        """Submit a job, and wait until its script is archived."""
        self.submit(job_id, when, user)
        self._scripts += 1
        self.settle()

    def wait_for_notice(self) -> None:
        """Wait until the bank has tried to send a notice."""
        self.daemon.wait(lambda: any(notice.tries for notice in self._notices()))

    def _notices(self) -> list[OutboxItem]:
        with self.ledger.reading() as t:
            return t.outbox.list_undelivered([NOTICE_KIND])

    def wait_for_events(self, kind: str, count: int) -> None:
        """Wait until the journal has this many events of a kind that Steward appends itself."""
        self.daemon.wait(lambda: ask(self.settings, "journal.db", _EVENTS, kind) == [(count,)])
        self.settle()

    def wait_for_dead_letter(self) -> None:
        """Wait until a consumer has rejected an event."""
        self.daemon.wait(lambda: bool(ask(self.settings, "journal.db", _DEAD)))
        self.settle()

    def holds(self) -> dict[str, int]:
        """Return the job of each open hold, by the hold's id."""
        return {hold.id: hold.job_id for hold in self.gate.list_holds(after="", limit=100)}

    def settle(self) -> None:
        """Wait until consumers have applied all events, rules have acted, and the gate is current.

        After a start, wait also until every consumer runs.
        """
        self.daemon.wait(self._is_settled, 60)

    def _is_settled(self) -> bool:
        if not self.daemon.is_quiet(self._scripts) or ask(self.settings, "rules.db", _ACTING):
            return False
        if ask(self.settings, "journal.db", _CONSUMERS) != [(1,)]:
            return False
        try:
            state = self.gate.get_status()
        except GateUnavailable:
            return False
        with self.ledger.reading() as t:
            return state.position == t.seq and CLUSTER in state.pictures


def own_host(files: Path) -> tuple[str, ...]:
    """Return the words before a command that set its users, groups, host name and zone."""
    etc = ("passwd", "group", "nsswitch.conf")
    binds = "".join(f"mount --bind {files}/etc/{name} /etc/{name} && " for name in etc)
    script = f'{binds}hostname login1 && exec "$@"'
    return ("env", "TZ=UTC", "unshare", "--mount", "--uts", "sh", "-c", script, "sh")


def _set_time(path: Path, when: datetime) -> None:
    ns = to_micros(when) * 1000
    os.utime(path, ns=(ns, ns))
