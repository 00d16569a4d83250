"""Actions ``events``: visibility, and following without losses."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.commands import run
from harness.events import NOON, make_event
from harness.journal import JournaledSite
from steward.core.access import Caller, ClusterRoles
from steward.core.config import AccessSettings
from steward.core.errors import UsageError
from steward.core.events import (
    BANK_THRESHOLD,
    CONTROLLER_STATE,
    JOB_STATE,
    NODE_STATE,
    PARTITION_STATE,
    RULE_EXECUTION,
    BankThreshold,
    ControllerState,
    JobFacts,
    NodeState,
    PartitionState,
    RuleExecution,
)
from steward.core.records import JobRecord
from steward.reports.event_texts import describe_event
from steward.reports.events import MAX_EVENTS, EventItem, EventsReply

ADA = Caller(uid=1000, user="ada")
OPERATOR = Caller(uid=1001, user="op")
COORDINATOR = Caller(uid=1002, user="coord")

BODIES: list[tuple[str, Any]] = [
    (NODE_STATE, NodeState(node="n1", state="IDLE")),
    (NODE_STATE, NodeState(node="n1", state="DOWN", old_state="IDLE", failed=True)),
    (NODE_STATE, NodeState(node="n2", state="IDLE")),
    (PARTITION_STATE, PartitionState(partition="main", state="UP")),
    (CONTROLLER_STATE, ControllerState(up=True)),
    (JOB_STATE, JobFacts(record=JobRecord(job_id=1, uid=1000, account="physics"))),
    (JOB_STATE, JobFacts(record=JobRecord(job_id=2, uid=1003, account="chemistry"))),
    (
        BANK_THRESHOLD,
        BankThreshold(account="physics", allocation=1, kind="used", value=80, balance=1, total=5),
    ),
    (
        RULE_EXECUTION,
        RuleExecution(execution=1, rule="r", event="e", action="a", status="succeeded"),
    ),
]
JOBS = (JOB_STATE,)


class EventsSite(JournaledSite):
    """Site of a journal whose events come a minute apart."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path, access=AccessSettings(operators=("op",)))
        self.now = NOON + timedelta(hours=1)
        self.hide()
        self._number = 0

    def hide(self, *words: str) -> None:
        """Set Slurm's PrivateData."""
        coordinators = {"physics": frozenset({"coord"})}
        self.standing = ClusterRoles(private_data=frozenset(words), coordinators=coordinators)

    def happen(self, *bodies: tuple[str, Any], cluster: str = "c1") -> None:
        for kind, body in bodies:
            self._number += 1
            when = NOON + timedelta(minutes=self._number)
            self.append([make_event(kind, f"{kind}:{self._number}", body, when, cluster=cluster)])

    def listed(self, asker: Caller = ADA, **request: Any) -> EventsReply:
        answer: EventsReply = self.ask("events.list", asker, **request)
        return answer

    def kinds(self, asker: Caller = ADA, **request: Any) -> list[str]:
        return [event.kind for event in self.listed(asker, **request).events]


@pytest.fixture
def site(tmp_path: Path) -> EventsSite:
    site = EventsSite(tmp_path)
    site.happen(*BODIES)
    return site


STATES = [NODE_STATE] * 3 + [PARTITION_STATE, CONTROLLER_STATE]


def test_states_are_everybodys(site: EventsSite) -> None:
    assert site.kinds(ADA) == STATES
    assert site.kinds(OPERATOR) == [*STATES, BANK_THRESHOLD, RULE_EXECUTION]


def test_private_data_hides_them(site: EventsSite) -> None:
    site.hide("nodes")
    assert site.kinds(ADA) == [PARTITION_STATE, CONTROLLER_STATE]
    site.hide("partitions")
    assert site.kinds(ADA) == [NODE_STATE] * 3 + [CONTROLLER_STATE]
    assert site.kinds(OPERATOR) == [*STATES, BANK_THRESHOLD, RULE_EXECUTION]


def test_an_accounts_coordinator_is_told_of_its_money(site: EventsSite) -> None:
    assert site.kinds(COORDINATOR, kinds=(BANK_THRESHOLD, RULE_EXECUTION)) == [BANK_THRESHOLD]


def test_jobs_are_told_as_their_records(site: EventsSite) -> None:
    assert len(site.listed(ADA, kinds=JOBS).events) == 2
    site.hide("jobs")
    (own,) = site.listed(ADA, kinds=JOBS).events
    assert own.body.record.uid == ADA.uid
    assert len(site.listed(OPERATOR, kinds=JOBS).events) == 2


def test_filters(site: EventsSite) -> None:
    site.happen((NODE_STATE, NodeState(node="n9", state="IDLE")), cluster="c2")
    assert [e.body.node for e in site.listed(nodes="n[2-9]").events] == ["n2", "n9"]
    assert [e.body.state for e in site.listed(failed=True).events] == ["DOWN"]
    assert len(site.listed(clusters=("c2",)).events) == 1
    with pytest.raises(UsageError, match=r"unknown cluster 'c3': use one of c1$"):
        site.listed(clusters=("c3",))
    assert site.listed(clusters=("c3",), after=0).events == ()
    assert len(site.listed(since="2026-03-01T12:03:00", zone="UTC").events) == 4
    assert len(site.listed(until="2026-03-01T12:03:00", zone="UTC").events) == 2
    assert [e.body.state for e in site.listed(kinds=(NODE_STATE,), limit=1).events] == ["IDLE"]
    with pytest.raises(UsageError, match=r"unknown kind 'node\.stat'"):
        site.listed(kinds=("node.stat",))


def test_following_misses_nothing_and_repeats_nothing(site: EventsSite) -> None:
    seen = [event.id for event in site.listed(OPERATOR, after=0, limit=2).events]
    position = site.listed(OPERATOR, after=0, limit=2).position
    for number in range(1200):
        site.happen((NODE_STATE, NodeState(node=f"x{number}", state="IDLE")))
        if number % 100 == 0:
            answer = site.listed(OPERATOR, after=position, limit=7)
            seen += [event.id for event in answer.events]
            position = answer.position
    while True:
        answer = site.listed(OPERATOR, after=position, limit=500)
        if not answer.events:
            break
        seen += [event.id for event in answer.events]
        position = answer.position
    assert len(seen) == len(set(seen)) == len(BODIES) - 2 + 1200
    assert seen == sorted(seen)
    assert site.listed(after=10**9).position < 10**9


def test_the_newest_are_found_behind_many_others(site: EventsSite) -> None:
    jobs = JobFacts(record=JobRecord(job_id=7, uid=1))
    for _ in range(3):
        site.happen(*((JOB_STATE, jobs) for _ in range(900)))
    assert site.kinds(ADA, limit=4) == STATES[-4:]


def test_an_answer_survives_the_socket(site: EventsSite) -> None:
    answer = site.listed(OPERATOR)
    again = msgspec.json.decode(msgspec.json.encode(answer), type=EventsReply)

    def shown(event: EventItem) -> tuple[object, ...]:
        return event.id, event.at, event.cluster, event.kind, describe_event(event)

    assert [shown(event) for event in answer.events] == [shown(event) for event in again.events]


def test_no_more_of_the_past_is_asked_for_than_a_reply_has() -> None:
    code, _, err = run("events", "tail", "-L", str(MAX_EVENTS + 1))
    assert code == 2
    assert f"give {MAX_EVENTS} or less" in err
