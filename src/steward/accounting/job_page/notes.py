"""Job notes: remarks on how a run ended and on its efficiency, a closed list.

:func:`write_notes` always remarks on how a run ended; on efficiency only if the run was long enough
and its data are complete, so that no note suggests a smaller request because a node's report was
lost. :func:`format_size` and :func:`format_duration` format values for people.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from steward.accounting.job_page.job_efficiency import (
    OUTPUT_NOT_OPENED,
    get_signal_name,
    is_doubtful,
)
from steward.accounting.job_page.requests import (
    CPU_LOW,
    MEMORY_HIGH,
    MEMORY_LOW,
    Efficiency,
    Note,
    StepPart,
)
from steward.core.records import UsageLine

_LEAST_RUN_S: Final = 60.0
"""Minimum run time for notes on efficiency, in seconds."""
_FAILED_EARLY_S: Final = 60.0
"""Time within which a failure is early, in seconds."""
_SERIAL_CPUS: Final = 4
"""Minimum CPUs of a run that used only one, for the note "serial"."""
_TIME_LOW: Final = 0.1
"""Share of the time limit below which the limit is far too long."""
_TIME_HIGH: Final = 0.95
"""Share of the time limit above which it was nearly reached."""
_IMBALANCE: Final = 2.0
"""Multiple of the mean CPU time from which on a task makes a step uneven."""
_SIZES: Final = ("bytes", "KiB", "MiB", "GiB", "TiB")
_EARLY: Final = frozenset({"FAILED", "OUT_OF_MEMORY"})
_WHOLE: Final = frozenset({"COMPLETED", "TIMEOUT"})
"""States of runs that had enough time to use what they requested."""
_BUSY: Final = 0.5
"""Minimum mean number of busy CPUs of a run that computed; below it, it waited or slept."""
_ONE_CPU: Final = 1.1
"""Maximum mean number of busy CPUs of a serial run; above 1 because the batch script works too."""


def write_notes(
    line: UsageLine, efficiency: Efficiency, steps: Sequence[StepPart]
) -> tuple[Note, ...]:
    """Return the notes on a run, most important first.

    Args:
        line: The run's line.
        efficiency: Its efficiency.
        steps: Its steps.
    """
    notes = list(_note_end(line, efficiency))
    elapsed = efficiency.elapsed_s
    if line.end_us and elapsed is not None and elapsed >= _LEAST_RUN_S:
        notes += _note_memory(line, efficiency)
        notes += _note_cpus(line, efficiency)
        notes += _note_time(line, efficiency)
        notes += _note_balance(steps)
    return tuple(notes)


def _note_end(line: UsageLine, efficiency: Efficiency) -> Iterator[Note]:
    """Yield notes on how a run ended."""
    state, elapsed = line.state, efficiency.elapsed_s
    if state == "OUT_OF_MEMORY":
        words = "The job ran out of memory and was killed."
        if efficiency.memory_allocated_bytes:
            allocated = format_size(efficiency.memory_allocated_bytes)
            words += f" Its limit on a node was {allocated}: request more with --mem."
        yield Note(kind="out-of-memory", words=words)
    if state == "TIMEOUT":
        limit = f" of {format_duration(efficiency.limit_s)}" if efficiency.limit_s else ""
        yield Note(
            kind="timeout",
            words=f"The job reached its time limit{limit}: request more with --time, or write "
            "checkpoints.",
        )
    if state in ("NODE_FAIL", "BOOT_FAIL"):
        node_text = f" ({line.failed_node})" if line.failed_node else ""
        yield Note(
            kind="node-fail",
            words=(f"A node failed{node_text}: the job did not cause it. Submit it again."),
        )
    if line.exit_signal == OUTPUT_NOT_OPENED:
        yield Note(
            kind="failed-early",
            words="Slurm could not open the output file: check that the directory of --output "
            "and --error exists and is writable.",
        )
    elif state in _EARLY and elapsed is not None and elapsed < _FAILED_EARLY_S:
        yield Note(
            kind="failed-early",
            words=f"The job failed {_format_after(elapsed)}{_format_how_ended(line)}: "
            "check the end of its output.",
        )


def _format_after(elapsed: float) -> str:
    return f"after {format_duration(elapsed)}" if elapsed else "within a second"


def _format_how_ended(line: UsageLine) -> str:
    if line.exit_signal:
        return f", by {get_signal_name(line.exit_signal)}"
    return f", with exit code {line.exit_code}" if line.exit_code else ""


def _note_memory(line: UsageLine, efficiency: Efficiency) -> Iterator[Note]:
    """Yield notes on memory efficiency."""
    share, used = efficiency.memory, efficiency.memory_used_bytes
    allocated = efficiency.memory_allocated_bytes
    if share is None or used is None or allocated is None or line.state == "OUT_OF_MEMORY":
        return
    amount = f"{format_size(used)} of {format_size(allocated)} ({share:.0%})"
    location = f" on {efficiency.memory_node}" if efficiency.memory_node else ""
    if share > MEMORY_HIGH:
        words = f"Memory nearly ran out: {amount} was in use{location}."
        largest = line.max_rss_bytes
        if largest is not None and largest < used / 2:
            words += (
                f" Cached files may be part of it: the largest process used {format_size(largest)}."
            )
        yield Note(kind="memory-high", words=words)
    elif efficiency.at_least or efficiency.memory_at_least or line.state not in _WHOLE:
        return
    elif share < MEMORY_LOW:
        words = f"The memory request was too high: at most {amount}{location} was used."
        yield Note(kind="memory-low", words=words)


def _note_cpus(line: UsageLine, efficiency: Efficiency) -> Iterator[Note]:
    """Yield notes on CPU efficiency."""
    share, used, elapsed = efficiency.cpu, efficiency.cpu_used_s, efficiency.elapsed_s
    if share is None or used is None or not elapsed or efficiency.at_least:
        return
    busy = used / elapsed
    if line.cpus >= _SERIAL_CPUS and _BUSY <= busy <= _ONE_CPU:
        yield Note(
            kind="serial",
            words=f"The job was serial on {line.cpus} CPUs: {busy:.1f} of them were busy on "
            "average. Request one, or check that the program starts its threads or tasks.",
        )
    elif share < CPU_LOW:
        yield Note(
            kind="cpu-low",
            words=f"CPUs were idle: {busy:.1f} of {line.cpus} were busy on average ({share:.0%}).",
        )


def _note_time(line: UsageLine, efficiency: Efficiency) -> Iterator[Note]:
    """Yield notes on the time limit."""
    share, limit, elapsed = efficiency.time, efficiency.limit_s, efficiency.elapsed_s
    if share is None or line.state != "COMPLETED":
        return
    comparison = f"it ran {format_duration(elapsed)} of {format_duration(limit)}"
    if share < _TIME_LOW:
        words = f"The time limit was too high: {comparison}. Jobs with lower limits start earlier."
        yield Note(kind="time-low", words=words)
    elif share > _TIME_HIGH:
        yield Note(
            kind="time-high",
            words=f"The job nearly reached its time limit: {comparison} ({share:.0%}).",
        )


def _note_balance(steps: Sequence[StepPart]) -> Iterator[Note]:
    """Yield notes on steps with uneven tasks."""
    for step in steps:
        line, balance = step.line, step.balance
        ran_s = (line.end_us - line.start_us) / 1e6 if line.end_us and line.start_us else 0.0
        if balance is None or ran_s < _LEAST_RUN_S or is_doubtful(line):
            continue
        if balance.ratio >= _IMBALANCE:
            yield Note(
                kind="imbalance",
                step=line.step,
                words=f"The load of the tasks of step {line.step} was uneven: "
                f"task {balance.busiest} used {format_duration(balance.busiest_s)} of CPU time, "
                f"the mean was {format_duration(balance.mean_s)}, task {balance.idlest} used "
                f"{format_duration(balance.idlest_s)}.",
            )


def format_size(count: float) -> str:
    """Format a size for people, in binary units: ``812 bytes``, ``1.2 GiB``."""
    amount = float(count)
    for unit in _SIZES:
        if amount < 999.5 or unit == _SIZES[-1]:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("the loop ends at its last unit")


def format_duration(seconds: float | None) -> str:
    """Format a duration for people: ``3.5 ms``, ``0.35 s``, ``12.3 s``, ``5m 20s``, ``3h 05m``.

    Whole seconds have no decimals, because Slurm counts a run's time in them.
    """
    if seconds is None:
        return "?"
    if 0 < seconds < 0.1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60 and seconds == int(seconds):
        return f"{seconds:.0f} s"
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    days, hours = whole // 86400, whole % 86400 // 3600
    return f"{days}d {hours:02}h" if hours else f"{days}d"


def format_run_time(seconds: float | None) -> str:
    """Format the run time of a job, which Slurm counts in whole seconds.

    ``less than 1 s``, ``3 s``.
    """
    return "less than 1 s" if seconds == 0 else format_duration(seconds)
