"""Checks of the bank: prices, the ledger's proof, and the gate."""

import os
from collections.abc import Iterator
from typing import Final

from steward.bank.errors import NoRate
from steward.bank.gate.link import GateLink
from steward.bank.prices import rate_for
from steward.doctor.findings import Finding, ok, several, skipped, warning, wrong
from steward.doctor.ground import Asked, Ground, each_cluster
from steward.events import utc_now
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


prices = each_cluster(_PRICES, _prices)
