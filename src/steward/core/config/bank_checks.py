"""What is wrong with [bank], [gate] and [mybrc]."""

import os
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from steward.core.config import Settings
from steward.core.config.forwarding_checks import file_problems
from steward.core.config.problem import Problem
from steward.core.listening import host_and_port

_MOST_DECIMALS: Final = 6
_DATABASES: Final = ("sqlite", "postgresql", "postgresql+psycopg")
_LEAST_BALANCE_AGE_S: Final = 60
_LONGEST_TIMEOUT_MS: Final = 1000
"""slurmctld holds locks while the plugin waits."""


def bank_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with the bank's settings."""
    yield from _bank(settings)
    yield from _database(settings)
    yield from _gate(settings)
    yield from _mybrc(settings)
    yield from _notices(settings)
    for name in ("gate", "mybrc"):
        yield from file_problems(name, getattr(settings, name))


def _bank(settings: Settings) -> Iterator[Problem]:
    bank = settings.bank
    if bank.decimals > _MOST_DECIMALS:
        yield Problem(("bank", "decimals"), f"'bank.decimals' is above {_MOST_DECIMALS}")
    for name in ("hold_share", "unseen_share"):
        if not 0 < getattr(bank, name) <= 1:
            yield Problem(("bank", name), f"'bank.{name}' must be above 0, and 1 at the most")
    for percent in bank.warn_percent:
        if percent < 1:
            yield Problem(
                ("bank", "warn_percent"), f"'bank.warn_percent': {percent} is no share in percent"
            )
    for name in ("reconcile_s", "without_ledger_s", "default_time_s"):
        if not getattr(bank, name):
            yield Problem(("bank", name), f"'bank.{name}' must be above 0")
    if not bank.unit.strip():
        yield Problem(("bank", "unit"), "'bank.unit' is empty: say what one unit is called")
    if bank.enabled and not settings.cluster:
        yield Problem(("bank", "enabled"), "a bank needs jobs: add a table [cluster.NAME]")
    for name, refusal in bank.refusal.items():
        if not refusal.qos and not refusal.partition:
            yield Problem(
                ("bank", "refusal", name),
                f"[bank.refusal.{name}] says nothing: set 'qos' or 'partition', or take it out",
            )


def _database(settings: Settings) -> Iterator[Problem]:
    bank = settings.bank
    key = ("bank", "database")
    if bank.database:
        url = urlsplit(bank.database)
        if url.scheme not in _DATABASES:
            # The text is not shown: a password may stand in it.
            yield Problem(
                key,
                "'bank.database' must begin with 'postgresql+psycopg://' or 'sqlite:///'",
            )
        elif url.password:
            yield Problem(
                key, "'bank.database' holds a password: put it into a file, 'password_file'"
            )
    elif bank.password_file:
        yield Problem(
            ("bank", "password_file"), "'bank.password_file' is for a database: set 'database'"
        )
    if bank.remote.balances and not bank.remote.url:
        yield Problem(
            ("bank", "remote", "balances"),
            "'bank.remote.balances' are a myBRC server's: set 'url'",
        )
    if bank.remote.balance_age_s < _LEAST_BALANCE_AGE_S:
        yield Problem(
            ("bank", "remote", "balance_age_s"),
            f"'bank.remote.balance_age_s' must be {_LEAST_BALANCE_AGE_S} or more",
        )
    for field in (bank.password_file, bank.remote.token_file, bank.remote.ca_file):
        if field and not os.path.isabs(field):
            yield Problem(("bank",), f"{field!r} in [bank] must be an absolute path")


def _gate(settings: Settings) -> Iterator[Problem]:
    gate = settings.gate
    for name in ("socket", "off_switch", "plugin_conf"):
        path = getattr(gate, name)
        if not os.path.isabs(path):
            yield Problem(("gate", name), f"'gate.{name}' must be an absolute path, not {path!r}")
        elif any(character.isspace() for character in path):
            # The plugin reads its lines as words.
            yield Problem(("gate", name), f"'gate.{name}' holds a blank: choose another path")
    if not 1 <= gate.timeout_ms <= _LONGEST_TIMEOUT_MS:
        yield Problem(
            ("gate", "timeout_ms"), f"'gate.timeout_ms' must be 1 to {_LONGEST_TIMEOUT_MS}"
        )
    for name in ("listen", "ask"):
        address = getattr(gate, name)
        if address and host_and_port(address) is None:
            yield Problem(
                ("gate", name),
                f"'gate.{name}' must be a host and a port, 'bank.example.org:6826', "
                f"not {address!r}",
            )
        if address and not (gate.certificate_file and gate.ca_file):
            yield Problem(
                ("gate", name),
                f"'gate.{name}' is encrypted: set 'certificate_file', 'key_file' and 'ca_file'",
            )
    if gate.listen and gate.ask:
        yield Problem(
            ("gate", "ask"), "'gate.ask' is for a gate that does not decide: take 'listen' out"
        )


def _mybrc(settings: Settings) -> Iterator[Problem]:
    mybrc = settings.mybrc
    if mybrc.listen and host_and_port(mybrc.listen) is None:
        yield Problem(
            ("mybrc", "listen"),
            f"'mybrc.listen' must be an address and a port, '127.0.0.1:8000', not {mybrc.listen!r}",
        )
    if mybrc.listen and not settings.bank.enabled:
        yield Problem(("mybrc", "listen"), "[mybrc] is part of the bank: set [bank] enabled = true")
    if mybrc.cluster and mybrc.cluster not in settings.cluster:
        yield Problem(("mybrc", "cluster"), f"there is no cluster {mybrc.cluster!r}")


def _notices(settings: Settings) -> Iterator[Problem]:
    for key, address in (
        (("bank", "notify", "webhook"), settings.bank.notify.webhook),
        (("bank", "remote", "url"), settings.bank.remote.url),
    ):
        if not address:
            continue
        url = urlsplit(address)
        if url.scheme not in ("http", "https") or not url.hostname:
            yield Problem(key, f"{'.'.join(key)!r} must be a URL: 'https://host/path'")
        elif key == ("bank", "remote", "url") and not url.path.strip("/"):
            yield Problem(
                key, f"{'.'.join(key)!r} has no path: the API is at '/mybrc-rest' or '/api'"
            )
