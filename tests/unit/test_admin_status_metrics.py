"""Prometheus metrics of the bank, from a real gate and ledger."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from harness.commands import run
from harness.events import script_event
from harness.gate import job, running, settings_of
from harness.site import ROOT
from steward.admin.status.metrics import MetricFamilies
from steward.admin.status.requests import MetricsRequest
from steward.bank.actions.status import BankStatusRequest
from steward.bank.ledger import Account, Authorship, open_ledger
from steward.bank.money import MICRO
from steward.core.access import Caller
from steward.core.config import Settings
from steward.core.config.reader import load_settings
from steward.core.events import utc_now
from steward.core.journal import Journal
from steward.core.journal.store import encode_rows
from steward.core.poll_status import PollStatus, PollStatusFiles
from steward.daemon.contexts import make_registry

BY = Authorship(who="root")


class Counted:
    """Wrapper that records the name of each method that is called."""

    def __init__(self, call: Callable[[str, Caller, Any], Any]) -> None:
        self._call = call
        self.names: list[str] = []

    def __call__(self, name: str, asker: Caller, request: Any) -> Any:
        self.names.append(name)
        return self._call(name, asker, request)


def scraped(settings: Settings) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    rooms = make_registry(settings)
    asked = Counted(rooms.call)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "call", asked)
        text = rooms.call("status.metrics", ROOT, MetricsRequest()).text
    assert len(asked.names) == len(set(asked.names)), "a room is asked once for each scrape"
    assert "bank.status" in asked.names
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def banked(directory: Path) -> Settings:
    settings = settings_of(directory)
    return msgspec.structs.replace(
        settings, bank=msgspec.structs.replace(settings.bank, enabled=True)
    )


def test_each_accounts_money_is_told_in_units(tmp_path: Path) -> None:
    settings = banked(tmp_path)
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        t.accounts.create(Account(name="chem", credit_limit=5 * MICRO), BY)
        t.accounts.create(Account(name="below", parent="chem", parent_pays=True), BY)
        t.accounts.create(Account(name="idle"), BY)
        t.transfers.deposit("chem", 100 * MICRO, BY)
    with ledger.reading() as t:
        books = t.export_books()
    ledger.close()
    with running(settings) as gate:
        gate.tell(*books.accounts, seq=books.seq)
        assert gate.ask(job(49))["ok"]
        assert not gate.ask(job(99))["ok"]
        found = scraped(settings)
    chem, idle = (("account", "chem"),), (("account", "idle"),)
    assert found["steward_account_balance_su", chem] == 100
    assert found["steward_account_credit_limit_su", chem] == 5
    assert found["steward_account_holds_su", chem] == 50
    assert found["steward_account_hold_count", chem] == 1
    assert found["steward_account_holds_su", idle] == 0
    assert ("steward_account_balance_su", (("account", "below"),)) not in found, "it has no money"
    assert found["steward_gate_deciding", ()] == 1
    assert found["steward_gate_holds", ()] == 1
    assert found["steward_gate_requests_total", (("answer", "admitted"),)] == 1
    assert found["steward_gate_requests_total", (("answer", "rejected"),)] == 1
    assert found["steward_gate_by_policy_total", ()] == 0
    assert found["steward_gate_answer_seconds_count", ()] == 2
    assert 0 < found["steward_gate_answer_seconds_sum", ()] < 2 * 30
    assert ("steward_unknown", (("figures", "bank"),)) not in found


def test_what_the_gate_does_not_say_is_left_out(tmp_path: Path) -> None:
    settings = banked(tmp_path)
    ledger = open_ledger(settings)
    with ledger.transaction() as t:
        t.accounts.create(Account(name="chem"), BY)
    ledger.close()
    found = scraped(settings)
    assert found["steward_account_balance_su", (("account", "chem"),)] == 0
    assert not [
        name for name, _ in found if name in {"steward_gate_holds", "steward_account_holds_su"}
    ]
    assert found["steward_gate_deciding", ()] == 0
    # Nothing runs here: each missing metric is named, and hides no others.
    assert found["steward_unknown", (("figures", "journal"),)] == 1
    answer = make_registry(settings).call("bank.status", ROOT, BankStatusRequest())
    assert (answer.gate, answer.hold_count) == ("away", None)


def test_no_label_ends_its_line() -> None:
    names = ('a"b', "a\nb 1", "a\\", "\udcff", "Ünï", 'x"} 7\nsteward_up 1')
    families = MetricFamilies()
    families.add_gauge("steward_test", "Words.", ("name",), [((name,), 1) for name in names])
    made = CollectorRegistry()
    made.register(families)
    text = generate_latest(made).decode()
    (family,) = text_string_to_metric_families(text)
    assert family.name == "steward_test"
    shown = [sample.labels["name"] for sample in family.samples]
    assert shown == [*names[:3], "\\udcff", *names[4:]]
    assert "\nsteward_up" not in text


@pytest.fixture
def polled_site(tmp_path: Path) -> Path:
    """Return the configuration of a site whose cluster was polled a moment ago."""
    (tmp_path / "state").mkdir()
    config = tmp_path / "steward.toml"
    config.write_text(
        f'state_dir = "{tmp_path}/state"\nrun_dir = "{tmp_path}"\n'
        f'[cluster.c]\nslurm = false\nspool = "{tmp_path}/spool"\n[bank]\nenabled = true\n'
        f'[archive.sink.a]\nkind = "files"\npath = "{tmp_path}/a"\n'
        "[gate]\nplugin_users = []\n"
    )
    now = utc_now()
    poll = PollStatus(
        at=now - timedelta(seconds=30),
        current_at=now,
        up=True,
        version="22.05.8",
        cost_s=11.0,
        interval_s=220.0,
    )
    PollStatusFiles(f"{tmp_path}/state").put("c", poll)
    return config


def test_an_interval_between_polls_of_over_a_minute_is_told(polled_site: Path) -> None:
    settings = load_settings(str(polled_site))
    with running(settings):
        found = scraped(settings)
        assert found["steward_snapshot_interval_seconds", (("cluster", "c"),)] == 220
        code, out, _ = run("status", "--config", str(polled_site), "-P")
    assert code == 0
    (row,) = [row for row in out.splitlines() if row.startswith("cluster c|up|")]
    assert "polled in 11.00 s, and only every 220 s because a poll takes long" in row


def test_what_is_told_of_consumers_and_sinks(polled_site: Path) -> None:
    settings = load_settings(str(polled_site))
    journal = Journal(settings.state_dir)
    journal.append(encode_rows([script_event(number) for number in (1, 2, 3)]))
    journal.record_position("jobs", 3, "running", "")
    journal.record_position("archive.a", 1, "waiting", "its disk is full")
    journal.add_dead_letter("archive.a", 1, "no such user")
    journal.close()
    found = scraped(settings)
    jobs, archive = (("consumer", "jobs"),), (("consumer", "archive.a"),)
    for figure, of_jobs, of_archive in (
        ("lag_events", 0, 2),
        ("dead_letters", 0, 1),
        ("missed_events", 0, 0),
    ):
        assert found[f"steward_consumer_{figure}", jobs] == of_jobs
        assert found[f"steward_consumer_{figure}", archive] == of_archive
    assert found["steward_consumer_lag_seconds", jobs] == 0
    assert found["steward_consumer_lag_seconds", archive] > 0
    for state in ("running", "waiting", "detached"):
        assert found["steward_consumer_state", (*jobs, ("state", state))] == (state == "running")
        assert found["steward_consumer_state", (*archive, ("state", state))] == (state == "waiting")
    sink = (("kind", "files"), ("sink", "a"))
    assert found["steward_sink_up", sink] == 0
    assert found["steward_sink_backlog_scripts", sink] == 2
    assert found["steward_sink_backlog_seconds", sink] > 0


def test_what_is_told_of_a_gate_a_cluster_and_disks(polled_site: Path) -> None:
    settings = load_settings(str(polled_site))
    with running(settings):
        found = scraped(settings)
    texts = [text for _, labels in found for _, text in labels]
    assert not [text for text in texts if str(polled_site.parent) in text], "no path is told"
    assert {name for name, _ in found} == {
        *("steward_info", "steward_up", "steward_unknown"),
        *("steward_slurm_info", "steward_slurm_up", "steward_missed_scripts_total"),
        *("steward_snapshot_interval_seconds", "steward_snapshot_seconds"),
        *("steward_snapshot_time_seconds", "steward_disk_free_bytes", "steward_disk_size_bytes"),
        *("steward_database_bytes", "steward_database_free_bytes"),
        *("steward_gate_deciding", "steward_gate_holds", "steward_gate_requests_total"),
        *("steward_gate_answer_seconds_count", "steward_gate_answer_seconds_sum"),
        *("steward_gate_slowest_seconds", "steward_gate_by_policy_total"),
        *("steward_bank_notice_dead_letters", "steward_reconcile_differences"),
    }
    assert found["steward_slurm_up", (("cluster", "c"),)] == 1
    age_s = utc_now().timestamp() - found["steward_snapshot_time_seconds", (("cluster", "c"),)]
    assert age_s < 25, "a check that showed no change counts as well as a poll"
    assert found["steward_slurm_info", (("cluster", "c"), ("version", "22.05.8"))] == 1
    assert found["steward_up", ()] == 0
