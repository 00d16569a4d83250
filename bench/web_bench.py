"""``make bench``: every page with many jobs in the books and twenty people clicking.

    python bench/web_bench.py [--jobs 100000] [--people 20] [--seconds 60] [--dir DIR]

A real daemon and ``steward web`` beside it, on tmpfs. The people click as people do, a page
every second or two, each through all pages in an order of their own; what is measured is
the time from a request to the last byte of its page. The baseline is the page that only says
that the process lives, asked in between by the same people.

On a machine with other work all times are longer. So each page is then asked for alone, and
what all of Steward's processes took of a processor for it is printed, too, with the load.
"""

import argparse
import asyncio
import contextlib
import os
import pwd
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import httpx
import msgspec

from bars import Bar, check, finish
from run import fresh_directory
from scale import SCALE, scaled
from servers.server import free_port
from steward.admin.credentials.store import CredentialStore
from steward.bank.settings import BankSettings
from steward.core.config import AccessSettings, Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.core.events import utc_now
from steward.web.settings import WebSettings
from web_filling import CLUSTER, FIRST_JOB, READER, fill, settings_in

_MEDIAN = Bar("page, 20 people: median", "ms", 100, "/healthz")
_P99 = Bar("page, 20 people: p99", "ms", 300, "/healthz")
_YEAR_MEDIAN = Bar("report or capacity page of a year, 20 people: median", "ms", 100, "/healthz")
_YEAR_P99 = Bar("report or capacity page of a year, 20 people: p99", "ms", 300, "/healthz")
_YEAR_PAGES = frozenset({"a report of a year", "capacity of a year"})
OPERATOR, WEB = "daemon", "games"
"""Users that every Debian has."""
PORT = free_port()
_THINK_S = (0.5 * min(SCALE, 1), 1.5 * min(SCALE, 1))
_BASELINE = "/healthz"
_ALONE = scaled(10)
"""So often each page is asked for alone."""


def pages(jobs: int) -> dict[str, str]:
    """Every page, by what it is."""
    one, other = FIRST_JOB + jobs // 2, FIRST_JOB + jobs // 2 - 6
    job = f"/jobs/{CLUSTER}/{one}"
    return {
        "baseline": _BASELINE,
        "home": "/",
        "jobs": "/jobs",
        "jobs of a user": "/jobs?users=user07",
        "jobs that failed": "/jobs?states=FAILED",
        "jobs, counted": "/jobs/counts?users=user07",
        "jobs, by text": "/jobs?text=zyzzyva",
        "a job": job,
        "a job compared": f"{job}/compare?with={other}",
        "accounts": "/accounts",
        "an account": "/accounts/account03",
        "a statement": "/accounts/account03/statement?since=now-90days",
        "a user": "/users/user07",
        "a user's efficiency": "/users/user07/efficiency",
        "cluster": "/cluster",
        "cluster, a month ago": "/cluster?at=now-30days",
        "a node": f"/nodes/{CLUSTER}/n0107",
        "events": "/events",
        "reports": "/reports",
        "a report of a week": "/reports/users/table?since=now-7days",
        "waits of a week": "/reports/waits/table?since=now-7days",
        "a report of a year": "/reports/users/table?since=now-365days",
        "capacity of a week": "/reports/cluster/table?since=now-7days",
        "capacity of a year": "/reports/cluster/table?since=now-365days",
        "actions": "/actions",
        "rules": "/rules",
        "Steward itself": "/status",
        "openapi.json": "/api/v1/openapi.json",
        "jobs by API": "/api/v1/jobs",
    }


@contextmanager
def running(settings: Settings, home: Path) -> Iterator[tuple[int, ...]]:
    """The daemon, when it has made its books, and the pages; the ids of both."""
    config = home / "steward.toml"
    config.write_text(render_config(LoadedConfig(settings)))
    steward = [sys.executable, "-m", "steward"]
    with open(home / "log", "wb") as log:
        daemon = subprocess.Popen([*steward, "serve", "--config", str(config)], stderr=log)
        web = None
        try:
            _wait_for_books(settings, daemon)
            web = subprocess.Popen(
                [*_as_web(), *steward, "web", "--socket", settings.socket],
                stderr=log,
                cwd="/",
            )
            _wait_for_pages(web)
            yield daemon.pid, web.pid
        finally:
            for process in (web, daemon):
                if process is not None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(120)


