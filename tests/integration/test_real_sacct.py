"""A hundred varied jobs in slurmdbd and Steward: both sacct outputs are equal.

One table names the exceptions with their reasons.
"""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

import pytest
from accounting_cluster import BIN, BookedSite, spec_of
from job_submission import wait_until
from sandbox_daemon import STEWARD
from sandbox_daemon import Daemon as InSandbox
from sandboxes import passable_directory
from varied_jobs import submit_all

from steward.sandbox import Sandbox

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.interface,
    pytest.mark.database,
    # All groups of jobs are waited for in the first test.
    pytest.mark.timeout(10_000),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmstepd runs as root"),
    pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler"),
]

Row = dict[str, str]
Key = tuple[str, str]
Same = Callable[[str, str, Row], bool]


def _sampled(_slurms: str, _ours: str, _row: Row) -> bool:
    return True


def _within_seconds(slurms: str, ours: str, row: Row) -> bool:
    """Return whether a step's times differ by seconds only: slurmctld's and slurmd's do."""
    if "." not in row["JobID"]:
        return False
    times = [datetime.fromisoformat(value) for value in (slurms, ours)]
    return abs((times[0] - times[1]).total_seconds()) <= 5  # on a machine that is busy


def _span_of_step(slurms: str, ours: str, row: Row) -> bool:
    cpus = int(row["AllocCPUS"] or 1)
    return "." in row["JobID"] and abs(_seconds(slurms) - _seconds(ours)) <= 6 * cpus


def _seconds(value: str) -> int:
    total = 0
    for part in value.replace("-", ":").split(":"):
        total = total * 60 + int(part)
    return total


def _less_128(slurms: str, ours: str, _row: Row) -> bool:
    code, _, signal = ours.partition(":")
    if slurms == f"{int(code) - 128}:{signal}":
        return True
    return (slurms, ours) == ("1:0", "0:1")  # SIGHUP: slurmctld's own return code 1


def _of_no_step(slurms: str, ours: str, row: Row) -> bool:
    return "+" in row["JobID"] and (slurms, ours) == ("00:00:00", "")


def _in_fractions(slurms: str, ours: str, row: Row) -> bool:
    """Return whether CPU times differ by a millisecond: Slurm truncates each task's."""
    if not slurms or not ours or row["NTasks"] == "1":
        return False
    return 0 <= _milliseconds(ours) - _milliseconds(slurms) <= 1


def _milliseconds(value: str) -> int:
    seconds, _, milliseconds = value.partition(".")
    return _seconds(seconds) * 1000 + int(milliseconds or 0)


def _of_memory_alone(slurms: str, ours: str, row: Row) -> bool:
    return "." in row["JobID"] and slurms.replace(",mem=0", "") == ours


def _printable(slurms: str, ours: str, row: Row) -> bool:
    if "." in row["JobID"]:
        return True  # srun's --job-name, which a plugin cannot know
    escaped = slurms.replace("\t", "\\t")
    return ours in (escaped, escaped.replace("`", '"'))


def _of_late_step(slurms: str, ours: str, row: Row) -> bool:
    # It is the highest of all steps, and slurmctld may hear of the last one behind the job.
    lacks_one = int(slurms.partition(":")[0]) < int(ours.partition(":")[0])
    return row["State"].startswith("CANCELLED") or lacks_one or "0:0" in (slurms, ours)


def _ended(slurms: str, ours: str, row: Row) -> bool:
    why_it_ended = ("NonZeroExitCode", "RaisedSignal", "JobLaunchFailure", "DependencyNeverSat")
    waited = ("JobArrayTaskLimit", "Dependency", "BeginTime", "Priority", "JobHeld", "Resources")
    seen_in_between = slurms.startswith(waited)
    return ours.startswith(why_it_ended) or seen_in_between or row["State"] != "COMPLETED"


