"""Expected costs of jobs, computed from Slurm's own records independently of Steward.

This module uses nothing of the bank: it reads rows of ``sacct --duplicates`` if there is a
slurmdbd, else ``scontrol show job`` and, for runs that a requeue hid there, jobcomp's lines. If
two of Slurm's records of a run have different ends, the earlier record counts: a requeue of a
finished job writes its end again, and so does a slurmctld that was killed and restarts from
state saved seconds before. If it runs the job again after that end, both runs count. A run whose
requeue or preemption it forgot continues until it ends; if it forgot the run's start, too, the
job starts again, and both runs count.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Final, NamedTuple

from bank_cluster import CPU, BankSite

_TRES: Final = re.compile(r"(\w[\w/:.-]*)=([0-9.]+)([KMGTP]?)")
_COLUMNS: Final = "JobIDRaw,Submit,Start,End,State,ElapsedRaw,AllocTRES,TimelimitRaw,Partition"
_PERMILLE: Final = {"NODE_FAIL": 0, "PREEMPTED": 500}
_TIMES: Final = {"TZ": "UTC", "SLURM_TIME_FORMAT": "%s"}
_ENDED: Final = ("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT")
_REQUEUED: Final = "PENDING"
"""State that jobcomp reports for a job at its requeue."""
_UNFINISHED: Final = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REVOKED")


class Ran(NamedTuple):
    """Run, or piece of a run, as Slurm records it."""

    job: int
    start: str
    seconds: int
    state: str
    cpus: int
    limit_s: int | None
    partition: str
    submit: str = ""
    end: int = 0


def cost(ran: Ran, cpu: int = CPU, permille: Mapping[str, int] = _PERMILLE) -> int:
    """Return the expected charge, in micro-SU: rounded once, half up."""
    seconds = ran.seconds if ran.limit_s is None else min(ran.seconds, ran.limit_s)
    part = Fraction(permille.get(ran.state, 1000), 1000)
    return int(Fraction(cpu * ran.cpus * seconds, 3600) * part + Fraction(1, 2))


def costs(runs: Iterable[Ran], cpu: int = CPU) -> dict[int, int]:
    """Return the expected charge of every job, by raw job id."""
    found: dict[int, int] = {}
    for ran in runs:
        found[ran.job] = found.get(ran.job, 0) + cost(ran, cpu)
    return found


def by_sacct(site: BankSite, suspensions: Mapping[int, tuple[int, int]] | None = None) -> list[Ran]:
    """Return runs and pieces with an end in slurmdbd, or in jobcomp where slurmctld was killed.

    Args:
        site: Site of the runs.
        suspensions: Times at which jobs were suspended and resumed; jobcomp does not report them.
    """
    words = ["sacct", "-a", "-D", "-X", "-n", "-P", "--noconvert", "-S", "now-1day", "-o", _COLUMNS]
    rows = site.cluster.run(words, env=_TIMES, timeout_s=120).stdout.splitlines()
    lines = [_without_suspension(ran, suspensions or {}) for ran in _lines(site)]
    first = _first(lines)
    told: set[tuple[int, str]] = set()
    found: dict[tuple[int, str, str], Ran] = {}
    pieces: list[Ran] = []
    for row in rows:
        job, submit, start, end, state, seconds, tres, limit, partition = row.split("|")
        state = state.partition(" ")[0]
        if not (start.isdigit() and end.isdigit()) or state in _UNFINISHED:
            continue
        limit_s = int(limit) * 60 if limit.isdigit() else None
        ran = Ran(
            *(int(job), start, int(seconds), state, _cpus(tres), limit_s, partition),
            *(submit, int(end)),
        )
        told.add((ran.job, submit))
        if state == "RESIZING":
            pieces.append(ran)
            continue
        before = first.get((ran.job, submit))
        ends = (*_ENDED, "NODE_FAIL", *(("PREEMPTED",) if state == "REQUEUED" else ()))
        is_first = before is not None and before.state in ends
        if before is not None and is_first and before.end < ran.end:
            ran = before
        found[ran.job, submit, ran.start] = ran
    # A killed slurmctld had not reported everything to slurmdbd: a resized run has fewer sizes
    # there than in jobcomp, and its first row is missing or has the end of the whole run beside the
    # last one.
    last = {
        (job, start): submit for job, submit, start in sorted(found, key=lambda key: int(key[1]))
    }
    found = {key: ran for key, ran in found.items() if last[key[0], key[2]] == key[1]}
    of_jobcomp = _by_run(ran for ran in lines if ran.state == "RESIZING")
    for run, sizes in _by_run(pieces).items():
        if len(sizes) >= len(of_jobcomp.get(run, ())):
            of_jobcomp[run] = sizes
    untold = [
        ran for key, ran in first.items() if key not in told and (ran.job, ran.start) not in last
    ]
    again = [
        ran
        for ran in _again(lines, first)
        if ran.state != _REQUEUED or (ran.job, ran.start) not in last
    ]
    sizes = [size for sizes in of_jobcomp.values() for size in sizes]
    return [*_without([*found.values(), *untold, *again], sizes)]


def _without_suspension(ran: Ran, suspensions: Mapping[int, tuple[int, int]]) -> Ran:
    """Return the run without its suspended time."""
    suspended_at, resumed_at = suspensions.get(ran.job, (0, 0))
    halted_s = max(0, min(resumed_at, ran.end) - max(suspended_at, int(ran.start)))
    return ran._replace(seconds=ran.seconds - halted_s)


def _by_run(pieces: Iterable[Ran]) -> dict[tuple[int, str], list[Ran]]:
    runs: dict[tuple[int, str], list[Ran]] = {}
    for piece in pieces:
        runs.setdefault((piece.job, piece.start), []).append(piece)
    return runs


def _first(lines: Iterable[Ran]) -> dict[tuple[int, str], Ran]:
    """Return the first end that jobcomp recorded for each run, by job and submit time.

    A requeue or preemption that the same run's end follows was forgotten.
    """
    first: dict[tuple[int, str], Ran] = {}
    for ran in sorted(lines, key=lambda ran: ran.end):
        if ran.state == "RESIZING":
            continue
        before = first.get((ran.job, ran.submit))
        went_on = (
            before is not None
            and before.state == "PREEMPTED"
            and ran.state in (*_ENDED, "NODE_FAIL")
            and ran.start == before.start
        )
        if before is None or before.state == _REQUEUED or went_on:
            first[ran.job, ran.submit] = ran
    return first


def _again(lines: Iterable[Ran], first: Mapping[tuple[int, str], Ran]) -> Iterator[Ran]:
    """Yield runs that jobcomp recorded again after their first end or requeue."""
    begun: set[tuple[int, str]] = set()
    for ran in sorted(lines, key=lambda ran: ran.end):
        before = first.get((ran.job, ran.submit))
        if before is not None and ran.state == _REQUEUED and ran.end <= int(before.start):
            # A killed slurmctld can report a requeue twice.
            if (ran.job, ran.start) not in begun:
                begun.add((ran.job, ran.start))
                yield ran
            continue
        is_ended = before is not None and before.state in (*_ENDED, "NODE_FAIL")
        if before is None or not is_ended or ran.state not in (*_ENDED, "NODE_FAIL"):
            continue
        is_anew = ran.start != before.start and before.end <= int(ran.start) < ran.end
        if is_anew and (ran.job, ran.start) not in begun:
            begun.add((ran.job, ran.start))
            yield ran


def by_slurmctld(site: BankSite) -> list[Ran]:
    """Return the last run of each job from scontrol, earlier runs and pieces from jobcomp."""
    last = {(ran.job, ran.start): ran for ran in _shown(site)}
    found: dict[tuple[int, str], Ran] = {}
    pieces = []
    for ran in _lines(site):
        if ran.state == "RESIZING":
            pieces.append(ran)
        else:
            found.setdefault((ran.job, ran.start), ran)
    return [*_without((found | last).values(), pieces)]


def _without(runs: Iterable[Ran], pieces: Iterable[Ran]) -> Iterator[Ran]:
    """Yield the pieces, and the runs without the time of their pieces."""
    spent: dict[tuple[int, str], int] = {}
    for piece in sorted(pieces, key=lambda one: one.seconds):
        before = spent.get((piece.job, piece.start), 0)
        yield piece._replace(seconds=piece.seconds - before)
        spent[piece.job, piece.start] = piece.seconds
    for ran in runs:
        yield ran._replace(seconds=ran.seconds - spent.get((ran.job, ran.start), 0))


def _shown(site: BankSite) -> list[Ran]:
    words = ["scontrol", "-o", "-a", "-d", "show", "job"]
    text = site.cluster.run(words, env=_TIMES).stdout
    found = []
    for line in text.splitlines():
        words_of = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))
        if words_of.get("StartTime", "Unknown") in ("Unknown", "None", "N/A"):
            continue
        if words_of["JobState"] in _UNFINISHED:
            continue
        found.append(
            Ran(
                int(words_of["JobId"]),
                words_of["StartTime"],
                _clock(words_of["RunTime"]),
                words_of["JobState"],
                _cpus(re.findall(r" (?:Alloc)?TRES=(\S*)", line)[-1]),
                _limit(words_of.get("TimeLimit", "UNLIMITED")),
                words_of["Partition"],
            )
        )
    return found


def _lines(site: BankSite) -> list[Ran]:
    path = Path(site.cluster.directory) / "log/jobcomp.jsonl"
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        told = json.loads(line)
        start, end = told.get("start_time", 0), told.get("end_time", 0)
        if not start or end < start:
            continue
        limit = told.get("time_limit")
        found.append(
            Ran(
                told["job_id"],
                str(start),
                (told["t"] if told.get("resizing") else end) - start,
                "RESIZING" if told.get("resizing") else _state(told),
                _cpus(told.get("tres_fmt_alloc_str", "")),
                limit * 60 if isinstance(limit, int) and limit < 10**8 else None,
                told.get("partition", ""),
                str(told.get("submit_time", "")),
                told["t"] if told.get("resizing") else end,
            )
        )
    return found


def _state(told: dict[str, object]) -> str:
    """Return the name of a state's number (slurm.h: enum job_states)."""
    names = ["PENDING", "RUNNING", "SUSPENDED", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"]
    names += ["NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"]
    raw = told.get("job_state", 0)
    return names[int(str(raw)) & 0xFF] if str(raw).isdigit() else str(raw)


def _cpus(tres: str) -> int:
    return {name: int(float(number)) for name, number, _ in _TRES.findall(tres)}.get("cpu", 0)


def _clock(text: str) -> int:
    days, _, rest = text.rpartition("-")
    hours, minutes, seconds = (int(part) for part in rest.split(":"))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _limit(text: str) -> int | None:
    return None if text in ("UNLIMITED", "Partition_Limit") else _clock(text)