def _as_web() -> list[str]:
    """Gives root's rights up but for one: where Python lies only root may be able to look."""
    user, may = pwd.getpwnam(WEB), "+dac_read_search"
    ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
    return ["setpriv", *ids, f"--inh-caps={may}", f"--ambient-caps={may}"]


def _wait_for_books(settings: Settings, daemon: "subprocess.Popen[bytes]") -> None:
    began = time.monotonic()
    command = [sys.executable, "-m", "steward", "journal", "status", "--json"]
    config = f"{Path(settings.state_dir).parent}/steward.toml"
    while True:
        if daemon.poll() is not None:
            sys.exit("the daemon ended: " + config)
        done = subprocess.run(
            [*command, "--config", config], capture_output=True, timeout=120, check=False
        )
        if done.returncode == 0:
            told = msgspec.json.decode(done.stdout)
            behind = {one["name"]: one["lag"] for one in told["consumers"]}
            if behind and not any(behind.values()):
                break
        time.sleep(1)
    print(f"books made in {time.monotonic() - began:.0f} s", flush=True)


def _wait_for_pages(web: "subprocess.Popen[bytes]") -> None:
    for _ in range(1200):
        try:
            if httpx.get(f"http://127.0.0.1:{PORT}{_BASELINE}").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
        if web.poll() is not None:
            break
    sys.exit("the pages do not come up")


def sessions(settings: Settings, people: int) -> list[tuple[str, str]]:
    """Sessions of so many people, each with the page set that they look at."""
    store = CredentialStore(settings.state_dir)
    now = utc_now()
    found = []
    for number in range(people):
        user = OPERATOR if number % 2 else READER
        secret, _ = store.create(
            "session",
            uid=pwd.getpwnam(user).pw_uid,
            user=user,
            how="bench",
            now=now,
            expires=now + timedelta(hours=2),
        )
        found.append((user, secret))
    store.close()
    return found


async def click(
    user: str, secret: str, wanted: dict[str, str], until: float, told: list[tuple[str, float, int]]
) -> None:
    """One of the people: looks at one page after the other."""
    random_ = random.Random(secret)
    for_operators = {"rules", "Steward itself", "capacity of a week", "capacity of a year"}
    names = [name for name in wanted if user == OPERATOR or name not in for_operators]
    cookies = {"steward_session": secret}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{PORT}", cookies=cookies, timeout=60
    ) as browser:
        while time.monotonic() < until:
            random_.shuffle(names)
            for name in names:
                await asyncio.sleep(random_.uniform(*_THINK_S))
                began = time.perf_counter()
                answer = await browser.get(wanted[name])
                took_s = time.perf_counter() - began
                if answer.status_code != 200:
                    sys.exit(f"{wanted[name]}: {answer.status_code}\n{answer.text[:500]}")
                told.append((name, took_s, len(answer.content)))


async def everybody(
    people: list[tuple[str, str]], wanted: dict[str, str], seconds: float
) -> list[tuple[str, float, int]]:
    """All people at once."""
    told: list[tuple[str, float, int]] = []
    until = time.monotonic() + seconds
    await asyncio.gather(*(click(user, secret, wanted, until, told) for user, secret in people))
    return told


def alone(
    user: str, secret: str, wanted: dict[str, str], processes: tuple[int, ...]
) -> dict[str, float]:
    """What each page takes of a processor, by all processes together, in seconds."""
    assert user == OPERATOR, "who sees every page"
    cookies = {"steward_session": secret}
    costs: dict[str, float] = {}
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", cookies=cookies, timeout=60) as browser:
        for name, path in wanted.items():
            before = _taken_s(processes)
            for _ in range(_ALONE):
                browser.get(path).raise_for_status()
            costs[name] = (_taken_s(processes) - before) / _ALONE
    return costs


