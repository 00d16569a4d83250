"""Steward's reports and sreport: equal totals of an hour of varied jobs.

slurmdbd sums whole hours after their end; ``sacctmgr rollup`` makes it sum at once, even an hour
that has not ended. Steward's reports treat that hour as ended, too.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from accounting_cluster import BookedSite, spec_of
from job_submission import state_of, wait_until
from sandboxes import passable_directory

from steward.capture.settings import SensorSettings
from steward.core.access import Access, Caller
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import utc_now
from steward.core.sqlite import SqliteUnavailable
from steward.core.timestamps import to_micros
from steward.daemon.registry import get_action
from steward.reports.context import ReportsContext
from steward.reports.history.reader import HistoryReader
from steward.reports.requests import ClusterRow
from steward.sandbox import Sandbox

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.database,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd runs as root"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

SHELL: Final = "#!/bin/sh\n"
ROOT: Final = Caller(uid=0, user="root")
_FORM: Final = "%Y-%m-%dT%H:%M:%S"
CPUS: Final = 4
MOST_MINUTES: Final = 5
"""Time limit of this module on a busy host, in minutes."""


class Books:
    """Records of slurmdbd and Steward about the hours of the test."""

    def __init__(self, site: BookedSite) -> None:
        self.site = site
        self.since = utc_now().replace(minute=0, second=0, microsecond=0)
        self.until = self.since
        self.unused_s = 0
        """CPU-seconds that ada's reservation kept and nobody used."""

    def close_books(self) -> None:
        """Have slurmdbd roll up every hour, the present one included."""
        hour = timedelta(hours=1)
        self.until = utc_now().replace(minute=0, second=0, microsecond=0) + hour
        self.slurm("sacctmgr", "-i", "rollup", *self.window)

    @property
    def window(self) -> tuple[str, str]:
        return self.since.strftime(_FORM), self.until.strftime(_FORM)

    def slurm(self, *words: str) -> str:
        env = {"TZ": "UTC"}
        ran = self.site.cluster.run([*words], user="root", env=env, timeout_s=120)
        return str(ran.stdout)

    def slurms(self, *report: str) -> list[list[str]]:
        """Return the rows of one of sreport's reports."""
        since, until = self.window
        out = self.slurm(
            *("sreport", "-P", "-n", "-t", "Seconds", *report, f"start={since}", f"end={until}")
        )
        return [line.split("|") for line in out.splitlines()]

    def nodes_known(self) -> int:
        """Return the number of nodes in the history."""
        try:
            with closing(HistoryReader(str(self.site.daemon.state))) as reader:
                return len(reader.list_nodes_at(to_micros(utc_now())))
        except SqliteUnavailable:
            return 0

    def ours(self, name: str, **request: Any) -> Any:
        settings = self.site.daemon.settings
        access = Access(settings.access, own_uid=0, get_roles=lambda _cluster: None)
        room = ReportsContext(settings, access=access, now=lambda: self.until)
        since, until = self.window
        action = get_action(name)
        asked = {"since": since, "until": until, "zone": "UTC", **request}
        try:
            return action.run(room, ROOT, msgspec.convert(asked, action.request))
        finally:
            room.close()

    def began(self, node: str) -> int:
        """Return since when slurmdbd knows of the cluster's CPUs, or of a down node; epoch."""
        out = self.slurm(
            *("sacctmgr", "-n", "-P", "show", "event", "all_time", "format=nodename,start")
        )
        times = [start for name, start in (line.split("|") for line in out.split()) if name == node]
        return int(datetime.strptime(min(times), _FORM).replace(tzinfo=UTC).timestamp())

    def drained(self) -> int:
        """Return the same from Steward's records; epoch."""
        with closing(HistoryReader(str(self.site.daemon.state))) as reader:
            spans = reader.list_nodes_between("box", to_micros(self.since), to_micros(self.until))
        (from_us,) = [one.from_us for one in spans if one.node == "node4" and one.reason]
        return from_us // 1_000_000


@pytest.fixture(scope="module")
def books(slurm_version: str) -> Iterator[Books]:
    _keep_clear_of_the_hour()
    with (
        passable_directory() as path,
        Sandbox.up(spec_of(str(path), slurm_version), report=print) as cluster,
    ):
        site = BookedSite(cluster)
        daemon = site.daemon
        sensor = SensorSettings(enabled=True, helper="", interval_s=0.3)
        daemon.settings = msgspec.structs.replace(daemon.settings, sensor=sensor)
        daemon.config.write_text(render_config(LoadedConfig(daemon.settings)))
        try:
            found = Books(site)
            site.start()
            wait_until(lambda: found.nodes_known() == 4, 60)
            # A reservation that begins in the second of the first look would be seen in part.
            time.sleep(1)
            _live(found)
            found.close_books()
            yield found
        finally:
            site.close()


def _keep_clear_of_the_hour() -> None:
    """Wait if the hour would end during the test: slurmdbd would roll up part of it."""
    now = utc_now()
    if now.minute >= 60 - MOST_MINUTES:
        time.sleep(3605 - now.minute * 60 - now.second)


