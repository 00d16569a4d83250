"""Pending reasons in words: every reason of the installed Slurm has some."""

import glob
import re
from pathlib import Path

import pytest

from steward.accounting.job_page.pending_reasons import ReasonLimit, explain_reason, explain_waiting
from steward.accounting.job_page.requests import Waiting
from steward.core.records import JobRecord
from steward.slurm import PendingJobs
from steward.slurm.pending_jobs import parse_limits
from steward.slurm.settings import ClusterSettings

LIBRARIES = sorted(
    glob.glob("/usr/lib/*/slurm-wlm/libslurmfull.so")
    + glob.glob("/var/cache/steward/roots/*/usr/lib/*/slurm-wlm/libslurmfull.so")
)
LONE = (
    *("Priority", "Dependency", "Resources", "Licenses", "Reservation", "TimeLimit", "Prolog"),
    *("JobHeldUser", "JobHeldAdmin", "InactiveLimit", "WaitingForScheduling", "None"),
)


def reasons_in(library: str) -> list[str]:
    """Return the names of pending reasons, which are adjacent in the library's string table."""
    words = [word.decode() for word in re.findall(rb"[A-Za-z]{4,60}(?=\0)", read(library))]
    first = max(place for place, word in enumerate(words) if word == "PartitionTimeLimit")
    last = max(
        place for place, word in enumerate(words) if word in ("QOSMinBilling", "MpiPortsBusy")
    )
    return words[first - 1 : last + 1]


def read(path: str) -> bytes:
    return Path(path).read_bytes()


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_reason_of_slurm_has_words(library: str) -> None:
    reasons = [*reasons_in(library), *LONE]
    assert len(reasons) > 150
    for reason in reasons:
        words = explain_reason(reason).words
        assert words.endswith("."), reason
        assert f" {reason} " not in words, "the word itself says nothing"


@pytest.mark.parametrize(
    ("reason", "limit"),
    [
        ("QOSMaxCpuPerUserLimit", ReasonLimit(whose="qos", name="MaxTRESPU", tres="cpu")),
        ("AssocGrpMemLimit", ReasonLimit(whose="assoc", name="GrpTRES", tres="mem")),
        ("QOSMaxJobsPerUserLimit", ReasonLimit(whose="qos", name="MaxJobsPU")),
        ("AssocMaxJobsLimit", ReasonLimit(whose="assoc", name="MaxJobs")),
        (
            "AssocGrpCPURunMinutesLimit",
            ReasonLimit(whose="assoc", name="GrpTRESRunMins", tres="cpu"),
        ),
        ("QOSMaxWallDurationPerJobLimit", ReasonLimit(whose="qos", name="MaxWallPJ")),
        ("QOSMinGRES", ReasonLimit(whose="qos", name="MinTRESPJ", tres="gres")),
        ("MaxGRESPerAccount", ReasonLimit(whose="qos", name="MaxTRESPA", tres="gres")),
        ("MaxCpuRunMinsPerUser", ReasonLimit(whose="qos", name="MaxTRESRunMinsPU", tres="cpu")),
        ("QOSGrpNodeLimit", ReasonLimit(whose="qos", name="GrpTRES", tres="node")),
    ],
)
def test_a_limit_is_named_as_slurm_shows_it(reason: str, limit: ReasonLimit) -> None:
    assert explain_reason(reason).limit == limit


def test_what_slurm_adds_to_a_reason_is_kept_apart() -> None:
    reason = explain_reason("ReqNodeNotAvail, UnavailableNodes:n[1-2]")
    assert reason.code == "ReqNodeNotAvail"
    assert reason.detail == "UnavailableNodes:n[1-2]"


def test_another_text_is_quoted_and_not_explained() -> None:
    reason = explain_reason("ask ada")
    assert (reason.code, reason.words) == ("ask ada", "")


def test_dependencies_are_told_with_what_became_of_them() -> None:
    record = JobRecord(
        job_id=9,
        state="PENDING",
        reason="Dependency",
        dependency="afterok:5(unfulfilled),afterany:6_*(unfulfilled)?singleton(unfulfilled)",
    )
    told = explain_waiting(record, None, lambda job: "RUNNING" if job == 5 else "")
    assert isinstance(told, Waiting)
    assert told.details == (
        "--dependency=singleton: one job of this name and owner at a time",
        "until job 5 has completed (it is RUNNING)",
        "until job 6 has ended",
    )
    assert not told.queried


