"""Run merging: combine the observations of a run into one job record.

:class:`Observation` is one observation from one source. :func:`choose_end` chooses among several
reports of an end. :class:`RunFacts` keeps what matters of all observations of a run, in whatever
order they arrive, and merges them into a record; :func:`merge_runs` builds the record of a job from
its runs.

Times ending in ``_us`` are µs since the epoch. Reports that slurmctld wrote at the end (jobcomp,
slurmdbd) take precedence over polls for the same end.
"""

from functools import cached_property
from typing import Final

import msgspec

from steward.core.events import JOB_END, Event, JobFacts
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.slurm.job_states import FINISHED, FORGOTTEN, RESIZING, strip_state_suffix

REQUEUED: Final = "REQUEUED"
PREEMPTED: Final = "PREEMPTED"
OWN_RANK: Final = 2
"""Rank of reports that slurmctld writes to Steward (jobcomp), above other accounting."""
_NEVER: Final = 2**62
_SLACK_US: Final = 2_000_000

# Text written by people, which a purge of the script removes from the job.
PRIVATE_TEXT: Final = dict.fromkeys(
    [
        *("name", "submit_host", "submit_line", "command", "work_dir", "stdin", "stdout", "stderr"),
        *("comment", "admin_comment", "system_comment", "extra", "container", "dependency"),
    ],
    "",
)


class Observation(msgspec.Struct, frozen=True, array_like=True):
    """Observation of a run by one source.

    Attributes:
        at_us: Time of the observation, µs since the epoch.
        key: The event's key, to break ties.
        record: The observed record.
        rank: Whether slurmctld wrote it down at the end; :data:`OWN_RANK` if it wrote it to Steward
            rather than to other accounting.
    """

    at_us: int
    key: str
    record: JobRecord
    rank: bool | int = False

    def get_sort_key(self) -> tuple[int, str]:
        """Return the sort key of observations."""
        return self.at_us, self.key

    def without_private_text(self) -> "Observation":
        """Return the observation without private text."""
        return Observation(self.at_us, self.key, remove_private_text(self.record), self.rank)


def remove_private_text(record: JobRecord) -> JobRecord:
    """Return a record without private text; ids, times and the uid stay for accounting."""
    return msgspec.structs.replace(record, **PRIVATE_TEXT)


def choose_end(
    final: Observation | None, requeued: Observation | None, preempted: Observation | None
) -> Observation | None:
    """Return the observation that tells how a run ended.

    Args:
        final: The earliest report that it completed, failed or was cancelled.
        requeued: The latest report that it ended with a requeue.
        preempted: The latest report that it was preempted.
    """
    # A job preempted for good may be requeued after its end, which is then reported again.
    interruption = preempted if requeued is None else choose_earlier_end(preempted, requeued)
    if final is None or interruption is None or final.record.end is None:
        return interruption or final
    # Two ends that slurmctld wrote to Steward are distinct, even if a second apart.
    are_both_own = min(final.rank, interruption.rank) == OWN_RANK
    if interruption.record.end is None or get_end_us(final) > get_end_us(interruption) + (
        0 if are_both_own else _SLACK_US
    ):
        # It went on: a killed slurmctld forgot the preemption or requeue.
        return final
    return choose_earlier_end(final, interruption)


def choose_earlier_end(current: Observation | None, candidate: Observation) -> Observation:
    """Return the observation with the earlier end."""
    if current is None:
        return candidate
    current_us, candidate_us = get_end_us(current), get_end_us(candidate)
    return (
        candidate
        if candidate_us < current_us
        or (candidate_us == current_us and _is_preferred(candidate, current))
        else current
    )


def choose_later_end(current: Observation | None, candidate: Observation) -> Observation:
    """Return the observation of an interruption with the later end.

    The run went on in between, because a killed slurmctld forgot the first interruption.
    """
    if current is None:
        return candidate
    current_us, candidate_us = (
        -1 if observation.record.end is None else get_end_us(observation)
        for observation in (current, candidate)
    )
    return (
        candidate
        if candidate_us > current_us
        or (candidate_us == current_us and _is_preferred(candidate, current))
        else current
    )


def _is_preferred(candidate: Observation, current: Observation) -> bool:
    """Compare two reports of the same end: accounting wins, then the later report."""
    return (candidate.rank, candidate.get_sort_key()) > (current.rank, current.get_sort_key())


def get_end_us(observation: Observation) -> int:
    """Return the end time of an observation, µs since the epoch; a very late time if none."""
    return _NEVER if observation.record.end is None else to_micros(observation.record.end)


