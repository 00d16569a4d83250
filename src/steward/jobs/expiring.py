"""What accounting.expire does to jobs.db: the books of old jobs are forgotten, their scripts not.

A job with a script of its own keeps its row and its runs, for the archive asks
whose the script is; a mark on them says that there are no lines any more.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.core.events import Event, JobFacts
from steward.core.moments import micros
from steward.core.sqlite import Connection
from steward.jobs.adding import run_key
from steward.jobs.facts import IMPORTED
from steward.jobs.tables import EXPIRED, OF_NO_JOB, Group, Told
from steward.slurm.states import FINISHED, base_state

_ENDED: Final = """
    FROM job WHERE job.cluster = ? AND job.ended = 1
    AND coalesce(job.end_time, job.submit, job.first_submit) < ?
    AND EXISTS (SELECT 1 FROM run WHERE run.cluster = job.cluster AND run.job_id = job.job_id
                AND run.job = job.number AND coalesce(run.told, x'') <> ?)
"""
_MARK: Final = msgspec.json.encode(Told(basis=EXPIRED))


def expirable(connection: Connection, cluster: str, before: datetime) -> int:
    """How many jobs of a cluster :func:`expire` would forget."""
    (count,) = connection.execute(
        f"SELECT count(*) {_ENDED}",
        (cluster, micros(before), _MARK),
    ).fetchone()
    return int(count)


def take_out(
    connection: Connection, cluster: str, group: Group, events: Sequence[Event]
) -> Sequence[Event]:
    """What of the news of an id is not of runs that were forgotten, or would have been by now.

    A fact that comes late would else begin the run anew, and all would be said of it again.
    What an import brings in was asked for, and runs that are known know themselves.

    Args:
        connection: jobs.db.
        cluster: The cluster's name.
        group: What is known of the id.
        events: The news.
    """
    ends = {
        run_key(event): event.body.record.end
        for event in events
        if isinstance(event.body, JobFacts) and _tells_end(event, group)
    }
    unknown = {key: micros(end) for key, end in ends.items() if key not in group.runs and end}
    if not unknown:
        return events
    (before_us,) = connection.execute(
        "SELECT coalesce(max(before), 0) FROM expired WHERE cluster = ?", (cluster,)
    ).fetchone()
    gone = {key for key, end_us in unknown.items() if end_us < before_us}
    return [
        event
        for event in events
        if not isinstance(event.body, JobFacts)
        or event.source == IMPORTED
        or run_key(event) not in gone
    ]


def _tells_end(event: Event, group: Group) -> bool:
    if event.source == IMPORTED or event.body.record.end is None:
        return False
    state = base_state(event.body.record.state)
    # A job of which other runs are known goes on.
    return state in FINISHED or (state == "REQUEUED" and not group.runs)


def expire(connection: Connection, cluster: str, before: datetime) -> int:
    """Forget jobs that ended before a time, inside a transaction; returns how many."""
    # Whoever asks for lines from before it has to look in the job log's closed days, too.
    connection.execute(
        "INSERT INTO expired VALUES (?, ?) ON CONFLICT (cluster) "
        "DO UPDATE SET before = max(before, excluded.before)",
        (cluster, micros(before)),
    )
    jobs = connection.execute(
        f"SELECT job.number, job.job_id, job.script_key IS NOT NULL {_ENDED}",
        (cluster, micros(before), _MARK),
    ).fetchall()
    for number, job_id, has_script in jobs:
        runs = connection.execute(
            "SELECT number, submit, restarts FROM run WHERE cluster = ? AND job_id = ? AND job = ?",
            (cluster, job_id, number),
        ).fetchall()
        for run, submit_us, restarts in runs:
            key = (cluster, job_id, submit_us)
            for table, column in (("line", "submit_us"), ("launch", "submit")):
                connection.execute(
                    f"DELETE FROM {table} WHERE cluster = ? AND job_id = ? "  # noqa: S608 -- our own names
                    f"AND {column} = ? AND restarts = ?",
                    (*key, restarts),
                )
            connection.execute(
                "DELETE FROM accounted WHERE cluster = ? AND job_id = ? AND submit = ?", key
            )
            if has_script:
                connection.execute("UPDATE run SET told = ? WHERE number = ?", (_MARK, run))
            else:
                connection.execute("DELETE FROM run WHERE number = ?", (run,))
        if not has_script:
            connection.execute("DELETE FROM job WHERE number = ?", (number,))
    connection.execute(
        "DELETE FROM run WHERE cluster = ? AND job = ? AND submit < ?",
        (cluster, OF_NO_JOB, micros(before)),
    )
    connection.execute("DELETE FROM gap WHERE cluster = ? AND at < ?", (cluster, micros(before)))
    connection.execute("DELETE FROM missed WHERE cluster = ? AND at < ?", (cluster, micros(before)))
    connection.execute(
        "DELETE FROM launch WHERE cluster = ? AND submit IS NULL AND launched < ?",
        (cluster, micros(before)),
    )
    return len(jobs)
