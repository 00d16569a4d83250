"""What archive.purge does to jobs.db: scripts are forgotten, and what people wrote of the job.

Ids, times and the uid stay, for the books. Of a script stays a row with its job
id and its time alone: it keeps the jobs of a re-used id apart, and the private
text away when Slurm tells it again. Where a purge comes before its script, as it
may out of a topic, the row is made then, and the script finds its place taken.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from steward.core.events import JobScript
from steward.core.records import JobRecord
from steward.core.sqlite import Connection
from steward.jobs.names import MAX_JOB_ID
from steward.jobs.resolve import PROMPT_US, Resolved
from steward.jobs.tables import Group, ScriptRow, load

_KEY: Final = re.compile(r"script:([1-9][0-9]{0,9}):(0|[1-9][0-9]{0,18})")
"""As ``steward.core.events.script_key`` makes it."""

_encode = msgspec.json.Encoder().encode


def leader_of(record: JobRecord) -> int:
    """The id whose script the job runs: its array's or het leader's; its own for others."""
    return record.array_job_id or record.het_job_id or record.job_id


def forget_scripts(
    connection: Connection, cluster: str, keys: Sequence[str], limit: int
) -> Iterator[list[Group]]:
    """Mark scripts as purged in their groups.

    Args:
        connection: jobs.db, inside a transaction.
        cluster: The cluster's name.
        keys: Keys of job.script events; those that are none are passed over.
        limit: How many groups to hold in memory at a time.

    Yields:
        Groups that are to be resolved and written again: those of the scripts, and after
        them those of the tasks and components that run them.
    """
    rows = connection.execute(
        "SELECT key, job_id, spool_mtime_ns FROM script WHERE cluster = ? "
        "AND key IN (SELECT value FROM json_each(?))",
        (cluster, _encode(list(keys)).decode()),
    )
    wanted = {key: parsed for key in keys if (parsed := parsed_key(key)) is not None}
    wanted |= {key: (job_id, mtime_ns) for key, job_id, mtime_ns in rows}
    job_ids = list({job_id for job_id, _ in wanted.values()})
    groups = load(connection, cluster, job_ids)
    for key, (job_id, mtime_ns) in wanted.items():
        scripts = groups[job_id].scripts
        body = _encode(JobScript(job_id=job_id, spool_mtime_ns=mtime_ns))
        row = scripts.setdefault(key, ScriptRow(key, mtime_ns))
        row.purged, row.is_dirty, row.said, row.body = True, True, None, body
    yield list(groups.values())
    parts = _parts(connection, cluster, job_ids)
    for start in range(0, len(parts), limit):
        yield list(load(connection, cluster, parts[start : start + limit]).values())


def parsed_key(key: str) -> tuple[int, int] | None:
    """Job id and time in the spool (ns) of a script, by its key; None if it is no such key."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    job_id, mtime_ns = int(found[1]), int(found[2])
    return (job_id, mtime_ns) if job_id <= MAX_JOB_ID and mtime_ns < 2**63 else None


def _parts(connection: Connection, cluster: str, leaders: Sequence[int]) -> list[int]:
    """Ids of the array tasks and het components of these leaders."""
    ids = _encode(list(leaders)).decode()
    rows = connection.execute(
        "SELECT job_id FROM job WHERE cluster = :cluster AND job_id <> array_job_id "
        "AND array_job_id IN (SELECT value FROM json_each(:ids)) UNION "
        "SELECT job_id FROM job WHERE cluster = :cluster AND job_id <> het_job_id "
        "AND het_job_id IN (SELECT value FROM json_each(:ids))",
        {"cluster": cluster, "ids": ids},
    )
    return [job_id for (job_id,) in rows]


class Leaders:
    """Knows of which tasks and components the leader's script was purged.

    Args:
        connection: jobs.db.
        cluster: The cluster's name.
    """

    def __init__(self, connection: Connection, cluster: str) -> None:
        self._connection = connection
        self._cluster = cluster
        self._scripts: dict[int, list[tuple[int, bool]]] = {}

    def look_up(self, records: Iterable[JobRecord | None]) -> None:
        """Read, in one query, what is known of the leaders of these jobs."""
        leaders = {
            leader
            for record in records
            if record is not None and (leader := leader_of(record)) != record.job_id
        }
        if not leaders:
            return
        rows = self._connection.execute(
            "SELECT job_id, spool_mtime_ns / 1000, purged FROM script WHERE cluster = ? "
            "AND job_id IN (SELECT value FROM json_each(?)) ORDER BY spool_mtime_ns",
            (self._cluster, _encode(list(leaders)).decode()),
        )
        for job_id, mtime_us, purged in rows:
            self._scripts.setdefault(job_id, []).append((mtime_us, bool(purged)))

    def is_purged(self, job: Resolved) -> bool:
        """Whether the script that the job ran was purged."""
        if any(script.purged for script in job.scripts):
            return True
        if job.record is None:
            return False
        scripts = self._scripts.get(leader_of(job.record), ())
        then = [purged for at_us, purged in scripts if at_us <= job.first_submit_us + PROMPT_US]
        return bool(then) and then[-1]
