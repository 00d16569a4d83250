import logging
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from harness.events import NOON
from harness.site import Site
from steward.bank import enforcement
from steward.bank.enforcement import UnpaidJobs, build_claim, is_hold_too_large
from steward.bank.gate.client import GateClient
from steward.bank.money import MICRO
from steward.bank.queue_holds import group_by_hold, needs_hold
from steward.bank.records import Hold, Quote
from steward.core.errors import PermissionRefused
from steward.core.principals import ENFORCEMENT
from steward.core.records import JobRecord
from steward.jobs import Job
from steward.slurm import SlurmDown
from steward.slurm.job_changes import JobChanges, format_job_target
from steward.slurm.settings import ClusterSettings

RECORD = JobRecord(
    job_id=7,
    uid=1000,
    account="physics",
    partition="debug",
    state="PENDING",
    submit=NOON,
    cpus=2,
    nodes=1,
    time_limit_s=3600,
)
QUOTE = Quote(
    amount=4 * MICRO,
    account="physics",
    partition="debug",
    time_s=3660,
    tres={"cpu": 2, "node": 1},
    tasks=4,
    per_task=MICRO,
)
HOLD = Hold(id="h", job_id=7, account="physics", amount=4 * MICRO, remaining=4 * MICRO, quote=QUOTE)


def record(**changes: object) -> JobRecord:
    return msgspec.structs.replace(RECORD, **changes)


def job(**changes: object) -> Job:
    shown = record(**changes)
    return Job(
        number=1,
        cluster="c1",
        job_id=shown.job_id,
        first_submit=shown.submit or NOON,
        verified=True,
        purged=False,
        ended=False,
        script_key="",
        record=shown,
    )


@pytest.mark.parametrize(
    ("changes", "is_needed"),
    [
        ({}, False),
        ({"account": "Physics"}, False),
        ({"account": "chemistry"}, True),
        ({"partition": "debug,other"}, False),
        ({"partition": "other"}, True),
        ({"time_limit_s": 7200}, True),
        ({"cpus": 3}, True),
        ({"nodes": 2}, True),
        ({"state": "RUNNING"}, True),
    ],
)
def test_a_hold_that_covers_less_than_the_job_is_looked_at(
    changes: dict[str, object], is_needed: bool
) -> None:
    assert needs_hold(record(**changes), HOLD, NOON) is is_needed


def test_a_job_that_waits_on_purpose_is_only_to_be_known_to_the_gate() -> None:
    assert needs_hold(RECORD, None, NOON)
    empty = msgspec.structs.replace(HOLD, amount=0, remaining=0)
    for waiting in (
        record(reason="JobHeldUser"),
        record(eligible=NOON + timedelta(hours=1), cpus=999),
    ):
        assert needs_hold(waiting, None, NOON)
        assert needs_hold(waiting, empty, NOON), "what it asks for may have changed"
        assert not needs_hold(waiting, HOLD, NOON)
    # Early enough for its hold to be placed.
    assert needs_hold(record(eligible=NOON + timedelta(minutes=2)), None, NOON)
    assert needs_hold(record(eligible=NOON + timedelta(hours=1), state="RUNNING"), None, NOON)
    assert needs_hold(RECORD, empty, NOON)


def test_tasks_that_are_gone_make_an_arrays_hold_too_large() -> None:
    waiting = job(array_job_id=7, array_task="2-4")
    running = job(job_id=8, array_job_id=7, array_task="1", state="RUNNING")
    assert not is_hold_too_large(HOLD, [waiting, running], "full")
    assert is_hold_too_large(HOLD, [waiting], "full")
    assert not is_hold_too_large(HOLD, [job(array_job_id=7, array_task="2,...")], "full")
    assert not is_hold_too_large(HOLD, [waiting], "running")


def test_a_claim_is_of_all_tasks_that_are_left() -> None:
    waiting = job(array_job_id=7, array_task="5-9%2")
    running = job(job_id=8, array_job_id=7, array_task="3", state="RUNNING", start=NOON)
    claim = build_claim(("c1", 7), [waiting, running])
    assert claim is not None
    assert (claim.description.array, claim.started) == ("3,5-9%2", True)
    assert build_claim(("c1", 7), [job(uid=None)]) is None


def test_no_task_is_counted_twice() -> None:
    # Slurm shows the pending row again only when it changes.
    waiting = job(array_job_id=7, array_task="0-3,8-12:2%2")
    tasks = [
        job(job_id=8 + task, array_job_id=7, array_task=str(task), state="RUNNING", start=NOON)
        for task in (0, 1, 10)
    ]
    claim = build_claim(("c1", 7), [waiting, *tasks])
    assert claim is not None
    assert claim.description.array == "0,1,10,2-3,8,12%2"
    whole = msgspec.structs.replace(HOLD, remaining=8 * MICRO)
    assert is_hold_too_large(whole, [waiting, *tasks], "full")
    assert not is_hold_too_large(
        msgspec.structs.replace(HOLD, remaining=7 * MICRO), [waiting, *tasks], "full"
    )


def test_a_job_that_we_hold_is_asked_for_as_if_it_were_not_held() -> None:
    held = job(reason="JobHeldAdmin")
    of_others, ours = build_claim(("c1", 7), [held]), build_claim(("c1", 7), [held], is_ours=True)
    assert of_others is not None
    assert ours is not None
    assert (of_others.description.held, ours.description.held) == (True, False)