EXCEPTED: Final[dict[str, tuple[Same, str]]] = {
    **dict.fromkeys(
        [
            *("MaxRSS", "MaxRSSNode", "MaxRSSTask", "AveRSS", "MaxVMSize", "AveVMSize"),
            *("MaxVMSizeNode", "MaxVMSizeTask", "MaxPages", "MaxPagesNode", "MaxPagesTask"),
            *("AvePages", "MinCPU", "MinCPUNode", "MinCPUTask", "AveCPU", "AveCPUFreq"),
            *("MaxDiskRead", "MaxDiskReadNode", "MaxDiskReadTask", "AveDiskRead"),
            *("MaxDiskWrite", "MaxDiskWriteNode", "MaxDiskWriteTask", "AveDiskWrite"),
            *(f"TRESUsage{way}{what}" for way in ("In", "Out") for what in ("Ave", "Tot")),
            *(
                f"TRESUsage{way}{what}{where}"
                for way in ("In", "Out")
                for what in ("Min", "Max")
                for where in ("", "Node", "Task")
            ),
        ],
        (_sampled, "ours is exact, Slurm's is sampled, and nothing for a step of a second"),
    ),
    **dict.fromkeys(
        ["Start", "Submit", "Eligible", "End"],
        (_within_seconds, "a step begins when it begins, not when slurmctld hears of it"),
    ),
    **dict.fromkeys(
        ["Elapsed", "ElapsedRaw", "CPUTime", "CPUTimeRAW"],
        (_span_of_step, "likewise"),
    ),
    "Suspended": (_span_of_step, "likewise"),
    "ExitCode": (_less_128, "sacct before 26.05 takes 128 off a code of 128 or more"),
    "AllocTRES": (_of_memory_alone, "Slurm writes 0 for memory of a step that nobody limited"),
    "JobName": (_printable, "slurmdbd turns quotes into `, and we print no control characters"),
    "Comment": (_printable, "likewise"),
    "DerivedExitCode": (
        _of_late_step,
        "of a step that ends behind its job either may lack it",
    ),
    **dict.fromkeys(
        ["UserCPU", "SystemCPU", "TotalCPU"],
        (
            lambda slurms, ours, row: (
                _of_no_step(slurms, ours, row) or _in_fractions(slurms, ours, row)
            ),
            "a het component without a step: Slurm writes 0, we know nothing; or rounding",
        ),
    ),
    "Reason": (_ended, "Slurm forgets why a job ended; ours is what was seen last"),
    "Priority": (_sampled, "ours is the last that was seen, Slurm's that of the last start"),
    "SubmitLine": (
        lambda slurms, ours, row: not ours or _printable(slurms, ours, row),
        "scontrol before 24.11 does not show it",
    ),
    **dict.fromkeys(
        ["Timelimit", "TimelimitRaw"],
        (lambda _s, _o, row: row["State"] == "REQUEUED", "ours is what a former run was given"),
    ),
    "StdErr": (lambda slurms, _o, _r: not slurms, "Slurm writes none where it is StdOut"),
    "Cluster": (lambda _s, ours, _r: ours == "box", "ours has its name in steward.toml"),
}
"""Fields that may differ, in which way, and why."""

NOT_OURS: Final = frozenset(
    {
        # Slurm's own numbers of rows in its database.
        *("AssocID", "DBIndex", "QOSRAW", "WCKeyID", "ReservationId"),
        # Fields that no source of Steward reports.
        *("Layout", "ReqCPUFreq", "ReqCPUFreqGov", "ReqCPUFreqMax", "ReqCPUFreqMin"),
        *("ConsumedEnergy", "ConsumedEnergyRaw", "Flags", "QOSREQ"),
        *("SLUID", "OriginalSLUID"),
    }
)
"""Fields that Steward may leave empty, because only slurmdbd has them."""


def rows_of(text: str) -> dict[Key, Row]:
    """Return rows by their job or step, and the submit time of their run."""
    head, *lines = text.rstrip("\n").split("\n")
    found: dict[Key, Row] = {}
    submit = ""
    for line in lines:
        row = dict(zip(head.split("<@>"), line.split("<@>"), strict=True))
        if "." not in row["JobID"]:
            submit = row["Submit"]
        found[row["JobID"], submit] = row
    return found


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[BookedSite]:
    with (
        passable_directory() as path,
        Sandbox.up(spec_of(str(path), slurm_version), report=print) as cluster,
    ):
        site = BookedSite(cluster)
        try:
            site.start()
            submitted = submit_all(site)
            assert submitted >= 100
            print(f"{submitted} jobs")
            wait_until(lambda: _is_told(site), 60)
            yield site
        finally:
            site.close()


def _is_told(site: BookedSite) -> bool:
    """Return whether both databases have the end of every step."""
    words = ("-a", "-D", "-n", "-P", "-S", "now-1hour", "-o", "JobID,State")
    theirs, ours = (sorted(ask(*words).splitlines()) for ask in (site.slurms, site.ours))
    return theirs == ours and not any("RUNNING" in line for line in ours)


def test_what_both_report_is_equal(site: BookedSite) -> None:
    known = set(site.ours("--helpformat").split())
    fields = [name for name in site.slurms("--helpformat").split() if name in known]
    assert len(fields) > 90
    words = ("-a", "-D", "-P", "-S", "now-1hour", "--delimiter=<@>", "-o", ",".join(fields))
    theirs, ours = rows_of(site.slurms(*words)), rows_of(site.ours(*words))
    assert theirs.keys() == ours.keys()
    assert len(theirs) > 150
    wrong = []
    for key, row in theirs.items():
        for name in fields:
            slurms, mine = row[name], ours[key][name]
            if slurms == mine or (name in NOT_OURS and not mine):
                continue
            may_differ, _ = EXCEPTED.get(name, (None, ""))
            if may_differ is None or not may_differ(slurms, mine, row):
                wrong.append((*key, row["State"], name, slurms, mine))
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("options", [(), ("-X",), ("-b",), ("-X", "-n", "-s", "F")])
def test_listings_are_those_of_slurms_sacct(site: BookedSite, options: tuple[str, ...]) -> None:
    """Headings, columns and widths are equal, too; no exception concerns the default columns."""
    words = ("-a", "-S", "now-1hour", *options)
    theirs, ours = site.slurms(*words).splitlines(), site.ours(*words).splitlines()
    names = {"other", "sleep"}

    def plain(lines: list[str]) -> list[str]:
        kept = []
        for line in lines:
            parts = line.split()
            is_excepted = names & set(parts) or any(word in line for word in _ODD)
            codes = [part for part in parts if ":" in part and part.partition(":")[0].isdigit()]
            is_high = any(int(code.partition(":")[0]) in _CODES for code in codes)
            if not (is_excepted or is_high or "0:1" in parts or "1:0" in parts):
                kept.append(line)
        return sorted(kept)

    assert theirs[:2] == ours[:2] or "-n" in options
    assert plain(theirs) == plain(ours)