def _taken_s(roots: tuple[int, ...]) -> float:
    """What processes and all below them have taken of a processor, those that ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # A program's name, in brackets, may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended just now
        pid = int(stat.parent.name)
        # Its own in user and kernel mode, and that of children which it has waited for.
        parents[pid], ticks[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    ours = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(ticks.get(pid, 0) for pid in ours) / os.sysconf("SC_CLK_TCK")


def report(
    told: list[tuple[str, float, int]], wanted: dict[str, str], costs: dict[str, float]
) -> None:
    """Print what each page took."""
    by_page: dict[str, list[float]] = {name: [] for name in wanted}
    sizes = {name: size for name, _, size in told}
    for name, took_s, _ in told:
        by_page[name].append(took_s)
    base = statistics.median(by_page["baseline"])
    print(
        f"{'page':<22} {'times':>6} {'median':>9} {'p99':>9} {'bytes':>9} {'x baseline':>11} "
        f"{'processor':>10}"
    )
    for name, times in by_page.items():
        if not times:
            continue
        median, p99 = statistics.median(times), sorted(times)[int(len(times) * 0.99)]
        print(
            f"{name:<22} {len(times):>6} {median * 1000:>6.1f} ms {p99 * 1000:>6.1f} ms "
            f"{sizes[name]:>9,} {median / base:>11.1f} {costs[name] * 1000:>7.0f} ms"
        )
    year = [took_s for name, took_s, _ in told if name in _YEAR_PAGES]
    every = [took_s for name, took_s, _ in told if name != "baseline"]
    floor, floor_p99 = _percentiles_ms(by_page["baseline"])
    for label, times, bars in (
        ("year", year, (_YEAR_MEDIAN, _YEAR_P99)),
        ("all", every, (_MEDIAN, _P99)),
    ):
        if not times:
            continue  # at the smallest size nobody may have come to such a page
        middle, worst = _percentiles_ms(times)
        print(f"{label:<22} {len(times):>6} {middle:>6.1f} ms {worst:>6.1f} ms")
        check(bars[0], middle, floor)
        check(bars[1], worst, floor_p99)


def _percentiles_ms(times: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile of some times, in ms."""
    return statistics.median(times) * 1000, sorted(times)[int(len(times) * 0.99)] * 1000


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=scaled(100_000, 300))
    parser.add_argument("--people", type=int, default=scaled(20, 2))
    parser.add_argument("--seconds", type=float, default=scaled(60))
    parser.add_argument("--dir", default="", help="a directory that is left")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        home = Path(options.dir) if options.dir else stack.enter_context(fresh_directory())
        home.mkdir(exist_ok=True)
        home.chmod(0o755)
        measure(home, options.jobs, options.people, options.seconds)
    finish()


def measure(home: Path, jobs: int, people: int, seconds: float) -> None:
    """Fill a directory, where that was not done before, and look at all pages."""
    is_filled = (home / "state").exists()
    settings = settings_in(
        home,
        web=WebSettings(listen=f"127.0.0.1:{PORT}", user=WEB, requests_per_minute=100_000),
        access=AccessSettings(operators=(OPERATOR,)),
        bank=BankSettings(enabled=True, reconcile_s=86_400.0),
    )
    if not is_filled:
        began = time.monotonic()
        fill(settings, jobs)
        print(f"{jobs:,} jobs made up in {time.monotonic() - began:.0f} s", flush=True)
    wanted = pages(jobs)
    with running(settings, home) as processes:
        who = sessions(settings, people)
        asyncio.run(everybody(who, wanted, min(20.0, seconds)))
        told = asyncio.run(everybody(who, wanted, seconds))
        load = os.getloadavg()[0]
        costs = alone(*next(one for one in who if one[0] == OPERATOR), wanted, processes)
    report(told, wanted, costs)
    print(f"load at the end of the crowd: {load:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
