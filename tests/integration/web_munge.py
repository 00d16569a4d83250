"""Site whose web pages authenticate users by MUNGE, with its own munged."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from web_site import USERS, WebSite

from steward.sandbox import Sandbox, SandboxSpec

ME = "/api/v1/ask/credentials.me"


@contextlib.contextmanager
def munge_site(slurm_version: str, **web: Any) -> Iterator[WebSite]:
    """Bring up a site with a munged.

    Args:
        slurm_version: Version of Slurm in the sandbox.
        web: Settings of [web] that differ.
    """
    with Sandbox.up(SandboxSpec(slurm=slurm_version, user_names=USERS), report=print) as cluster:
        home, web = (
            Path(cluster.directory) / "steward",
            {
                "munge_socket": cluster.plan.munge_socket,
                **web,
            },
        )
        # The log shows started and aborted verifications.
        with WebSite(cluster, home, web=web, settings={"log_level": "debug"}) as site:
            yield site


def credential(site: WebSite, user: str, text: bytes) -> str:
    """Return a credential of the site's munged, created as a user."""
    words = ["munge", "--socket", site.cluster.plan.munge_socket]
    made: str = site.cluster.run(words, user=user, input=text.decode()).stdout
    return made.strip()


def origin(site: WebSite) -> str:
    """Return the origin that a credential for these pages names."""
    return site.url.partition("//")[2]


def post(
    site: WebSite, path: str, body: bytes, shown: str, *, address: str = "127.0.0.1"
) -> httpx.Response:
    """Send a request with a credential; return the reply.

    Args:
        site: Site of the pages.
        path: Path of the request.
        body: Body of the request.
        shown: The credential.
        address: Address that the connection comes from.
    """
    headers = {"Authorization": f"Munge {shown}", "Content-Type": "application/json"}
    way = httpx.HTTPTransport(local_address=address)
    with httpx.Client(transport=way, timeout=60) as client:
        return client.post(f"{site.url}{path}", content=body, headers=headers)
