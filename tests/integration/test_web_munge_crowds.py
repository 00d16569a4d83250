"""Who comes by MUNGE keeps nobody out, and the pages' process vouches for nobody."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from munging import ME, credential, munge_site, origin
from webbing import WEB_USER, WebSite

from steward.munge.requests import digest, statement

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[WebSite]:
    with munge_site(slurm_version) as site:
        yield site


_VOUCH = """
import json, sys
from steward.client import Client
from steward.errors import StewardError
try:
    answer = Client(socket=sys.argv[1]).ask("credentials.vouch", **json.loads(sys.argv[2]))
except StewardError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"secret": answer.secret, "refused": answer.refused}))
"""


def vouched(site: WebSite, **asked: Any) -> dict[str, str]:
    """What the daemon says to the pages' process, whatever that has come to ask."""
    words = [sys.executable, "-c", _VOUCH, site.daemon.settings.socket, json.dumps(asked)]
    done: subprocess.CompletedProcess[str] = site.cluster.run(words, user=WEB_USER)
    said: dict[str, str] = json.loads(done.stdout)
    return said


def test_who_breaks_into_the_pages_is_whom_no_credential_for_them_names(site: WebSite) -> None:
    """What was made for another service is no ticket here, whatever the pages' process says."""
    asked = {"method": "POST", "target": ME, "digest": digest(b"{}"), "peer": "127.0.0.1"}
    made = statement("POST", ME, b"{}", origin(site))
    assert vouched(site, credential=credential(site, "ada", made), **asked)["secret"]
    elsewhere = statement("POST", ME, b"{}", "elsewhere.example.org")
    for text in (b"another service's own text", elsewhere):
        said = vouched(site, credential=credential(site, "ada", text), **asked)
        assert (said["secret"], "MUNGE credential was made" in said["refused"]) == ("", True)
        shown = credential(site, "ada", text)
        said = vouched(site, credential=shown, statement=text.decode())
        assert "statement" in said["error"], said
    target = f"{ME}\n{digest(b'{}')}\nelsewhere.example.org\n"
    said = vouched(
        site, credential=credential(site, "ada", elsewhere), **asked | {"target": target}
    )
    assert "no request of HTTP" in said["error"], said
