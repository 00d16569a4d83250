"""Checks of the bank: prices, the ledger's proof, the gate, and a bank elsewhere."""

import os
import time
from collections.abc import Iterator
from typing import Final

from steward.admin.doctor.findings import Finding, ok, several, skipped, warning, wrong
from steward.admin.doctor.ground import Asked, Ground, each_cluster
from steward.bank.errors import NoRate
from steward.bank.gate.link import GateLink
from steward.bank.prices import rate_for
from steward.core.config import Settings
from steward.core.events import utc_now
from steward.extensions.mybrc import Remote, RemoteFailed, RemoteRejected, RemoteUnavailable
from steward.slurm import Machine

_GATE_S: Final = 5.0
_PRICES: Final = "steward bank rate show, and the cluster's partitions"


def _prices(ground: Ground, one: Asked) -> Iterator[Finding]:
    if not ground.settings.bank.enabled:
        yield skipped(_PRICES, "there is no bank here")
        return
    rates = list(ground.ask("bank.rate_show", cluster=one.name).rates)
    partitions = sorted(Machine(one.name, one.settings).partitions())
    free = []
    for partition in partitions:
        try:
            rate_for(rates, one.name, partition, "", utc_now())
        except NoRate:
            free.append(partition)
    if free:
        yield wrong(
            _PRICES,
            f"{', '.join(free)}: nobody says what jobs cost there, so they are not charged yet",
            f"steward bank rate create {free[0]} --weight cpu=1",
            "steward bank rate create '*' --weight cpu=1",
        )
    else:
        yield ok(_PRICES, f"{several(len(partitions), 'partition')}, each with a rate")


def ledger(ground: Ground) -> Iterator[Finding]:
    """Whether the ledger's proof holds, and holds match jobs."""
    looked_at = "steward bank check"
    if not ground.settings.bank.enabled:
        yield skipped(looked_at, "there is no bank here")
        return
    answer = ground.ask("bank.check")
    for one in answer.findings:
        tell = warning if one.kind in ("unproved", "job-without-hold") else wrong
        yield tell(looked_at, one.what, "steward bank check", of=one.kind)
    if not answer.findings:
        holds = "" if answer.holds is None else f", {several(answer.holds, 'hold')} match the jobs"
        yield ok(looked_at, f"the books of {several(answer.accounts, 'account')} add up{holds}")


def gate(ground: Ground) -> Iterator[Finding]:
    """Whether the gate decides, and nobody has switched it off."""
    settings = ground.settings
    looked_at = f"{settings.gate.socket}, {settings.gate.off_switch}"
    if not settings.bank.enabled and not settings.gate.ask:
        yield skipped(looked_at, "there is no bank here")
        return
    if os.path.exists(settings.gate.off_switch):
        yield wrong(
            looked_at,
            f"{settings.gate.off_switch} is there: every job is admitted unasked",
            f"rm {settings.gate.off_switch}",
            of=os.path.basename(settings.gate.off_switch),
        )
    stands = GateLink(settings.state_dir, _GATE_S).state()
    if not stands.deciding and not settings.gate.ask:
        yield wrong(
            looked_at,
            f"it does not decide: {stands.why}; the policy {settings.gate.policy} holds",
            "journalctl -u steward -p warning",
        )
    elif settings.gate.ask:
        yield ok(looked_at, f"it asks the gate at {settings.gate.ask}")
    else:
        yield ok(looked_at, f"it decides, and has {several(stands.holds, 'open hold')}")


def remote(ground: Ground) -> Iterator[Finding]:
    """Whether the myBRC server elsewhere can be told."""
    url = ground.settings.bank.remote.url
    if not ground.settings.bank.enabled or not url:
        yield skipped("[bank.remote] url", "no myBRC server elsewhere is told")
        return
    if not ground.is_root and ground.uid != ground.own_uid:
        yield skipped(url, "its token is for Steward's user alone: run this as root")
        return
    server = Remote(ground.settings)
    try:
        server.look()
    except (RemoteUnavailable, RemoteFailed, RemoteRejected) as error:
        yield wrong(
            url,
            f"{error}; charges and holds wait until it takes them",
            "steward config show, and [bank.remote] in it",
        )
    else:
        yield ok(url, "it answers")
        if ground.settings.bank.remote.balances:
            yield _balances(ground.settings, url)
    finally:
        server.close()


def _balances(settings: Settings, url: str) -> Finding:
    """How old the balances are that the server said."""
    at_us = GateLink(settings.state_dir, _GATE_S).state().remote_at_us
    age_s = time.time() - at_us / 1e6
    if at_us and age_s <= settings.bank.remote.balance_age_s:
        return ok(url, f"the oldest balance was asked for {age_s:.0f} s ago")
    what = f"a balance was last asked for {age_s:.0f} s ago" if at_us else "no balance is known"
    return wrong(
        url,
        f"{what}: for such accounts the policy {settings.gate.policy} holds",
        "journalctl -u steward -p warning",
    )


prices = each_cluster(_PRICES, _prices)
