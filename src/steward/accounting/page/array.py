"""An array, summed up: states, how efficiency is spread, and which tasks to look at first."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.accounting.page import formulas
from steward.accounting.page.notes import notes_on, size
from steward.accounting.page.shapes import ArrayPart, Efficiency, MemberPart
from steward.accounting.settings import NotesSettings
from steward.core.lines import Line

_FAILED: Final = ("OUT_OF_MEMORY", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "FAILED", "DEADLINE")
_MOST_WORST: Final = 12


class _Member(msgspec.Struct, frozen=True):
    line: Line
    efficiency: Efficiency


def array_part(
    job: str,
    lines: Iterable[Line],
    settings: NotesSettings,
    *,
    now_us: int,
    waiting: str = "",
    waiting_tasks: int = 0,
) -> ArrayPart:
    """The sum of an array.

    Args:
        job: Its name.
        lines: The line of the last run of each task that has a record of its own.
        settings: Thresholds of notes.
        now_us: The present moment, µs since the epoch.
        waiting: Which tasks have none yet.
        waiting_tasks: How many those are.
    """
    members = [_Member(line, formulas.efficiency(line, (), now_us)) for line in lines]
    states = Counter(member.line.state or "UNKNOWN" for member in members)
    if waiting_tasks:
        states["PENDING"] += waiting_tasks
    notes: Counter[str] = Counter()
    for member in members:
        notes.update(note.kind for note in notes_on(member.line, member.efficiency, (), settings))
    ended = [member for member in members if member.line.end_us]
    return ArrayPart(
        job=job,
        states=dict(states.most_common()),
        tasks=len(members),
        waiting=waiting,
        cpu=formulas.spread(member.efficiency.cpu for member in ended),
        memory=formulas.spread(member.efficiency.memory for member in ended),
        time=formulas.spread(member.efficiency.time for member in ended),
        elapsed_s=formulas.spread(member.efficiency.elapsed_s for member in ended),
        cpu_used_s=sum(member.efficiency.cpu_used_s or 0.0 for member in members),
        notes=dict(notes.most_common()),
        worst=_worst(ended),
    )


def _worst(ended: Sequence[_Member]) -> tuple[MemberPart, ...]:
    """The tasks to look at first: those that failed, then the ends of each spread."""
    failed = [member for member in ended if member.line.state in _FAILED]
    chosen: dict[str, MemberPart] = {}
    for member in heapq.nsmallest(_MOST_WORST // 2, failed, key=_by_failure):
        _add(chosen, member, _failure(member.line))
    with_cpu = [member for member in ended if member.efficiency.cpu is not None]
    with_memory = [member for member in ended if member.efficiency.memory is not None]
    if len(ended) > 1:
        for member in heapq.nsmallest(2, with_cpu, key=lambda one: one.efficiency.cpu or 0.0):
            _add(chosen, member, "least CPU efficiency")
        for member in heapq.nlargest(2, with_memory, key=lambda one: one.efficiency.memory or 0.0):
            peak = size(member.efficiency.memory_used_bytes or 0)
            _add(chosen, member, f"most memory, {peak}")
        _add_longest(chosen, ended)
    return tuple(list(chosen.values())[:_MOST_WORST])


def _add_longest(chosen: dict[str, MemberPart], ended: Sequence[_Member]) -> None:
    """The two that ran longest, where they ran longer than another did."""
    longest = heapq.nlargest(2, ended, key=lambda one: one.efficiency.elapsed_s or 0.0)
    most = longest[0].efficiency.elapsed_s or 0.0
    least = min(member.efficiency.elapsed_s or 0.0 for member in ended)
    for member in longest:
        elapsed = member.efficiency.elapsed_s or 0.0
        if elapsed > least:
            _add(chosen, member, "ran longest" if elapsed == most else "ran second longest")


def _by_failure(member: _Member) -> tuple[int, int]:
    return _FAILED.index(member.line.state), member.line.job_id


def _failure(line: Line) -> str:
    if line.exit_signal == formulas.UNOPENED:
        return "output not opened"
    if line.exit_signal:
        return formulas.signal_name(line.exit_signal)
    if line.state == "FAILED" and line.exit_code:
        return f"exit code {line.exit_code}"
    return line.state.lower().replace("_", " ")


def _add(chosen: dict[str, MemberPart], member: _Member, why: str) -> None:
    line, efficiency = member.line, member.efficiency
    if line.label in chosen:
        known = chosen[line.label]
        why = f"{known.why}; {why}"
    chosen[line.label] = MemberPart(
        job=line.label,
        state=line.state,
        why=why,
        elapsed_s=efficiency.elapsed_s,
        cpu=efficiency.cpu,
        memory=efficiency.memory,
        exit_code=line.exit_code,
        exit_signal=line.exit_signal,
    )
