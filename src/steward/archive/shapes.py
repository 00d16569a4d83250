"""The nouns of the archive's requests and answers: which jobs, one job, one script, some bytes.

They are part of every shape in ``answers.py`` and ``bulk_answers.py``, and of
the same promise: fields are only ever added, with defaults.
"""

from datetime import datetime
from typing import Literal

from steward.core.actions import Request, Shape


class Selection(Request, frozen=True, kw_only=True):
    """Which jobs are meant. Every filter that is given must hold; of its values, any.

    Attributes:
        clusters: Names of clusters; all of them if empty.
        users: User names or uids.
        accounts: Account names.
        partitions: Partition names.
        jobs: Job ids as Slurm writes them: 123, 123_7, 123+1.
        names: Job names; ``*``, ``?`` and ``[…]`` as a shell has them.
        states: Job states, in full or short (FAILED, F).
        since: Submitted at this time or later, as Slurm's commands take times
            (``now-1day``, ``2026-11-21T08:00``); "" for the last seven days, or for
            all time where ``jobs`` is given.
        until: Submitted before this time; "" for now.
        zone: IANA name of the zone that times without one are meant in; "" for the cluster's.
    """

    clusters: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    partitions: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    since: str = ""
    until: str = ""
    zone: str = ""


class JobLine(Shape, frozen=True, kw_only=True):
    """One job, as a table shows it.

    Attributes:
        cluster: Where it ran.
        job: Its id as Slurm writes it: 123, 123_7, 123_[1-9%2], 123+1.
        job_id: Its raw id.
        kind: ``batch`` (has or had a script), ``interactive`` (salloc, srun), "" if unknown.
        user: Its owner's name at submit; "" where the uid never resolved.
        uid: Its owner; None while Slurm has not said.
        verified: Whether identity came from Slurm; without it only the script's own
            claims are known.
        submit: First submit time; the script's time in the spool where no other is known.
        exit_code: What it returned, 0 to 255.
        exit_signal: The signal that ended it.
        restarts: How often it was requeued.
        script_key: Key of its kept script; "" where none is kept.
        script_bytes: Size of the kept script.
        script_hidden: Why nothing is told of a script: ``private``, the asker may not read
            it, if there is one; ``purged``, there was one; "" otherwise.
        submit_line: The command line of sbatch, salloc or srun, where Slurm gives it and
            the asker may read it.
    """

    cluster: str
    job: str
    job_id: int
    kind: Literal["batch", "interactive", ""] = ""
    name: str = ""
    user: str = ""
    uid: int | None = None
    account: str = ""
    partition: str = ""
    state: str = ""
    verified: bool = False
    submit: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    exit_code: int | None = None
    exit_signal: int | None = None
    restarts: int = 0
    script_key: str = ""
    script_bytes: int | None = None
    script_hidden: Literal["private", "purged", ""] = ""
    submit_line: str = ""


class ScriptLine(Shape, frozen=True, kw_only=True):
    """What is kept of a job's script and environment.

    Attributes:
        key: Key of the job.script event.
        job_id: The spool entry's id: an array's or a het job's leader.
        spooled: The script's modification time in the scheduler's spool.
        length: Of the script in bytes; None where it is not kept.
        sha256: Of the script.
        environment_length: Of the environment in bytes, redacted; None where it is not kept.
        environment_sha256: Of the redacted environment.
        redacted: Names of the variables whose values were redacted.
        flags: What was odd about the spool entry, see :class:`steward.core.events.JobScript`.
        path: Where the script lies; only operators and its owner are told.
        environment_path: Where the environment lies, likewise.
    """

    key: str
    job_id: int
    spooled: datetime
    length: int | None = None
    sha256: str = ""
    environment_length: int | None = None
    environment_sha256: str = ""
    redacted: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    path: str = ""
    environment_path: str = ""


class RunLine(Shape, frozen=True, kw_only=True):
    """One run of a job: a requeue makes another."""

    restarts: int = 0
    state: str = ""
    submit: datetime | None = None
    start: datetime | None = None
    end: datetime | None = None
    nodelist: str = ""
    exit_code: int | None = None
    exit_signal: int | None = None
