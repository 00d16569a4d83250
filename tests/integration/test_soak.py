"""A week's operation in miniature: jobs, outages, kills, rotation, retention, a purge, a backup.

STEWARD_SOAK_S sets the duration (600 seconds); ``make soak`` sets an hour. In the first part the
daemon and its workers are killed and restarted; in the second part only Slurm is, and Steward must
not grow. At the end every job is charged, the archive is complete, and ``steward doctor`` finds
nothing wrong.

STEWARD_WEEK_SEED repeats the order of an earlier run.
"""

import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Final

import msgspec
import pytest
from bank_cluster import ACCOUNTS, SHELL, BankSite, bank_site
from job_submission import wait_until
from resource_growth import Growth, Sample, slope
from spool_daemon import chance_of

from steward.accounting.settings import AccountingSettings
from steward.archive.settings import LimitSettings
from steward.bank.money import MICRO
from steward.core.config import JournalSettings
from steward.core.config.reader import LoadedConfig, render_config

SOAK_S: Final = float(os.environ.get("STEWARD_SOAK_S", "600"))
ROUGH: Final = 0.4
"""Share of the time in which Steward itself is killed and restarted."""
WARM_UP: Final = 0.35
"""Share of the remaining time in which caches fill, which does not count."""
MEMORY_BYTES: Final = 4 << 20
MEMORY_SHARE: Final = 0.06
"""Tolerated growth of a process, as a share of its memory: SQLite's page caches and Python's arenas
fill in steps."""
DESCRIPTORS: Final = 6.0
"""Tolerated growth of descriptors: a database opened on first use has three, and a running command
of Slurm's has some. A leak at each event would be twenty."""
DIRECTORIES: Final = 140
"""Tolerated number of open directories: a files sink keeps up to 128 open."""
LOOKS: Final = 10
"""Minimum number of measurements that show a growth."""
MOST_LEFT: Final = 12
"""Number of jobs that may be left when the next ones are submitted."""
KEPT_BYTES: Final = 20_000
"""Quota of each user in the archive, in bytes: retention always has something to remove."""

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="the gate is asked by SlurmUser"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
    pytest.mark.long,
    pytest.mark.soak,
    pytest.mark.timeout(int(3 * SOAK_S + 900)),
]


@pytest.fixture
def site(slurm_version: str) -> Iterator[BankSite]:
    users = ("ada", "bela", "chi", "dora")
    with bank_site(slurm_version, user_names=users, min_job_age_s=60) as site:
        settings = site.settings
        sink = msgspec.structs.replace(
            settings.files_sink("files"), limit={"small": LimitSettings(max_bytes=KEPT_BYTES)}
        )
        site.settings = site.daemon.settings = msgspec.structs.replace(
            settings,
            log_file=str(site.daemon.log_path),
            journal=JournalSettings(keep_s=20.0),
            accounting=AccountingSettings(type="jobacct/log"),
            archive=msgspec.structs.replace(settings.archive, sink={"files": sink}),
        )
        site.daemon.config.write_text(render_config(LoadedConfig(site.settings)))
        yield site


class Week:
    """Operation of one site.

    Args:
        site: The cluster and its Steward.
    """

    def __init__(self, site: BankSite) -> None:
        self.site = site
        self.chance = chance_of("STEWARD_WEEK_SEED")
        self.jobs: list[int] = []
        self.growth = Growth(site.cluster.directory)
        self.users = cycle(site.cluster.users)
        self.saved = 0

    def submit(self) -> None:
        """Submit some jobs of several users: some fail, some are arrays, some are cancelled."""
        for number in range(self.chance.randrange(4, 9)):
            user, options = next(self.users), {"time": "1"}
            if number % 4 == 3:
                options["array"] = "0-2"
            body = f"sleep {self.chance.uniform(0.1, 2.0):.1f}\nexit {int(number == 1)}\n"
            script = f"{SHELL}# {'x' * self.chance.randrange(3000)}\n{body}"
            job = self.site.submit(script, user=user, **options)
            self.jobs.append(job)
            if number == 2:
                self.site.as_user("scancel", str(job), user=user)

    # Failures of Steward

    def kill_a_part(self) -> None:
        part = self.chance.choice(
            ("journal", "jobs", "bank", "gate", "archive.files", "history", "socket", "catalog")
        )
        self.site.signal_part(part, signal.SIGKILL)

    def stop_and_start(self) -> None:
        assert self.site.daemon.stop() == 0
        self.site.daemon.start()

    def pull_the_plug(self) -> None:
        self.site.restart()

    def reload(self) -> None:
        os.kill(self.site.daemon.pid, signal.SIGHUP)

    # Failures around it

    def controller_goes(self) -> None:
        self.site.cluster.stop_service("slurmctld")
        time.sleep(self.chance.uniform(1.0, 4.0))
        self.site.cluster.restart_controller()

    def controller_is_killed(self) -> None:
        # Jobs that it has never written down are lost to Slurm itself.
        time.sleep(6.0)
        self.site.cluster.kill_controller()
        self.site.cluster.restart_controller()

    def node_goes(self) -> None:
        services = self.site.cluster.get_status()
        node = self.chance.choice([name for name in services if name.startswith("slurmd.")])
        self.site.cluster.stop_service(node, signal.SIGKILL)
        time.sleep(1.0)
        self.site.cluster.start_service(node)

    def rotate(self) -> None:
        """Rotate the log as logrotate does, with compress and without a signal."""
        log = Path(self.site.settings.log_file)
        if not log.exists():
            return
        old = Path(f"{log}.1")
        log.rename(old)
        time.sleep(1.0)
        with gzip.open(f"{log}.1.gz", "wb") as packed:
            packed.write(old.read_bytes())
        old.unlink()

    def purge(self) -> None:
        job = self.chance.choice(self.jobs)
        self.site.daemon.ask("archive", "erase", "-j", str(job), "--yes", check=False)

    def back_up(self) -> None:
        self.saved += 1
        path = f"{self.site.cluster.directory}/saved-{self.saved}.tar.zst"
        config = ("--config", str(self.site.daemon.config))
        self.site.daemon.ask("backup", path, *config)
        assert "is complete" in self.site.daemon.ask("restore", path, "--check").stdout
        os.unlink(path)

    def left(self) -> int:
        """Return the number of unfinished jobs; repair the effects of a killed slurmctld."""
        words = ["squeue", "-h", "-t", "PD,R,S,CG,CF", "-o", "%i %r"]
        left = self.site.cluster.run(words, check=False).stdout.split("\n")
        for line in filter(None, left):
            job, _, reason = line.partition(" ")
            if "held" in reason.lower():
                self.site.as_root("scontrol", "release", job)
        words = ["sinfo", "-h", "-N", "-t", "drain,down", "-o", "%N"]
        for node in self.site.cluster.run(words, check=False).stdout.split():
            self.site.as_root("scontrol", "update", f"nodename={node}", "state=resume")
        return len(list(filter(None, left)))

    def live(self, until: float, events: list[Callable[[], None]]) -> None:
        """Run jobs, and one outage after the other."""
        coming = cycle(self.chance.sample(events, len(events)))
        while time.monotonic() < until:
            self.submit()
            event = next(coming)
            print(f"{time.monotonic():.0f} {event.__name__}", flush=True)
            event()
            pause = time.monotonic() + self.chance.uniform(3.0, 6.0)
            while time.monotonic() < pause:
                self.growth.look()
                time.sleep(1.0)
            # Slurm alone decides how fast; what waits must not become more and more.
            wait_until(lambda: self.left() < MOST_LEFT, 200)