# Includes the states that sacct shows for earlier runs of a requeued job.
_FINAL: Final = FINISHED | {"LAUNCH_FAILED", "RECONFIG_FAIL", REQUEUED}
# States of an end record that is not an end: a piece of a resized job, with its expected end.
_UNDECIDED: Final = frozenset({"", "COMPLETING", "PENDING", RESIZING, "RUNNING", "SUSPENDED"})

COMPLETE: Final = "whole"
"""Stands for all sources of complete records, which agree with each other."""

# Sources about the past: their report does not mean that Slurm still has the job.
_PAST_SOURCES: Final = frozenset({"import", "sacct", "slurmdbd"})
_SLURMDBD: Final = frozenset({"sacct", "slurmdbd"})
# Sources about the past that surely mean the job that had the id at the event's time.
_DATED: Final = frozenset({"kafka"})

# Reports that slurmctld wrote at the end have the exit code that sacct shows; a later poll of a
# cancelled job shows the signal that its script got.
_ACCOUNTING_SOURCES: Final = frozenset({"jobcomp", "sacct", "slurmdbd"})
_OWN_SOURCE: Final = "jobcomp"
IMPORTED: Final = "slurmdbd"
"""Source of events from an import of other accounting."""

_MAX_SUSPENSIONS: Final = 64
_MAX_REPEATED_ENDS: Final = 8

_DEFAULTS: Final = JobRecord(job_id=0)
_FIELDS: Final = JobRecord.__struct_fields__
_UNKNOWN: Final = msgspec.structs.astuple(_DEFAULTS)
_OF_ONE_RUN: Final = frozenset(
    {
        *("job_id", "restarts", "sluid", "user", "state", "reason", "priority", "dependency"),
        *("submit", "eligible", "start", "end", "suspended_at", "suspended_s", "resized_at"),
        *("tres_allocated", "nodelist", "batch_host", "failed_node", "oversubscribe"),
        *("exit_code", "exit_signal", "derived_exit_code", "derived_exit_signal", "cancelled_by"),
    }
)
# Fields that stay the same from run to run, so that an earlier run may supply them.
_LASTING: Final = tuple(
    (field, getattr(_DEFAULTS, field)) for field in _FIELDS if field not in _OF_ONE_RUN
)