def test_slurm_that_does_not_answer_is_no_error(tmp_path: Path) -> None:
    record = JobRecord(job_id=9, state="PENDING", reason="Priority", priority=4)
    pending = PendingJobs("c1", ClusterSettings(slurm_bin=str(tmp_path)))
    told = explain_waiting(record, pending, lambda _: "")
    assert isinstance(told, Waiting)
    assert told.error
    assert (told.reason, told.priority) == ("Priority", 4)


BROKE = (
    "insufficient funds: this job may cost up to 24.00 SU, "
    "but account physics has 3.00 SU available"
)


def test_a_job_that_the_bank_holds_says_so(tmp_path: Path) -> None:
    comment = f"site words steward=1.AB.CD [steward: {BROKE}]"
    record = JobRecord(job_id=9, state="PENDING", reason="JobHeldAdmin", admin_comment=comment)
    absent = PendingJobs("c1", ClusterSettings(slurm_bin=str(tmp_path)))
    for pending in (None, absent):
        held = explain_waiting(record, pending, lambda _: "")
        assert isinstance(held, Waiting)
        assert held.explanation == f"The bank holds it: {BROKE}."
        assert held.details == ("the bank releases it when its account can pay",)
        others = explain_waiting(record, pending, lambda _: "", may_read=False)
        assert isinstance(others, Waiting)
        assert others.explanation == "An administrator holds the job. Ask for the reason."


def test_squeue_is_asked_why_a_job_is_held(tmp_path: Path) -> None:
    rows = f"{f'site words [steward: {BROKE}]':8192}", f"{'(null)':8192}"
    (tmp_path / "rows").write_text("\n".join(reversed(rows)) + "\n")
    program = tmp_path / "squeue"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/rows"\n')
    program.chmod(0o755)
    pending = PendingJobs("c1", ClusterSettings(slurm_bin=str(tmp_path)))
    assert pending.read_hold_reason(9) == BROKE


ASSOC_MGR = """\
Current Association Manager state
Association Records
ClusterName=sandbox Account=physics UserName= Partition= ID=3 GrpJobs=N(1) GrpWall=N(0.00) \
GrpTRES=cpu=3(1),mem=N(0),node=N(1) GrpTRESMins=cpu=N(0),mem=N(0) MaxJobs= MaxWallPJ= MaxTRESPJ=
ClusterName=sandbox Account=physics UserName=ada(70001) Partition= ID=6 GrpJobs=N(1) \
GrpTRES=cpu=N(1),mem=N(0) MaxJobs=4(1) MaxSubmitJobs= MaxWallPJ= MaxTRESPJ=
ClusterName=sandbox Account=chemistry UserName=ada(70001) Partition= ID=7 MaxJobs=9(1)
ClusterName=sandbox Account=physics UserName=bela(70002) Partition= ID=8 MaxJobs=7(1)
QOS Records
QOS=long(2) GrpTRES=cpu=99(1) MaxWallPJ=60
QOS=normal(1) UsageRaw=0.0 GrpJobs=8(1) GrpTRES=cpu=N(1),mem=N(0) MaxWallPJ= MaxTRESPJ= \
MinTRESPJ= PreemptMode=OFF Priority=0 Account Limits= chemistry={MaxJobsPA=1(1)} \
physics={MaxJobsPA=N(1) MaxTRESPA=cpu=N(1),billing=6(1)} User Limits= 70002={MaxJobsPU=1(1) \
MaxTRESPU=cpu=2(1)} 70001={MaxJobsPU=5(1) MaxTRESPU=cpu=1(1),mem=N(0)}

"""
"""Output of slurmctld 22.05, shortened, with other limits."""


def test_limits_are_those_of_the_job_and_nobody_elses() -> None:
    assert parse_limits(ASSOC_MGR, user="ada", uid=70001, account="physics", qos="normal") == {
        "assoc": {"GrpTRES": "cpu=3(1)", "MaxJobs": "4(1)"},
        "qos": {
            "GrpJobs": "8(1)",
            "MaxTRESPA": "billing=6(1)",
            "MaxJobsPU": "5(1)",
            "MaxTRESPU": "cpu=1(1)",
        },
    }


def test_where_there_is_no_slurmdbd_there_are_no_limits() -> None:
    text = "No association manager is running\n"
    limits = parse_limits(text, user="ada", uid=1, account="", qos="")
    assert limits == {"assoc": {}, "qos": {}}
