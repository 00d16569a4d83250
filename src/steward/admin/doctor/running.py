"""Checks of what runs: the daemon, each of its parts, and the pages."""

import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

import steward
from steward.admin.doctor.findings import Finding, ok, several, skipped, warning, wrong
from steward.admin.doctor.ground import Ground
from steward.admin.status import parts as leaving
from steward.bank.gate.link import connect
from steward.core.errors import Refused
from steward.core.events import utc_now
from steward.core.munge.munged import Munge, MungeUnavailable
from steward.web.settings import HEALTH, HEALTHY

_MUNGE: Final = "/run/munge"
_VENDOR: Final = "web/static/vendor"
_CONNECT_S: Final = 5.0
_WEB_S: Final = 10.0
_OFTEN: Final = 3
_LATELY: Final = timedelta(minutes=10)


def daemon(ground: Ground) -> Iterator[Finding]:
    """Whether the daemon listens."""
    path = ground.settings.socket
    mend = ("systemctl start steward", "journalctl -u steward -p warning")
    if ground.settings.forward.to or not path:
        yield skipped(path or "socket", "a controller answers no commands: see the check parts")
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            connect(connection, path)
        except OSError as error:
            yield wrong(path, f"the daemon does not answer: {error.strerror or error}", *mend)
            return
    mode = os.stat(os.path.dirname(path)).st_mode
    if not mode & 0o001:
        directory = os.path.dirname(path)
        yield wrong(path, "users cannot reach it to ask the daemon", f"chmod o+x {directory}")
    else:
        yield ok(path, "the daemon listens there")


def parts(ground: Ground) -> Iterator[Finding]:
    """Whether each part of the daemon runs, and has not been restarted again and again."""
    looked_at = f"{ground.settings.state_dir}/daemon.json"
    mend = ("journalctl -u steward -p warning", "systemctl restart steward")
    standing = leaving.read(ground.settings.state_dir)
    if standing is None:
        yield wrong(looked_at, "no daemon runs", "systemctl start steward")
        return
    if not standing.is_known:
        what = "a daemon runs, and has not written down how its parts stand"
        yield warning(looked_at, what, f"df {ground.settings.state_dir}")
        return
    strange = False
    for part in standing.parts:
        if not part.pid:
            strange = True
            yield wrong(looked_at, f"it does not run: {part.error}", *mend, of=part.name)
        elif part.error_at is not None and part.error_at > utc_now() - _LATELY:
            strange = True
            often = part.restarts >= _OFTEN
            tell = wrong if often else warning
            yield tell(
                looked_at,
                f"it was restarted, {several(part.restarts, 'time')} in all: {part.error}",
                *mend,
                of=part.name,
            )
    if not strange:
        yield ok(looked_at, f"{several(len(standing.parts), 'part')} running")


def web(ground: Ground) -> Iterator[Finding]:
    """Whether the pages are served, with all that they are made of."""
    of = ground.settings.web
    if not of.listen:
        yield skipped("[web] listen", "there are no pages here")
        return
    import http.client
    import ssl

    vendor = os.path.join(os.path.dirname(steward.__file__), _VENDOR)
    if not os.path.isdir(vendor):
        yield wrong(
            vendor,
            "styles and plots are missing, which packages bring",
            "in a clone: make setup-web",
            of="static",
        )
    if not of.url:
        what = f"'steward login' prints links to {of.listen}, which browsers elsewhere cannot open"
        yield warning("[web] url", what, 'url = "https://steward.example.org"', of="url")
    host, _, port = of.listen.rpartition(":")
    host = host.strip("[]")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104 -- nothing is bound
    mend = ("systemctl start steward-web", "journalctl -u steward-web -p warning")
    connection = http.client.HTTPConnection(host, int(port), timeout=_WEB_S)
    if of.certificate_file:
        context = ssl.create_default_context()
        # Whom the certificate names is the browsers' matter: here it is our own host.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        connection = http.client.HTTPSConnection(host, int(port), timeout=_WEB_S, context=context)
    try:
        connection.request("GET", f"{of.path}{HEALTH}")
        reply = connection.getresponse()
        status, words = reply.status, reply.read(len(HEALTHY) + 1)
    except (OSError, http.client.HTTPException) as error:
        yield wrong(of.listen, f"the pages do not answer: {error}", *mend)
        return
    finally:
        connection.close()
    if status >= 500:
        yield wrong(of.listen, f"the pages answer with {status}", *mend)
    elif (status, words) != (200, HEALTHY):
        what = f"another program answers there, not 'steward web' (status {status} at {HEALTH})"
        yield wrong(
            of.listen, what, "journalctl -u steward-web -p warning", "[web] listen: a free port"
        )
    else:
        yield ok(of.listen, "the pages answer")


def munge(ground: Ground) -> Iterator[Finding]:
    """Whether commands on other hosts can be known without a token."""
    of = ground.settings.web
    looked_at = of.munge_socket or _MUNGE
    if not of.listen or not of.munge:
        yield skipped("[web] munge", "nobody is known by it here")
        return
    if not of.munge_socket and not os.path.exists(_MUNGE):
        yield skipped(_MUNGE, "there is no MUNGE: commands on other hosts bring tokens")
        return
    munged = Munge(of.munge_socket)
    try:
        munged.decode(munged.encode(b"steward doctor"))
    except (MungeUnavailable, Refused) as error:
        yield warning(
            looked_at,
            f"commands on other hosts are known by tokens alone: {error}",
            "systemctl restart munge",
            "or set munge_socket in [web], or munge = false",
        )
        return
    yield ok(looked_at, "munged makes credentials, and opens them")