def _live(books: Books) -> None:
    """Run the jobs and outages of an hour, in two minutes."""
    site, slurm = books.site, books.slurm
    # Idle, before any job comes, so that the reason is dated when it is down: to the second.
    slurm("scontrol", "update", "nodename=node4", "state=drain", "reason=broken fan")
    reserved = _reserve(books)
    site.submit(f"{SHELL}sleep 3\n", cpus_per_task=2, account="chemistry")
    site.submit(f"{SHELL}sleep 2\n", array="1-3", user="bela")
    site.submit(f"{SHELL}exit 1\n", user="bela", account="chemistry")
    gone = site.submit(f"{SHELL}sleep 9\n", begin="now+1hour")
    slurm("scancel", str(gone))
    _disturb(books)
    wait_until(lambda: "ReservationName" not in slurm("scontrol", "show", "reservation"), 90)
    site.until_idle(120)
    lasted = site.slurms("-X", "-n", "-P", "-j", str(reserved), "-o", "ElapsedRaw")
    # slurmdbd takes each job in a reservation to have all its CPUs.
    books.unused_s = (60 - int(lasted)) * CPUS
    wait_until(lambda: _is_told(books), 60)


def _reserve(books: Books) -> int:
    """Reserve a minute for ada, with a job in it, and one for maintenance."""
    for name, node, *more in (
        ("kept", "node2", "users=ada"),
        ("care", "node3", "users=root", "flags=maint"),
    ):
        books.slurm(
            *("scontrol", "create", "reservation", f"reservationname={name}", "starttime=now"),
            *("duration=1", f"nodes={node}", *more),
        )
    return books.site.submit(f"{SHELL}sleep 4\n", cpus_per_task=2, reservation="kept", user="ada")


def _disturb(books: Books) -> None:
    """Suspend a job, requeue one while it runs, and let one give nodes back."""
    site, slurm = books.site, books.slurm
    go = f"{site.cluster.directory}/go"
    script = f"{SHELL}while [ ! -e {go} ]; do sleep 0.3; done\n"
    halted = site.submit(script)
    again = site.submit(f"{SHELL}[ $SLURM_RESTART_COUNT ] || sleep 300\n", requeue=True)
    running = {"RUNNING"}
    wait_until(lambda: {state_of(site.cluster, job) for job in (halted, again)} == running)
    time.sleep(2)
    slurm("scontrol", "suspend", str(halted))
    time.sleep(3)
    slurm("scontrol", "resume", str(halted))
    Path(go).touch()
    slurm("scontrol", "requeue", str(again))
    wait_until(lambda: state_of(site.cluster, again) == "PENDING")
    slurm("scancel", str(again))


def _is_told(books: Books) -> bool:
    words = ("-a", "-D", "-X", "-n", "-P", "-S", "now-2hours", "-o", "JobID,State,End")
    theirs, ours = (
        sorted(ask(*words).splitlines()) for ask in (books.site.slurms, books.site.ours)
    )
    return theirs == ours and len(theirs) > 8


def test_who_used_what(books: Books) -> None:
    theirs = {
        (account, user): int(used)
        for _, account, user, _, used, *_ in books.slurms("cluster", "AccountUtilizationByUser")
        if account != "root"
    }
    ours = {
        (row.account, row.user): row.cpu_s
        for row in books.ours("reports.accounts").rows
        if row.cpu_s
    }
    # slurmdbd shares what a reservation kept in vain out among its users' associations.
    share = books.unused_s // 2
    for account in ("physics", "chemistry"):
        for user in ("ada", ""):
            theirs[account, user] -= share
    assert ours == theirs
    assert ours["chemistry", "ada"] >= 6


def test_who_used_most(books: Books) -> None:
    theirs: dict[str, int] = {}
    for _, user, _, _, used, *_ in books.slurms("user", "TopUsage"):
        theirs[user] = theirs.get(user, 0) + int(used)
    theirs["ada"] -= books.unused_s // 2 * 2
    del theirs["root"]  # owner of the maintenance reservation
    assert {row.user: row.cpu_s for row in books.ours("reports.users").rows} == theirs


def test_sizes(books: Books) -> None:
    rows = books.slurms("job", "SizesByAccount", "FlatView", "grouping=2,4")
    theirs = {
        (account, least): int(used)
        # The following columns, such as a share of the cluster, differ by version.
        for _, account, *sizes in rows
        for least, used in zip((0, 2, 4), sizes[:3], strict=True)
    }
    ours: dict[tuple[str, int], int] = dict.fromkeys(theirs, 0)
    for row in books.ours("reports.jobs", sizes=[2, 4]).rows:
        ours[row.account, row.least_cpus] += row.cpu_s
    assert ours == theirs
    assert len({least for (_, least), used in ours.items() if used}) == 2


def test_what_the_cluster_did(books: Books) -> None:
    ((_, *amounts),) = books.slurms("cluster", "Utilization")
    allocated, down, planned_down, idle, planned, reported = map(int, amounts)
    (row,) = books.ours("reports.cluster").rows
    assert isinstance(row, ClusterRow)
    assert row.allocated_cpu_s == allocated
    assert row.planned_cpu_s == planned
    assert row.planned_down_cpu_s == reported - allocated - down - idle - planned == 60 * CPUS
    # 24.11 prints planned time in the column of planned down time.
    assert planned_down in (row.planned_down_cpu_s, planned)
    # Both get a node's state when slurmctld processes it; the reason has an earlier date.
    late = (books.began("node4") - books.drained()) * CPUS
    assert row.down_cpu_s == down + late
    # Before the sensor's first poll, Steward knows nothing of the cluster.
    began = int(books.until.timestamp()) - row.known_s
    missed = (began - books.began("")) * CPUS * 4
    assert row.reported_cpu_s == reported - missed
    assert row.idle_cpu_s == idle - missed - late
    assert (row.cpus, row.nodes) == (4 * CPUS, 4)
