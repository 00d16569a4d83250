"""Runs the pages' process: asks the daemon how, then serves until it is told to stop."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Callable

from steward.admin.credentials.shapes import SettingsAnswer, SettingsRequest
from steward.core.processes import refuse_core_dumps
from steward.core.serving import Served, listen, serve
from steward.core.waiting import Backoff, Stop
from steward.web.application import application
from steward.web.desk import DaemonAway, Desk
from steward.web.errors import WebError
from steward.web.settings import WebSettings

log = logging.getLogger(__name__)


def run(socket: str, *, change: Callable[[WebSettings], WebSettings] = lambda web: web) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        socket: The daemon's.
        change: What the command line says in place of [web].

    Raises:
        WebError: [web] says that there are no pages.
        StewardError: The daemon does not let this user serve, or the address is taken.
    """
    refuse_core_dumps()
    stop = Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    web = _settings(socket, stop)
    if web is None:
        return
    web = change(web)
    if not web.listen:
        raise WebError("there are no pages: set 'listen' in [web], and reload the daemon")
    if os.geteuid() == 0:
        log.warning("the pages run as root: have them run as %s, [web] user", web.user)
    served = Served(
        name="the pages' server",
        section="[web]",
        listen=web.listen,
        certificate_file=web.certificate_file,
        key_file=web.key_file,
        shared=(*web.trusted_proxies, *web.shared_from),
    )
    pages = application(web, Desk(socket))
    # What was imported stays: else it is gone through again whenever a page has made thousands
    # of objects, which takes as long as the page.
    gc.collect()
    gc.freeze()
    serve(served, pages, listen(served), stop, lambda: None)


def _settings(socket: str, stop: Stop) -> WebSettings | None:
    """What the daemon says of [web], as soon as it answers; None where we are told to stop."""
    backoff = Backoff(0.2, 5.0)
    said = False
    while not stop.is_set():
        try:
            answer: SettingsAnswer = asyncio.run(
                Desk(socket).ask("credentials.settings", SettingsRequest())
            )
        except DaemonAway as error:
            if not said:
                log.warning("waiting for the daemon: %s", error)
                said = True
            stop.wait(backoff.next_s())
        else:
            return answer.web
    return None
