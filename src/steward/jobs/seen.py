"""One observation of a run, and which counts of several that tell of its end."""

from typing import Final

import msgspec

from steward.core.moments import micros
from steward.core.records import JobRecord

REQUEUED: Final = "REQUEUED"
PREEMPTED: Final = "PREEMPTED"
OWN: Final = 2
"""How much the books count that slurmctld writes to us."""
_NEVER: Final = 2**62
_SLACK_US: Final = 2_000_000

# What the purge of a script takes from its job: all that a person wrote.
PRIVATE: Final = dict.fromkeys(
    [
        "name",
        "submit_host",
        "submit_line",
        "command",
        "work_dir",
        "stdin",
        "stdout",
        "stderr",
        "comment",
        "admin_comment",
        "system_comment",
        "extra",
        "container",
        "dependency",
    ],
    "",
)


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """One observation.

    Attributes:
        at_us: When the source saw it, µs since the epoch.
        key: The event's key, to break ties.
        record: What was seen.
        of_books: Whether it is what slurmctld wrote down at the end; :data:`OWN` where it
            wrote it to us, and not to another's books.
    """

    at_us: int
    key: str
    record: JobRecord
    of_books: bool | int = False

    def stamp(self) -> tuple[int, str]:
        """Its place in the order of observations."""
        return self.at_us, self.key

    def blanked(self) -> "Seen":
        """The same without what a person wrote."""
        return Seen(self.at_us, self.key, blanked(self.record), self.of_books)


def blanked(record: JobRecord) -> JobRecord:
    """The record without what a person wrote: ids, times and the uid stay, for the books."""
    return msgspec.structs.replace(record, **PRIVATE)


def end_of(final: Seen | None, requeued: Seen | None, preempted: Seen | None) -> Seen | None:
    """What tells how a run ended.

    Args:
        final: The earliest that says that it ended by itself, failed or was cancelled.
        requeued: The latest that says that it ended with a requeue.
        preempted: The latest that says that it was preempted.
    """
    # One that was preempted for good may be requeued after its end, which is told once more.
    cut = preempted if requeued is None else earlier(preempted, requeued)
    if final is None or cut is None or final.record.end is None:
        return cut or final
    # Two ends that slurmctld wrote to us are two, be they a second apart.
    is_ours = min(final.of_books, cut.of_books) == OWN
    if cut.record.end is None or end_us(final) > end_us(cut) + (0 if is_ours else _SLACK_US):
        # It went on: a slurmctld that was killed forgot that it had cut it off.
        return final
    return earlier(final, cut)


def earlier(one: Seen | None, other: Seen) -> Seen:
    """Of two observations of an end that which tells the earlier one."""
    if one is None:
        return other
    then_us, now_us = end_us(one), end_us(other)
    return other if now_us < then_us or (now_us == then_us and _is_better(other, one)) else one


def later(one: Seen | None, other: Seen) -> Seen:
    """Of two observations that it was cut off that which tells the later one.

    It went on in between: a slurmctld that was killed forgot the first.
    """
    if one is None:
        return other
    then, now = (-1 if seen.record.end is None else end_us(seen) for seen in (one, other))
    return other if now > then or (now == then and _is_better(other, one)) else one


def _is_better(one: Seen, other: Seen) -> bool:
    """Of the same end told twice: the later one knows more, but that the books are right."""
    return (one.of_books, one.stamp()) > (other.of_books, other.stamp())


def end_us(seen: Seen) -> int:
    """When it says that it ended, µs since the epoch; later than anything if it does not."""
    return _NEVER if seen.record.end is None else micros(seen.record.end)
