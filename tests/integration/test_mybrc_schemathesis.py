"""myBRC API under random requests that its schema and the old plugins' allow, and others.

``STEWARD_EXAMPLES`` sets the number of examples of each operation. The seed is new in each run and
printed; ``STEWARD_SCHEMA_SEED`` repeats one.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from spool_daemon import new_schema_seed

from servers.mybrc import BY, balance, client_of, job, mybrc_settings, serving, token_of, with_money
from steward.bank.ledger import open_ledger
from steward.bank.records import Rate
from steward.core.config import Settings
from steward.extensions.mybrc.users import FailedLogins

pytestmark = pytest.mark.long

SWAGGER = Path(__file__).parent / "fixtures" / "mybrc-swagger.json"

TESTS = Path(__file__).parents[1]
HOOKS = TESTS / "servers" / "mybrc_hooks.py"

# Valid requests must be accepted, except missing pages and the file of CPU data that Steward
# documents to reject. For can_submit_job both schemas document 400 as an answer.
CONFIG = f"""hooks = "{HOOKS}"
[checks.positive_data_acceptance]
expected-statuses = ["2xx", "404"]
[[operations]]
include-path-regex = "/can_submit_job/"
checks.positive_data_acceptance.expected-statuses = ["2xx", "400"]
[[operations]]
include-path-regex = "/upload_cpu_data/"
checks.positive_data_acceptance.expected-statuses = ["403"]
"""

# The old schema describes only successes, has 201 for a token where its server returns 200, and
# requires basic authentication on every path.
UNTOLD = "status_code_conformance,missing_required_header,ignored_auth"

PATIENCE_S = 1200
STARTING_S = 300

EXAMPLES = os.environ.get("STEWARD_EXAMPLES", "25")


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    made = mybrc_settings(tmp_path)
    with_money(made, "physics", "0")
    ledger = open_ledger(made)
    with ledger.transaction() as t:
        t.rates.add(Rate(cluster="c", partition="long", weights={"cpu": 750_000}), BY)
        t.accounts.set_user("physics", "ada", BY, limit=None)
    ledger.close()
    return made


@pytest.fixture
def url(site: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    # Wrong tokens are tried again and again; how they are made to wait is tested elsewhere.
    monkeypatch.setattr(FailedLogins, "check", lambda _self, _address: None)
    with serving(site) as where:
        yield where


def ask(tmp_path: Path, url: str, schema: str, *options: str) -> None:
    """Run schemathesis against a server, and fail with its findings."""
    with client_of(url, token_of(url)) as client:
        assert client.put("/jobs/1/", json=job("1")).status_code == 200
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    asked = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(config)),
            *("run", schema, "--header", f"Authorization: Token {token_of(url)}"),
            *("--max-examples", EXAMPLES, "--seed", new_schema_seed()),
            *("--request-timeout", "30", "--no-color"),
            *("--continue-on-failure", "--generation-database", "none", *options),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
    assert "passed" in asked.stdout


@pytest.mark.timeout(PATIENCE_S + STARTING_S)
@pytest.mark.parametrize("prefix", ["api", "mybrc-rest"])
def test_by_its_own_schema(tmp_path: Path, site: Settings, url: str, prefix: str) -> None:
    ask(tmp_path, url, f"{url}/schema/openapi.json", "--include-path-regex", f"^/{prefix}/")
    balance(site)


@pytest.mark.timeout(PATIENCE_S + STARTING_S)
@pytest.mark.parametrize("prefix", ["api", "mybrc-rest"])
def test_by_the_old_schema(tmp_path: Path, site: Settings, url: str, prefix: str) -> None:
    ask(tmp_path, url, str(SWAGGER), "--url", f"{url}/{prefix}", "--exclude-checks", UNTOLD)
    balance(site)
