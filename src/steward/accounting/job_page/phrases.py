"""Job page wording: phrases for state, end, times and usage, shared by terminal and web.

The ``describe_`` functions take a :class:`PageAnswer` or parts of it and return text.
:func:`split_time` splits a run's time into held, waited, ran and suspended.
"""

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from steward.accounting.job_page.job_efficiency import OUTPUT_NOT_OPENED, get_signal_name
from steward.accounting.job_page.notes import format_duration, format_run_time, format_size
from steward.accounting.job_page.pending_reasons import explain_reason
from steward.accounting.job_page.requests import Efficiency, PageAnswer, RunPart, StepPart

_US: Final = 1_000_000
SpanKind = Literal["held", "waited", "ran", "suspended"]


class TimeSpan(msgspec.Struct, frozen=True):
    """Part of a run's time.

    Attributes:
        kind: What it was: not eligible yet, waiting, running, suspended.
        seconds: Duration in seconds.
        words: The same in words: ``waited 5 s``.
    """

    kind: SpanKind
    seconds: float
    words: str


def describe_state(answer: PageAnswer) -> str:
    """Return the state of a job in one word."""
    return answer.record.state or ("unverified" if not answer.verified else "unknown")


def describe_end(answer: PageAnswer) -> str:
    """Return how a job ended, to follow its state, or why it never started."""
    record = answer.record
    line = answer.runs[-1].line if answer.runs else None
    if line is not None and line.end_us and not line.start_us and not line.nodelist:
        if record.state == "CANCELLED" or not record.reason:
            return " before it started"
        reason = explain_reason(record.reason)
        return f" before it started. {reason.words} ({reason.code})"
    if record.exit_signal == OUTPUT_NOT_OPENED:
        return ", its output could not be opened"
    if record.exit_signal:
        return f", ended by {get_signal_name(record.exit_signal)}"
    return f", exit code {record.exit_code}" if record.exit_code else ""


def describe_exit(code: int | None, number: int | None) -> str:
    """Return how a run or step ended: exit code or signal name."""
    if number:
        return get_signal_name(number)
    return "" if code is None else str(code)


def split_time(run: RunPart, now_us: int) -> list[TimeSpan]:
    """Split a run's time, from submit to end, into spans.

    Args:
        run: The run.
        now_us: Present time, µs since the epoch, for a run that has not ended.
    """
    line = run.line
    began = min((piece.start_us for piece in run.pieces if piece.start_us), default=line.start_us)
    if not line.submit_us:
        return []
    end_us = line.end_us or now_us
    start_us = began or end_us
    eligible_us = min(max(line.eligible_us, line.submit_us), start_us)
    held = (eligible_us - line.submit_us) / _US
    waited = (start_us - eligible_us) / _US
    spans = [
        TimeSpan("held", held, f"not eligible for {format_duration(held)}"),
        TimeSpan("waited", waited, f"waited {format_duration(waited)}"),
    ]
    if not began:
        return spans
    ran_s = max(0.0, (end_us - began) / _US - line.suspended_s)
    words = f"{'ran' if line.end_us else 'has run'} {format_duration(ran_s)}"
    before, after = _split_at_suspension(run, end_us, ran_s)
    suspended = float(line.suspended_s)
    return [
        *spans,
        TimeSpan("ran", before, words),
        TimeSpan("suspended", suspended, f"was suspended for {format_duration(suspended)}"),
        TimeSpan("ran", after, words),
    ]


def _split_at_suspension(run: RunPart, end_us: int, ran_s: float) -> tuple[float, float]:
    """Return the running time before and after the last suspension; all before if unknown."""
    suspended = run.line.suspended_s
    if not suspended or run.suspended_at is None:
        return ran_s, 0.0
    after = (end_us - int(run.suspended_at.timestamp() * _US)) / _US
    after = max(0.0, min(ran_s, after))
    return ran_s - after, after


def describe_cpu(efficiency: Efficiency, *, is_over: bool) -> str:
    """Format the CPU time a run used."""
    if efficiency.cpu_used_s is None:
        return "not known"
    if not is_over:
        return f"{format_duration(efficiency.cpu_used_s)} so far"
    if efficiency.cpu is None or efficiency.cpu_allocated_s is None:
        # Slurm counts it as shorter than a second, so there is no total to compare with.
        return format_duration(efficiency.cpu_used_s)
    return (
        f"{format_duration(efficiency.cpu_used_s)} of {format_duration(efficiency.cpu_allocated_s)}"
    )


def describe_memory(efficiency: Efficiency) -> str:
    """Format the peak memory of a run and where it occurred."""
    if efficiency.memory_used_bytes is None:
        return "not known"
    allocated = (
        f" of {format_size(efficiency.memory_allocated_bytes)}"
        if efficiency.memory_allocated_bytes
        else ""
    )
    where = f" on {efficiency.memory_node}" if efficiency.memory_node else ""
    least = "at least " if efficiency.memory_at_least else ""
    words = f"{least}{format_size(efficiency.memory_used_bytes)}{allocated}{where}"
    return words if allocated else f"{words}, none allocated"


def describe_time(efficiency: Efficiency) -> str:
    """Format the elapsed time of a run and its limit."""
    limit = f" of {format_duration(efficiency.limit_s)}" if efficiency.limit_s else ", no limit"
    return f"{format_run_time(efficiency.elapsed_s)}{limit}"


def format_share(share: float | None) -> str:
    """Format a share as a percentage: ``?`` if unknown, ``<1%`` if small but not zero."""
    percent = "?" if share is None else f"{share:.0%}"
    return "<1%" if share and percent == "0%" else percent


def describe_task_ends(step: StepPart) -> Iterator[str]:
    """Yield sentences on how the tasks of a step ended and how evenly they worked."""
    if step.signals:
        text = ", ".join(
            f"{get_signal_name(number)} ended {_count_tasks(count)}"
            for number, count in step.signals.items()
        )
        yield f"{text}."
    if step.codes:
        text = ", ".join(
            f"{_count_tasks(count)} returned {code}" for code, count in step.codes.items()
        )
        yield f"{text}."
    balance = step.balance
    if balance is not None:
        yield (
            f"CPU time per task: mean {format_duration(balance.mean_s)}, most "
            f"{format_duration(balance.busiest_s)} (task {balance.busiest}), least "
            f"{format_duration(balance.idlest_s)} (task {balance.idlest})."
        )


def _count_tasks(count: int) -> str:
    return f"{count} task" if count == 1 else f"{count} tasks"