_CODES: Final = frozenset({9, 137, 127, 255, 15, 143})
# Slurm pads by bytes, we by letters.
_ODD: Final = ("`", '"doub', "here", "ünï")


@pytest.mark.skipif(
    not (Path(sys.prefix) / "bin/reportseff").exists(), reason="reportseff is not installed"
)
def test_reportseff_says_the_same(site: BookedSite) -> None:
    """States and times are equal; efficiencies are Slurm's where it sampled, else exact."""
    shown = "JobID,State,Elapsed,TimeEff,CPUEff,MemEff"
    words = ["reportseff", "--no-color", "--format", shown, "-u", site.user]
    path = f"{BIN}:{site.cluster.make_environment()['PATH']}"
    config = str(site.daemon.config)
    theirs = _efficiencies(site, words, {})
    ours = _efficiencies(site, words, {"PATH": path, "STEWARD_CONFIG": config})
    assert len(theirs) > 10
    assert ours.keys() == theirs.keys()
    compared = 0
    for job, (*same, cpu, memory) in theirs.items():
        *mine, my_cpu, my_memory = ours[job]
        assert mine == same, job
        if "---" not in (cpu, my_cpu):  # a het component without a step
            # A millisecond, see EXCEPTED, of a second at the least.
            assert round(abs(_percent(my_cpu) - _percent(cpu)), 1) <= 0.1, job
        if "---" not in (memory, my_memory):
            # Ours is a process's peak; Slurm's is a sample, of all processes of a task.
            assert _percent(my_memory) >= _percent(memory) - 1, job
            compared += 1
    assert compared


def _percent(value: str) -> float:
    return float(value.rstrip("%"))


def _efficiencies(site: BookedSite, words: list[str], env: dict[str, str]) -> dict[str, list[str]]:
    """Return the columns of reportseff by job."""
    text = site.cluster.run(words, env={"TZ": "UTC", **env}).stdout
    rows = [line.split() for line in text.splitlines()[1:]]
    return {job: rest for job, *rest in filter(None, rows)}


def test_imported_history_is_the_same_jobs(site: BookedSite) -> None:
    """Records that Steward observed itself stay unchanged."""
    words = ("-a", "-D", "-P", "-S", "now-1hour", "-o", "JobID,JobIDRaw,State,ExitCode,End,MaxRSS")
    before = site.ours(*words)
    done = site.daemon.ask("accounting", "import", "--from", "sacct", "-S", "now-1hour")
    assert "runs of jobs" in done.stdout
    again = site.daemon.ask("accounting", "import", "--from", "sacct", "-S", "now-1hour")
    assert again.stdout == done.stdout
    assert site.ours(*words) == before


def test_a_file_of_sacct_makes_books_of_its_own(site: BookedSite) -> None:
    """A Steward with imported records alone shows what Slurm's sacct showed."""
    home = Path(site.cluster.directory) / "second"
    (home / "spool").mkdir(parents=True)
    second = InSandbox(site.cluster, home, slurm={"slurm": False, "spool": str(home / "spool")})
    table = home / "sacct.txt"
    fields = site.slurms("--helpformat").split()
    table.write_text(site.slurms("-a", "-D", "-P", "-S", "now-1hour", "-o", ",".join(fields)))
    shown = "JobID,JobIDRaw,User,State,ExitCode,Start,End,NTasks,MaxRSS,UserCPU,AllocTRES,JobName"
    words = ("-a", "-D", "-P", "-S", "now-1hour", "-o", shown)

    def ours() -> list[str]:
        config = {"STEWARD_CONFIG": str(second.config), "TZ": "UTC"}
        out = site.cluster.run([STEWARD, "sacct", *words], env=config).stdout
        return sorted(_without_cpu(line) for line in out.splitlines())

    theirs = sorted(_without_cpu(line) for line in site.slurms(*words).splitlines())
    second.start()
    try:
        for _ in range(2):
            done = second.ask("accounting", "import", "--from", str(table))
            assert "runs of jobs" in done.stdout
            wait_until(lambda: len(ours()) == len(theirs), 60)
        assert [line.expandtabs() for line in theirs] == [
            line.replace("\\t", "\t").expandtabs() for line in ours()
        ]
    finally:
        second.close()


def _without_cpu(line: str) -> str:
    """Return a row without CPU time, which Slurm sums from steps in whole milliseconds."""
    parts = line.split("|")
    if "." not in parts[0] and len(parts) > 9:
        parts[9] = ""
    return "|".join(parts)