class RunFacts(msgspec.Struct, array_like=True, dict=True):
    """Observations of one run, reduced to what is needed to merge them.

    Attributes:
        submit_us: Submit time of the run, µs since the epoch.
        restarts: Its restart count.
        observations: The latest complete record, under WHOLE, and by source the latest partial
            record that is newer.
        final: Report of its end; of several the one with the earliest end. Interruptions are in
            ``requeued`` and ``preempted``.
        late_end_us: The latest end reported as final.
        confirmed_until_us: Until when the job surely had its id: Slurm showed it then, or it ended
            then.
        user: The first name that its uid resolved to.
        user_at: Time of that observation (µs), and the event's key.
        pieces: Former sizes of a resized job, by end time (s since the epoch).
        has_own_source: Whether any source but an import reported it.
        cancelled_by: Uid that cancelled it, from any source.
        suspensions: Suspended seconds in total, by time of suspension or resumption (s since the
            epoch): the latest ones, and the last one of each former size.
        requeued: Report that it ended with a requeue; of several the one with the latest end.
        preempted: Likewise for a preemption, after which the job may be over or not.
        repeated_ends: Ends at times other than its own, by start (s since the epoch): a killed
            slurmctld forgot one and started the run again.
    """

    submit_us: int
    restarts: int
    observations: dict[str, Observation] = msgspec.field(default_factory=dict)
    final: Observation | None = None
    late_end_us: int = -1
    confirmed_until_us: int = 0
    user: str = ""
    user_at: tuple[int, str] = (_NEVER, "")
    pieces: dict[int, Observation] = msgspec.field(default_factory=dict)
    has_own_source: bool = False
    cancelled_by: int | None = None
    suspensions: dict[int, int] = msgspec.field(default_factory=dict)
    requeued: Observation | None = None
    preempted: Observation | None = None
    repeated_ends: dict[int, Observation] = msgspec.field(default_factory=dict)

    def add(self, event: Event) -> None:
        """Add one observation of this run (a JobFacts event), in any order."""
        self.__dict__.pop("_merged", None)
        facts: JobFacts = event.body
        record = facts.record
        observation = Observation(
            to_micros(event.seen_at), event.key, record, _rank_source(event.source)
        )
        if record.cancelled_by is not None:
            self.cancelled_by = max(record.cancelled_by, self.cancelled_by or 0)
        if record.suspended_at is not None and record.suspended_s is not None:
            self._add_suspension(to_micros(record.suspended_at) // 1_000_000, record.suspended_s)
        sort_key = observation.get_sort_key()
        if event.source == IMPORTED:
            # All other sources take precedence over an import.
            observation = Observation(0, event.key, record)
        else:
            self.has_own_source = True
        if event.kind == JOB_END and strip_state_suffix(record.state) == RESIZING:
            self._add_piece(event, observation)
            return
        self._add_latest(COMPLETE if facts.whole else event.source, observation)
        if record.user and sort_key < self.user_at:
            self.user, self.user_at = record.user, sort_key
        shown_us = -1 if event.source in _PAST_SOURCES else observation.at_us
        if event.source in _DATED:
            shown_us = to_micros(event.at)
        if _is_final(event.kind, record):
            self._add_final(observation)
            shown_us = -1 if record.end is None else to_micros(record.end)
        self.confirmed_until_us = max(self.confirmed_until_us, shown_us)

    def _add_piece(self, event: Event, observation: Observation) -> None:
        """Add the end of a former size of a resized job."""
        # Some sources give a piece the expected end of the job.
        end = min(observation.record.end or event.at, event.at)
        # Only slurmdbd gives the suspended time of the piece; others give the whole run's.
        suspended_s = observation.record.suspended_s if event.source in _SLURMDBD else None
        end_s = to_micros(end) // 1_000_000
        previous = self.pieces.get(end_s)
        if previous is not None:
            suspended_s = _max_known(suspended_s, previous.record.suspended_s)
        if previous is not None and previous.get_sort_key() <= observation.get_sort_key():
            observation = previous
        record = msgspec.structs.replace(observation.record, end=end, suspended_s=suspended_s)
        self.pieces[end_s] = Observation(observation.at_us, observation.key, record, True)
        self.pieces = dict(sorted(self.pieces.items()))
        self.confirmed_until_us = max(self.confirmed_until_us, to_micros(end))

    def _add_suspension(self, moment_s: int, suspended_s: int) -> None:
        """Add a suspension or resumption; keep a limited number."""
        suspensions = self.suspensions | {
            moment_s: max(suspended_s, self.suspensions.get(moment_s, 0))
        }
        kept_times = sorted(suspensions)[-_MAX_SUSPENSIONS:]
        if len(suspensions) > len(kept_times):
            # Gang-scheduled jobs are suspended every half minute.
            times_by_piece = [
                [time_s for time_s in suspensions if time_s <= end] for end in self.pieces
            ]
            kept_times += [max(piece_times) for piece_times in times_by_piece if piece_times]
        self.suspensions = {time_s: suspensions[time_s] for time_s in sorted(set(kept_times))}

    def count_suspended_s(self, moment_us: int) -> int:
        """Return the suspended time up to a moment (µs), in seconds, as far as known."""
        return max(
            (
                total_s
                for time_s, total_s in self.suspensions.items()
                if time_s * 1_000_000 <= moment_us
            ),
            default=0,
        )

    def _add_latest(self, source: str, observation: Observation) -> None:
        """Keep an observation if it is the latest of its source."""
        previous = self.observations.get(source)
        if previous is None or previous.get_sort_key() < observation.get_sort_key():
            self.observations[source] = observation
        if len(self.observations) > 1:
            # A complete record supersedes all older ones. Sort, so that the stored form does not
            # depend on the order of arrival.
            complete = self.observations.get(COMPLETE)
            self.observations = {
                name: other
                for name, other in sorted(self.observations.items())
                if complete is None
                or other is complete
                or other.get_sort_key() > complete.get_sort_key()
            }

    def _add_final(self, observation: Observation) -> None:
        """Add a report of an end."""
        if observation.record.end is not None:
            self.late_end_us = max(self.late_end_us, to_micros(observation.record.end))
        previous = (self.final, self.requeued, self.preempted, *self.repeated_ends.values())
        state = strip_state_suffix(observation.record.state)
        if state == REQUEUED:
            self.requeued = choose_later_end(self.requeued, observation)
        elif state == PREEMPTED:
            self.preempted = choose_later_end(self.preempted, observation)
        else:
            self.final = choose_earlier_end(self.final, observation)
        self._keep_repeated_ends([observation, *(end for end in previous if end is not None)])

    def _keep_repeated_ends(self, ends: "list[Observation]") -> None:
        """Keep the ends at times other than the run's own: it also ran then."""
        by_start: dict[int, Observation] = {}
        for observation in ends:
            start, end = observation.record.start, observation.record.end
            if (
                start is not None
                and end is not None
                and start < end
                and observation.record.nodelist
            ):
                start_s = to_micros(start) // 1_000_000
                by_start[start_s] = choose_earlier_end(by_start.get(start_s), observation)
        repeated: dict[int, Observation] = {}
        own_ends = [] if self.ending is None else [self.ending]
        for start_s, observation in sorted(by_start.items()):
            if own_ends and all(
                _is_apart(observation.record, other.record)
                for other in [*own_ends, *repeated.values()]
            ):
                repeated[start_s] = observation
        self.repeated_ends = dict(list(repeated.items())[:_MAX_REPEATED_ENDS])

    @property
    def ending(self) -> Observation | None:
        """Observation of its end; None if it has not ended."""
        final = choose_end(self.final, self.requeued, self.preempted)
        if final is None or final.record.end is not None:
            return final
        # No source saw the end, the job was only gone; a later observation revokes that.
        return None if self._is_back_after(final) else final

    def _is_back_after(self, disappearance: Observation) -> bool:
        """Return True if the job was observed again after it seemed gone."""
        return any(
            observation.get_sort_key() > disappearance.get_sort_key()
            and strip_state_suffix(observation.record.state) in _UNDECIDED
            for observation in self.observations.values()
        )

    @property
    def is_lost(self) -> bool:
        """Whether Slurm no longer has a job that a requeue put back into the queue.

        A killed slurmctld forgot it, or the run that followed.
        """
        ending, disappearance = self.ending, self.final
        return (
            ending is not None
            and strip_state_suffix(ending.record.state) == REQUEUED
            and disappearance is not None
            and disappearance.record.end is None
            and disappearance.record.reason != FORGOTTEN
            and not self._is_back_after(disappearance)
        )

    @property
    def is_forgotten(self) -> bool:
        """Whether Slurm forgot its submission; then it is not a run of its job."""
        ending = self.ending
        return ending is not None and ending.record.reason == FORGOTTEN and not ending.record.start

    @property
    def end_us(self) -> int:
        """End time, µs since the epoch; -1 if it has not ended or the time is unknown."""
        ending = self.ending
        return -1 if ending is None or ending.record.end is None else get_end_us(ending)

    @property
    def is_over(self) -> bool:
        """Whether the job ended with this run: it is final and was not requeued."""
        ending = self.ending
        if ending is None:
            return False
        return strip_state_suffix(ending.record.state) != REQUEUED or self.is_lost

    def merge_record(self) -> JobRecord:
        """Return the record of this run, merged from all observations."""
        return self._merged

    @cached_property
    def _merged(self) -> JobRecord:
        """Merged record, cached until the next observation."""
        record = self._merge_observations()
        ending = self.ending
        if ending is not None:
            latest = record
            record = _update_record(record, ending.record)
            if self.is_lost and self.final is not None:
                record = msgspec.structs.replace(record, state=self.final.record.state)
            if latest.reason and latest.state == ending.record.state and not record.reason:
                # Accounting records have no reasons.
                record = msgspec.structs.replace(record, reason=latest.reason)
            if self.cancelled_by is not None and strip_state_suffix(record.state) == "CANCELLED":
                record = msgspec.structs.replace(record, cancelled_by=self.cancelled_by)
            if _get_derived_exit(latest) > _get_derived_exit(record):
                # A step may end after its job's end was recorded.
                record = msgspec.structs.replace(
                    record,
                    derived_exit_code=latest.derived_exit_code,
                    derived_exit_signal=latest.derived_exit_signal,
                )
            if _is_refused(record):
                record = msgspec.structs.replace(record, exit_code=1, exit_signal=0)
        return (
            record if record.user == self.user else msgspec.structs.replace(record, user=self.user)
        )

    def _merge_observations(self) -> JobRecord:
        """Return the record merged from observations, without the end."""
        by_time = sorted(self.observations.values(), key=Observation.get_sort_key)
        if not by_time:
            # Only pieces are known: it went on after the last of them.
            last = list(self.pieces.values())[-1].record
            return msgspec.structs.replace(last, state="RUNNING", end=None)
        record = by_time[0].record
        for newer in by_time[1:]:
            record = _update_record(record, newer.record)
        return record

    def blank_private_text(self) -> None:
        """Remove private text from every observation."""
        self.__dict__.pop("_merged", None)
        self.observations = {
            name: observation.without_private_text()
            for name, observation in self.observations.items()
        }
        self.pieces = {
            time_s: observation.without_private_text()
            for time_s, observation in self.pieces.items()
        }
        self.repeated_ends = {
            time_s: observation.without_private_text()
            for time_s, observation in self.repeated_ends.items()
        }
        if self.final is not None:
            self.final = self.final.without_private_text()
        if self.requeued is not None:
            self.requeued = self.requeued.without_private_text()
        if self.preempted is not None:
            self.preempted = self.preempted.without_private_text()


def merge_runs(runs: "list[RunFacts]") -> JobRecord:
    """Return the record of a job: its last run's, completed from earlier runs.

    Args:
        runs: The job's runs, first to last; at least one.
    """
    last = runs[-1].merge_record()
    if len(runs) == 1:
        return last
    changes: dict[str, object] = {}
    for run in reversed(runs[:-1]):
        earlier = run.merge_record()
        for field, default in _LASTING:
            if field not in changes and getattr(last, field) == default:
                value = getattr(earlier, field)
                if value != default:
                    changes[field] = value
    # The SLUID of the first run, whatever was reported for a later one.
    originals = [run.merge_record().original_sluid for run in runs]
    changes["original_sluid"] = next(filter(None, originals), "")
    # The submitter is the first name that the uid resolved to.
    changes["user"] = min(runs, key=lambda run: run.user_at).user
    return msgspec.structs.replace(last, **changes)


def fill_from_earlier_run(record: JobRecord, earlier: JobRecord) -> JobRecord:
    """Complete a run's record with unchanging fields from an earlier run.

    Args:
        record: The run's own record.
        earlier: Record of the run before, completed in the same way.
    """
    changes: dict[str, object] = {
        field: value
        for field, default in _LASTING
        if getattr(record, field) == default and (value := getattr(earlier, field)) != default
    }
    changes["user"] = earlier.user or record.user
    changes["original_sluid"] = earlier.original_sluid or record.original_sluid
    return msgspec.structs.replace(record, **changes)


def _rank_source(source: str) -> bool | int:
    """Return the rank of a source's end reports."""
    return OWN_RANK if source == _OWN_SOURCE else source in _ACCOUNTING_SOURCES


def _max_known(first: int | None, second: int | None) -> int | None:
    """Return the larger of two values, of which either may be None."""
    return max((value for value in (first, second) if value is not None), default=None)


def _get_derived_exit(record: JobRecord) -> tuple[int, int]:
    """Return the derived exit code and signal; 0 if unknown."""
    return record.derived_exit_code or 0, record.derived_exit_signal or 0


def _is_refused(record: JobRecord) -> bool:
    """Return True if a run never ran and its "signal" is only slurmctld's mark for a refused start.

    slurmctld sets a wait status of 1, which reads as SIGHUP; slurmdbd takes it for exit code 1.
    """
    never_ran = not record.nodelist and (record.start is None or record.start == record.end)
    return never_ran and record.exit_signal == 1 and not record.exit_code


def _is_apart(first: JobRecord, second: JobRecord) -> bool:
    """Return True if two ends belong to different runs; an end without times belongs to any.

    Two ends with one start belong to one run, even if it ended in the second of its start.
    """
    if first.start is None or first.end is None or second.start is None or second.end is None:
        return False
    return first.start != second.start and (first.end <= second.start or second.end <= first.start)


def _is_final(kind: str, record: JobRecord) -> bool:
    """Return True if a record reports an end."""
    state = strip_state_suffix(record.state)
    return state in _FINAL or (kind == JOB_END and state not in _UNDECIDED)


def _update_record(older: JobRecord, newer: JobRecord) -> JobRecord:
    """Return ``older`` updated with all known fields of ``newer``."""
    values = zip(_FIELDS, _UNKNOWN, msgspec.structs.astuple(newer), strict=True)
    changes = {
        field: value
        for field, default, value in values
        if value is not default and value != default
    }
    for identity_field in ("job_id", "restarts", "submit"):
        changes.pop(identity_field, None)
    if newer.state:
        # The reason belongs to the state, so an empty reason replaces the old one.
        changes["reason"] = newer.reason
    return msgspec.structs.replace(older, **changes)