def test_a_week(site: BankSite) -> None:
    site.open({ACCOUNTS[0]: 10_000_000 * MICRO, ACCOUNTS[1]: 0})
    site.start()
    week = Week(site)
    began = time.monotonic()
    around = [week.controller_goes, week.controller_is_killed, week.node_goes]
    around += [week.rotate, week.purge, week.back_up]
    own = [week.kill_a_part, week.stop_and_start, week.pull_the_plug, week.kill_a_part, week.reload]
    week.live(began + SOAK_S * ROUGH, [*own, *around])
    site.until_gate()
    calm = SOAK_S * (1 - ROUGH)
    week.live(time.monotonic() + calm * WARM_UP, around)
    week.growth.begin()
    week.live(time.monotonic() + calm * (1 - WARM_UP), around)

    lasting = week.growth.lasting()
    assert min(len(samples) for samples in lasting.values()) >= LOOKS
    grown = [said for name, samples in lasting.items() if (said := grows(name, samples))]
    names = {name.rpartition(" (")[0] for name in lasting}
    wanted = ("journal", "jobs", "bank", "gate", "socket", "archive.files", "history", "catalog")
    missing = {f"steward {part}"[:15] for part in wanted} - names
    assert not missing, f"these did not live through it: {missing}"
    assert not grown, "\n".join(grown)

    wait_until(lambda: not week.left(), 200)
    wait_until(lambda: not site.unfinished() and not site.held(), 180)
    assert site.findings() == []
    since = ("-S", "now-1day", "--dry-run", "--json")
    wait_until(lambda: json.loads(site.bank("reconcile", *since))["differences"] == [], 60)
    assert len(site.charged()) > len(week.jobs) // 2
    wait_until(lambda: "|waiting|" not in site.daemon.ask("status", "-P").stdout, 60)
    status = json.loads(site.daemon.ask("status", "--json").stdout)
    assert status["unknown"] == {}
    assert status["dead_letters"] == 0
    assert status["journal"]["events"] < status["journal"]["head"], "nothing was let go of"
    assert site.daemon.ask("archive", "verify").returncode == 0
    if site.daemon.log_path.exists():  # otherwise nothing was logged since the rotation
        assert site.daemon.log_path.stat().st_mode & 0o007 == 0
    doctor = json.loads(site.daemon.ask("doctor", "--json", check=False).stdout)
    assert doctor["status"] != "wrong", [
        (one["check"], one["object"], one["finding"])
        for one in doctor["findings"]
        if one["status"] == "wrong"
    ]


def grows(name: str, samples: list[Sample]) -> str:
    """Describe the growth of a process beyond its limit; "" if there is none."""
    span_s = samples[-1].at_s - samples[0].at_s
    memory = slope([(one.at_s, float(one.rss)) for one in samples]) * span_s
    fds = slope([(one.at_s, float(one.fds)) for one in samples]) * span_s
    least = min(one.rss for one in samples)
    print(f"{name}: {memory / 1e6:+.2f} MB of {least / 1e6:.1f} MB, {fds:+.2f} descriptors")
    if memory > max(MEMORY_BYTES, MEMORY_SHARE * least):
        return f"{name} grew by {memory / 1e6:.1f} MB of {least / 1e6:.1f} MB in {span_s:.0f} s"
    if samples[-1].directories > DIRECTORIES:
        return f"{name} has {samples[-1].directories} directories open"
    if fds > DESCRIPTORS:
        return f"{name} has {fds:.1f} descriptors more after {span_s:.0f} s"
    return ""
