"""What is wrong with [web]."""

import ipaddress
import os
import pwd
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from steward.core.config import Settings
from steward.core.config.forwarding_checks import file_problems
from steward.core.config.problem import Problem
from steward.core.listening import host_and_port
from steward.web.settings import WebSettings

_HEADER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_OURS: Final = frozenset({"authorization", "cookie", "host", "x-csrf-token", "idempotency-key"})
"""Headers that say something already, and that any client may send."""
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")
_LONGEST_SESSION_S: Final = 30 * 86400.0
_LONGEST_PROXY_SESSION_S: Final = 3600.0
_LONGEST_LOGIN_S: Final = 3600.0
_LONGEST_TOKEN_DAYS: Final = 3660


def web_problems(settings: Settings) -> Iterator[Problem]:
    """All that is wrong with the settings of the pages."""
    web = settings.web
    if web.listen and host_and_port(web.listen) is None:
        yield _problem("listen", f"must be an address and a port, '127.0.0.1:8290': {web.listen!r}")
    yield from _user(settings)
    yield from _url(web)
    yield from file_problems("web", web)
    yield from _proxy(web)
    yield from _addresses(web)
    yield from _networks(web)
    yield from _bounds(web)


def _problem(field: str, what: str) -> Problem:
    return Problem(("web", field), f"'web.{field}' {what}")


def _user(settings: Settings) -> Iterator[Problem]:
    user = settings.web.user
    if not user:
        yield _problem("user", "is empty: name the user that 'steward web' runs as")
        return
    try:
        uid = pwd.getpwnam(user).pw_uid
    except KeyError:
        return  # made by the package, or not yet: the doctor says so
    try:
        daemons = os.stat(settings.state_dir).st_uid
    except OSError:
        daemons = 0
    if uid in (0, daemons):
        whose = "root" if uid == 0 else "the daemon's own user"
        yield _problem(
            "user", f"is {whose}: pages are served by a user of their own, who has no rights"
        )


def _url(web: WebSettings) -> Iterator[Problem]:
    if not web.url:
        return
    try:
        found = urlsplit(web.url)
        is_good = found.scheme in ("http", "https") and bool(found.hostname)
        is_good = is_good and not (found.query or found.fragment or found.username)
        is_good = is_good and (found.port is None or found.port > 0)
    except ValueError:
        is_good = False
    if not is_good:
        yield _problem(
            "url", f"must be what browsers type, 'https://HOST/steward', not {web.url!r}"
        )
    elif not _PREFIX.fullmatch(found.path):
        yield _problem("url", f"has a path of other than plain letters: {found.path!r}")


def _proxy(web: WebSettings) -> Iterator[Problem]:
    header = web.proxy_header
    if not header:
        return
    if not _HEADER.fullmatch(header):
        yield _problem("proxy_header", f"is no header's name: {header!r}")
    elif header.lower() in _OURS:
        yield _problem("proxy_header", f"cannot be {header!r}, which any client sends")
    if not web.trusted_proxies:
        yield _problem("proxy_header", "is believed from no address: set 'trusted_proxies', too")


def _addresses(web: WebSettings) -> Iterator[Problem]:
    for field, addresses in (
        ("trusted_proxies", web.trusted_proxies),
        ("metrics_from", web.metrics_from),
    ):
        for address in addresses:
            try:
                ipaddress.ip_address(address)
            except ValueError:
                yield _problem(field, f"holds {address!r}, which is no address")


def _networks(web: WebSettings) -> Iterator[Problem]:
    for network in web.shared_from:
        try:
            ipaddress.ip_network(network, strict=False)
        except ValueError:
            yield _problem("shared_from", f"holds {network!r}, which is no network: '10.1.2.0/24'")
    for network in web.munge_from:
        try:
            found = ipaddress.ip_network(network, strict=False)
        except ValueError:
            yield _problem("munge_from", f"holds {network!r}, which is no network: '10.1.2.0/24'")
            continue
        if found.version != 4:
            what = f"holds {network!r}: MUNGE names the IPv4 address of a host, and no other"
            yield _problem("munge_from", what)


def _bounds(web: WebSettings) -> Iterator[Problem]:
    for field, value, most in (
        ("session_s", web.session_s, _LONGEST_SESSION_S),
        ("proxy_session_s", web.proxy_session_s, _LONGEST_PROXY_SESSION_S),
        ("login_s", web.login_s, _LONGEST_LOGIN_S),
        ("token_days", web.token_days, _LONGEST_TOKEN_DAYS),
        ("munge_token_days", web.munge_token_days, _LONGEST_TOKEN_DAYS),
    ):
        if not 0 < value <= most:
            yield _problem(field, f"must be above 0 and at most {most:g}, not {value:g}")
    if web.requests_per_minute < 1:
        yield _problem("requests_per_minute", "must be 1 or more: nobody could ask")
