"""The demo's last words: what a newcomer can open and type next, and how all of it is ended."""

import os
import shutil
import socket
import sys
from collections.abc import Iterator

from steward.demo.bank import ACCOUNT
from steward.demo.site import Site
from steward.demo.stage import Stage
from steward.sandbox import default_directory
from steward.web.settings import WebSettings

Choice = tuple[str, str]
"""What for, and what to type or to open."""


def what_next(stage: Stage, site: Site, failed: int) -> None:
    """Say how to go on.

    Args:
        stage: Where it is said.
        site: What was shown.
        failed: How many checks failed: then that is all there is to say.
    """
    if failed:
        stage.act("Not everything was as it should be")
        stage.line(f"{failed} {'check' if failed == 1 else 'checks'} failed, see above.")
        return
    if site.keep:
        stage.act("What to open and type next", "All of it stays up.")
        choices = _of_kept(site)
    else:
        stage.act("What to type next")
        choices = _of_ended()
    for text, command in choices:
        if text:
            stage.line(text)
        stage.line(f"  {command}", style="bold")


def _of_ended() -> Iterator[Choice]:
    me = _me()
    yield (
        "The same, left up: to be clicked through in a browser, and to be gone on with:",
        ("make demo KEEP=1"),
    )
    yield (
        "Your own cluster, where nothing is changed (as root or SlurmUser, on its host):",
        (f"{me} archive watch --once --cluster NAME --archive DIR"),
    )
    yield "What else there is:", f"{me} --help"


def _of_kept(site: Site) -> Iterator[Choice]:
    me = _me()
    is_usual = site.sandbox.directory == default_directory()
    where = "" if is_usual else f" --dir {site.sandbox.directory}"
    inside = f"-- env STEWARD_SOCKET={site.socket}"
    yield from _of_pages(site, f"{me} sandbox run{where} --user {site.users[0]} {inside} steward")
    yield (
        "A shell as one of its users, to submit and look:",
        (f"{me} sandbox run{where} --user {site.users[-1]} {inside} bash"),
    )
    yield (
        "The operators' view, how Steward itself stands, and its log:",
        (f"{me} archive list --config {site.config}"),
    )
    yield "", f"{me} status --config {site.config}"
    yield "", f"less {site.log}"
    if not site.bank.trouble:
        yield (
            "What accounts have, and where it went:",
            (f"{me} bank balance --config {site.config}"),
        )
        yield "", f"{me} bank statement {ACCOUNT} --config {site.config}"
    yield "The end of it, with all that is in it:", f"{me} sandbox down{where}"


def _of_pages(site: Site, as_user: str) -> Iterator[Choice]:
    """Links that open the pages; nothing where there are none."""
    if site.pages.trouble:
        return
    first = site.users[0]
    minutes = round(WebSettings().login_s / 60)
    each = f"each link opens them once, within {minutes} minutes"
    yield f"The pages, in a browser on this host; {each}. As {first}:", site.link(first)
    yield "As an operator, to see the cluster and Steward itself as well:", site.link()
    port = site.pages.url.rpartition(":")[2]
    yield (
        "From a browser elsewhere, run this there first, and open the links then:",
        f"ssh -N -L {port}:127.0.0.1:{port} {socket.gethostname()}",
    )
    yield f"More such links, as {first} and as an operator:", f"{as_user} login"
    yield "", f"{_me()} login --config {site.config}"


def _me() -> str:
    """How to call this program from here."""
    found = shutil.which("steward")
    if found is not None and os.path.realpath(found) == os.path.realpath(sys.argv[0]):
        return "steward"
    return os.path.relpath(sys.argv[0]) if os.path.isfile(sys.argv[0]) else "steward"
