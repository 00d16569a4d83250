"""``make bench``: the gate with 10,000 accounts and 100,000 open holds, quiet and beside a storm.

A gate runs in a process of its own, as in ``steward serve``. One client asks in
turn, for the time of a round trip: again and again, and, as single sbatch come,
where another program has had the processor's caches before each. Several ask at
once, for the decisions a second, of which the gate's own CPU time says what one
core could do. The baseline is a server of the same shape, scheduled as the gate
is, that decides nothing: it answers each line with one of its own. The storm is
real: jobs pour into a spool as fast as they can be written, and ``steward
archive watch`` with all its processes archives them.

A second gate stands for that of another host: it forwards requests to the first
one over TLS. Both run on this host, so the network's time is not included.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import storm
from bars import Bar, check, finish
from harness.gate import (
    CLUSTER,
    RunningGate,
    account,
    job,
    now_us,
    running,
    settings_of,
    start_worker,
)
from run import fresh_directory
from scale import scaled
from servers.authority import Authority
from servers.server import free_port
from steward.bank.gate import token
from steward.bank.gate.balances import OpenHold
from steward.bank.gate.server import set_real_time_priority
from steward.bank.gate.store import GateStore
from steward.bank.money import MICRO
from steward.bank.records import AccountBooks, AllocationBooks
from steward.bank.settings import MAX_GATE_TIMEOUT_MS
from steward.core.config import Settings
from steward.core.section import TlsSettings
from watching import Watch

_FLOOR = "a server that only answers"
_P50 = Bar("gate decision, p50", "ms", 0.1, _FLOOR)
_P99 = Bar("gate decision, p99", "ms", 1, _FLOOR)
_STORM_P50 = Bar("gate decision beside a storm, p50", "ms", 0.1, _FLOOR)
_STORM_P99 = Bar("gate decision beside a storm, p99", "ms", 1, _FLOOR)
_BARS = {
    "quiet: round trip": (_P50, _P99),
    "beside a storm: round trip": (_STORM_P50, _STORM_P99),
}
"""Bars of the p50 and the p99 of a line."""
_ACCOUNTS, _HOLDS = scaled(10_000, 100), scaled(100_000, 100)
_ROUNDS, _SINGLE, _CLIENTS, _BULK_S = scaled(5_000, 20), scaled(1_000, 10), 4, scaled(5)
_WARM = scaled(200, 2)
_LIVE_S, _ENDLESS, _ARCHIVED_S = 2.0, 10_000_000, 60.0
_BASELINE = """
import socket, sys
from steward.bank.gate.server import RealTimePriority
RealTimePriority().acquire()
server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
server.bind(sys.argv[1]); server.listen(1024)
while True:
    peer, _ = server.accept()
    peer.recv(65536); peer.sendall(b'{"v":1,"ok":true}\\n'); peer.close()
"""
_CLIENT = """
import socket, sys, time
path, seconds, line = sys.argv[1], float(sys.argv[2]), sys.argv[3].encode() + b"\\n"
until, count = time.monotonic() + seconds, 0
while time.monotonic() < until:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.connect(path); one.sendall(line)
        assert b'"ok":true' in one.recv(65536)
    count += 1
print(count)
"""


def main() -> None:
    """Print the figures."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with tempfile.TemporaryDirectory(prefix="steward-gate-bench-") as where:
        settings, asking = _make_settings(Path(where))
        _fill(settings.state_dir)
        gate = RunningGate(settings)
        try:
            gate.tell(*_accounts())
            time.sleep(2)
            print(f"{_ACCOUNTS} accounts, {_HOLDS} open holds; RSS {_rss_mb(gate):.0f} MB")
            with _other_host(settings, asking) as other:
                _measure(gate, other, "quiet", os.path.join(where, "base.sock"))
                with _storm():
                    _measure(gate, other, "beside a storm", os.path.join(where, "base2.sock"))
        finally:
            gate.kill(signal.SIGTERM)
    finish()


def _make_settings(where: Path) -> tuple[Settings, Settings]:
    """Return the settings of the gate that decides, and of the gate of another host."""
    authority, address = Authority(where / "authority"), f"127.0.0.1:{free_port()}"
    certificate, key = authority.certificate("IP:127.0.0.1")
    tls = TlsSettings(
        certificate_file=certificate,
        key_file=key,
        ca_file=authority.file,
        client_ca_file=authority.file,
    )

    def make(name: str, **gate: str) -> Settings:
        (where / name).mkdir()
        settings = settings_of(where / name)
        cluster = msgspec.structs.replace(settings.cluster[CLUSTER], controllers=("127.0.0.1",))
        return msgspec.structs.replace(
            settings,
            cluster={CLUSTER: cluster},
            gate=msgspec.structs.replace(
                settings.gate, tls=tls, timeout_ms=MAX_GATE_TIMEOUT_MS, **gate
            ),
        )

    return make("deciding", listen=address), make("asking", ask=address)


@contextmanager
def _other_host(deciding: Settings, asking: Settings) -> Iterator[RunningGate]:
    """Run the gate of another host, and the server that it asks."""
    server = start_worker(deciding, "run_gate_server")
    try:
        with running(asking) as other:
            path = asking.gate_socket
            other.wait(lambda: os.path.exists(path) and b"admin_comment" in _ask(path, _line(0)))
            yield other
    finally:
        server.terminate()
        server.wait()


