"""API under random requests that its description allows, and others, by users and operators.

``STEWARD_EXAMPLES`` sets the number of examples of each operation. The seed is new in each run and
printed; ``STEWARD_SCHEMA_SEED`` repeats one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_client import token
from job_submission import submit_to, wait_until
from spool_daemon import new_schema_seed
from web_site import ADMINISTRATOR, OPERATOR, USERS, WebSite

from steward.bank.settings import BankSettings
from steward.capture.settings import SensorSettings
from steward.sandbox import Sandbox, SandboxSpec

pytestmark = pytest.mark.long

# A valid request is accepted, or rejected because there is no such object (404), it is another
# user's (403), or for a reason that a schema cannot express (422).
HOOKS = Path(__file__).parents[1] / "servers" / "api_hooks.py"
CONFIG = f"""\
hooks = "{HOOKS}"
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "304", "403", "404", "409", "422"]
"""

# A stream of events does not end.
ENDLESS = "/events/stream"

# Looks into all of a cluster, for seconds: asked less often than the others.
SLOW = "doctor"
ONCE = "1"

PATIENCE_S = 1800
STARTING_S = 900
EXAMPLES = os.environ.get("STEWARD_EXAMPLES", "25")
ALL = ("read", "scripts", "bank", "actions", "admin")


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[WebSite]:
    spec = SandboxSpec(slurm=slurm_version, user_names=USERS)
    settings: dict[str, Any] = {
        "bank": BankSettings(enabled=True),
        "sensor": SensorSettings(enabled=True),
    }
    with (
        Sandbox.up(spec, report=print) as cluster,
        WebSite(cluster, Path(cluster.directory) / "steward", settings=settings) as site,
    ):
        job = submit_to(cluster, "#!/bin/sh\necho one\n", user="ada")
        site.daemon.wait_for_script(job)
        wait_until(lambda: bool(site.daemon.ask_json("archive", "list")["jobs"]))
        yield site


@pytest.mark.timeout(PATIENCE_S + STARTING_S)
@pytest.mark.parametrize(
    ("user", "paths"),
    [("ada", "^/(?!ask)"), (OPERATOR, "^/(?!ask)"), (ADMINISTRATOR, "^/ask")],
)
def test_all_that_it_describes(tmp_path: Path, site: WebSite, user: str, paths: str) -> None:
    ask(
        tmp_path,
        site,
        user,
        *("--include-path-regex", paths),
        *("--exclude-path", ENDLESS, "--exclude-path-regex", SLOW),
        *("--max-examples", EXAMPLES),
    )


@pytest.mark.timeout(PATIENCE_S + STARTING_S)
@pytest.mark.parametrize("user", ["ada", OPERATOR])
def test_the_doctor(tmp_path: Path, site: WebSite, user: str) -> None:
    ask(tmp_path, site, user, "--include-path-regex", SLOW, "--max-examples", ONCE)


def ask(tmp_path: Path, site: WebSite, user: str, *options: str) -> None:
    """Run schemathesis as a user, and fail with its findings."""
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    asked = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
            *("run", f"{site.url}/api/v1/openapi.json"),
            *("--header", f"Authorization: Bearer {token(site, user, *ALL)}"),
            *("--seed", new_schema_seed(), "--request-timeout", "60", "--no-color"),
            *("--continue-on-failure", "--generation-database", "none", *options),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr + _failed(site)
    assert "passed" in asked.stdout
    assert not _failed(site)
    print(*asked.stdout.splitlines()[-6:], sep="\n")


def _failed(site: WebSite) -> str:
    """Return unforeseen errors in the logs of the daemon and of ``steward web``."""
    logs = site.daemon.log() + site.log_path.read_text()
    lines = logs.splitlines()
    return "\n".join(
        "\n".join(lines[number : number + 40])
        for number, line in enumerate(lines)
        if "Traceback" in line
    )