def test_what_a_resized_job_has_used_is_not_held_for_again() -> None:
    resized = job(
        state="RUNNING",
        start=NOON,
        resized_at=NOON + timedelta(minutes=20),
        tres_allocated="cpu=2,node=1",
    )
    claim = build_claim(("c1", 7), [resized])
    assert claim is not None
    assert claim.description.time_limit_min == 40


def test_of_an_id_that_was_used_again_the_newest_job_counts() -> None:
    old, new = job(submit=NOON - timedelta(days=1)), job()
    assert group_by_hold([new, old]) == {7: [new]}


def test_an_arrays_task_is_named_by_its_index() -> None:
    assert format_job_target(record(array_job_id=5, array_task="3")) == "5_3"
    assert format_job_target(record(array_job_id=7, array_task="3-9")) == "7"
    assert format_job_target(RECORD) == "7"


@pytest.mark.parametrize(
    ("changes", "is_needed"),
    [
        ({"tres_requested": "cpu=2,mem=4G,node=1,gres/gpu=2,gres/gpu:v100=2"}, False),
        ({"tres_requested": "cpu=2,mem=5G,node=1"}, True),
        ({"tres_requested": "cpu=2,mem=1G,node=1,gres/gpu=3"}, True),
        ({"tres_requested": "cpu=2,node=1,gres/shard=1"}, True),
        ({"tres_per_node": "gres/gpu:2"}, False),
        ({"tres_per_node": "gres/gpu:a100:1,gres/gpu:v100:1"}, True),
        ({"tres_per_node": "gres/gpu:3"}, True),
        ({"licenses": "matlab:2"}, False),
        ({"licenses": "matlab:3"}, True),
        ({"licenses": "other"}, True),
        ({"tres_requested": "cpu=2,mem=4G,node=1,bb/lua=2G"}, False),
        ({"tres_requested": "cpu=2,mem=4G,node=1,bb/lua=3G"}, True),
        ({"tres_requested": "cpu=2,mem=4G,node=1,bb/datawarp=1M"}, True),
        ({"qos": "normal"}, False),
        ({"qos": "normal,high"}, False),
        ({"qos": "high"}, True),
    ],
)
def test_more_memory_gres_licenses_or_another_qos_is_looked_at(
    changes: dict[str, object], is_needed: bool
) -> None:
    more = {"mem": 4096, "gres/gpu": 2, "gres/gpu:a100": 2, "license/matlab": 2, "bb/lua": 2048}
    quote = msgspec.structs.replace(QUOTE, tres=QUOTE.tres | more, qos="normal")
    hold = msgspec.structs.replace(HOLD, quote=quote)
    assert needs_hold(record(**changes), hold, NOON) is is_needed


class RecordedChanges(JobChanges):
    """Records changes of jobs, and sends none."""

    def __init__(self) -> None:
        super().__init__("c1", ClusterSettings())
        self.sent: list[tuple[str, str]] = []

    def hold(self, job: str, reason: str = "", *, by_user: bool = False) -> bool:
        del reason, by_user
        self.sent.append(("hold", job))
        return True

    def release(self, job: str, *, clear_reason: bool = True) -> bool:
        del clear_reason
        self.sent.append(("release", job))
        return True


def test_enforcement_acts_as_its_principal_and_is_refused_what_that_may_not_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    site, changes = Site(tmp_path), RecordedChanges()
    gate = GateClient(site.settings.state_dir)
    unpaid = UnpaidJobs(site.settings, site.ledger, gate, {"c1": changes})
    unpaid.hold_stranded(
        [msgspec.structs.replace(HOLD, cluster="c1")], {("c1", 7): [job(state="PENDING")]}
    )
    assert changes.sent == [("hold", "7")]
    assert "cluster c1: service principal 'enforcement' runs slurm.job.hold on job 7" in caplog.text
    withheld = msgspec.structs.replace(ENFORCEMENT, permissions=frozenset({"slurm.job.hold"}))
    monkeypatch.setattr(enforcement, "ENFORCEMENT", withheld)
    with pytest.raises(PermissionRefused, match=r"'enforcement'.* may not run slurm\.job\.release"):
        unpaid.hold_stranded([], {})
    assert changes.sent == [("hold", "7")]


def test_a_job_that_waits_for_slurmctld_to_be_released_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    site, changes = Site(tmp_path), RecordedChanges()
    gate = GateClient(site.settings.state_dir)
    unpaid = UnpaidJobs(site.settings, site.ledger, gate, {"c1": changes})
    stranded = [msgspec.structs.replace(HOLD, cluster="c1")]
    waiting = {("c1", 7): [job(state="PENDING")]}

    def fail(*_: object) -> bool:
        raise SlurmDown("nobody listens")

    unpaid.hold_stranded(stranded, waiting)
    with monkeypatch.context() as away:
        away.setattr(changes, "release", fail)
        for _ in range(3):
            unpaid.hold_stranded([], waiting)
    assert caplog.text.count("runs slurm.job.release on job 7") == 1
    assert caplog.text.count("nobody listens") == 1
    for _ in range(2):
        unpaid.hold_stranded([], waiting)
        unpaid.hold_stranded(stranded, waiting)
    assert changes.sent == [("hold", "7"), ("release", "7")] * 2 + [("hold", "7")]
    assert caplog.text.count("runs slurm.job.hold on job 7") == 3
    assert caplog.text.count("runs slurm.job.release on job 7") == 2