def _accounts() -> list[AccountBooks]:
    return [
        account(
            f"a{number}",
            10**9,
            number=number + 1,
            allocations=(
                AllocationBooks(number=number + 1, balance=10**15),
                AllocationBooks(number=_ACCOUNTS + number + 1, balance=10**15, end_us=2**60),
            ),
        )
        for number in range(_ACCOUNTS)
    ]


def _fill(state_dir: str) -> None:
    store = GateStore(state_dir)
    with store.transaction():
        for number in range(_HOLDS):
            at = number % _ACCOUNTS
            hold = OpenHold(
                number=store.next_number(),
                id=token.make_hold_id(),
                cluster=CLUSTER,
                job_id=number + 1,
                account=f"a{at}",
                payer=f"a{at}",
                uid=1000,
                user="alice",
                amount=MICRO,
                remaining=MICRO,
                shares=((_ACCOUNTS + at + 1, MICRO),),
                confirmed=True,
                created_us=now_us(),
            )
            store.insert(hold, None, job())
    store.record_boot()
    store.close()


def _measure(gate: RunningGate, other: RunningGate, name: str, baseline: str) -> None:
    base = subprocess.Popen([sys.executable, "-c", _BASELINE, baseline])
    path = gate.settings.gate_socket
    try:
        gate.wait(lambda: os.path.exists(baseline))
        # How long an asker waits for a processor is the host's figure, not the gate's.
        is_first = set_real_time_priority()
        try:
            often = [(_round(baseline, line), _round(path, line)) for line in _lines()]
            single = [
                (_round(baseline, line, is_single=True), _round(path, line, is_single=True))
                for line in _lines()[:_SINGLE]
            ]
            by_policy = _count_by_policy(other)
            forwarded = [
                (_round(path, line), _round(other.settings.gate_socket, line)) for line in _lines()
            ]
        finally:
            if is_first:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        _print_rounds(f"{name}: round trip", often)
        _print_rounds(f"{name}: round trip after another program has run", single)
        waiting = [(_round(baseline, line), _round(path, line)) for line in _lines()]
        _print_rounds(f"{name}: round trip for one that has to wait for a processor", waiting)
        late = _count_by_policy(other) - by_policy
        _print_rounds(
            f"{name}: round trip to the gate of another host",
            forwarded,
            floor_name="the gate of this host",
        )
        print(f"{name}: {late} of {_ROUNDS} replies of the gate of another host were too late")
    finally:
        base.kill()
        base.wait()
    before = _cpu_s(gate)
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", _CLIENT, path, str(_BULK_S), _line(number).decode().strip()],
            stdout=subprocess.PIPE,
        )
        for number in range(_CLIENTS)
    ]
    count = sum(int(client.communicate()[0]) for client in clients)
    spent = _cpu_s(gate) - before
    print(
        f"{name}: {count / _BULK_S:.0f} decisions a second from {_CLIENTS} clients beside it; "
        f"{count / spent:.0f} a second of the gate's CPU"
    )


def _count_by_policy(gate: RunningGate) -> int:
    return gate.link.get_status().tally.by_policy


def _print_rounds(
    name: str,
    pairs: list[tuple[float, float]],
    *,
    floor_name: str = _FLOOR,
) -> None:
    floor, took = (sorted(column) for column in zip(*pairs[_WARM:], strict=True))
    for part, bar in zip((0.5, 0.99), _BARS.get(name, (None, None)), strict=True):
        ours, bare = (column[int(len(column) * part)] * 1e3 for column in (took, floor))
        print(
            f"{name}: p{part * 100:.0f} {ours:.3f} ms, "
            f"{ours / bare:.1f} x {floor_name} ({bare:.3f} ms)"
        )
        if bar is not None:
            check(bar, ours, bare)


def _lines() -> list[bytes]:
    return [_line(number) for number in range(_ROUNDS)]


def _line(number: int) -> bytes:
    wanted = msgspec.json.encode(job(30, account=f"a{number * 7 % _ACCOUNTS}"))
    return b'{"v":1,"op":"submit","cluster":"c","job":' + wanted + b"}\n"


def _round(path: str, line: bytes, *, is_single: bool = False) -> float:
    if is_single:
        subprocess.run([sys.executable, "-ISc", "pass"], check=True)
    began = time.perf_counter()
    assert b'"ok":true' in _ask(path, line)
    return time.perf_counter() - began


def _ask(path: str, line: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
        one.connect(path)
        one.sendall(line)
        return one.recv(65536)


@contextmanager
def _storm() -> Iterator[None]:
    """Jobs pour in and are archived; says at the end how many were."""
    with fresh_directory() as where, Watch(where) as watch:
        words = [sys.executable, storm.__file__, str(watch.spool), f"--live={_LIVE_S}"]
        player = subprocess.Popen([*words, f"--jobs={_ENDLESS}"])
        try:
            if not watch.wait_archived(_WARM, _ARCHIVED_S):
                raise SystemExit("nothing is archived")
            began, before = time.monotonic(), watch.progress()[1]
            yield
            archived = watch.progress()[1] - before
            print(f"the storm: {archived / (time.monotonic() - began):.0f} jobs archived a second")
        finally:
            player.kill()
            player.wait()


def _cpu_s(gate: RunningGate) -> float:
    fields = _proc(gate, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_mb(gate: RunningGate) -> float:
    return int(_proc(gate, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _proc(gate: RunningGate, name: str) -> str:
    assert gate.process is not None
    return Path(f"/proc/{gate.process.pid}/{name}").read_text()


if __name__ == "__main__":
    main()
