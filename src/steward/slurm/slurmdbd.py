"""slurmdbd queries: AdminLevels, coordinators, associations, ended jobs and stored scripts.

:class:`SlurmdbdClient` runs sacct and sacctmgr for one cluster. Queries that cover long periods are
in :class:`steward.slurm.sacct.SacctHistory`. :func:`merge_resized_runs` corrects the rows of
resized jobs; jobs and bank apply it to imported rows too.

No separator of sacct is safe against text that users write, so one query never mixes identity with
text: one sacct prints fields that only Slurm writes, and each text field of a job gets a sacct of
its own.
"""

import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import Final

import msgspec

from steward.core.records import JobRecord
from steward.slurm.commands import CommandRunner
from steward.slurm.errors import SlurmError
from steward.slurm.job_states import RESIZING
from steward.slurm.users import NameResolver
from steward.slurm.values import (
    decode_text,
    parse_exit_status,
    parse_moment,
    parse_number,
    parse_seconds,
)

# sacct field names, the same in Slurm 22.05 to 26.05.
_FIELDS: Final = (
    "JobIDRaw",
    "JobID",
    "UID",
    "GID",
    "State",
    "ExitCode",
    "Submit",
    "Eligible",
    "Start",
    "End",
    "TimelimitRaw",
    "NNodes",
    "NCPUS",
    "ReqTRES",
    "AllocTRES",
    "NodeList",
    "DerivedExitCode",
    "Suspended",
    "Priority",
    "ReqCPUS",
)
_OFFERED: Final = ("Restarts", "SLUID", "OriginalSLUID")
"""Fields requested only if this version of sacct lists them."""
# Text fields of a job and the record fields they fill; each needs a sacct call of its own.
_TEXTS: Final = (
    ("JobName", "name"),
    ("Account", "account"),
    ("Partition", "partition"),
    ("QOS", "qos"),
    ("WorkDir", "work_dir"),
    ("SubmitLine", "submit_line"),
)
_ADMIN_LEVELS: Final = frozenset({"Operator", "Administrator"})
_JOB_ID: Final = re.compile(r"(\d+)(?:_(?:\[(.+)\]|(\d+))|\+(\d+))?")
_NONE: Final = b"NONE\n"
_HEADING: Final = re.compile(
    rb"(?:Batch Script for [^\n]+|Environment used for [^\n]+ \(must be batch to display\))\n"
    rb"-{80}\n"
)


class StoredScript(msgspec.Struct, frozen=True, kw_only=True):
    """The script and environment that slurmdbd stored for a job.

    Attributes:
        script: Script bytes, or None if not stored. The database may have replaced bytes that are
            not UTF-8 by "?".
        environment: Environment, one variable per line, or None if not stored. A newline inside a
            value looks like the start of another variable.
        is_unanswered: Whether slurmdbd did not list the run: it does not know it, or its own query
            of the database failed. sacct prints nothing then, and exits with 0.
    """

    script: bytes | None = None
    environment: bytes | None = None
    is_unanswered: bool = False


class Associations(msgspec.Struct, frozen=True, kw_only=True):
    """Slurm's associations: which users may run jobs under which account.

    Attributes:
        rows: (account, parent, user). The parent is "" in a user's row; the user is "" in the
            account's own row.
        coordinators: Users who coordinate each account.
    """

    rows: tuple[tuple[str, str, str], ...]
    coordinators: dict[str, frozenset[str]]


class SlurmdbdClient:
    """Client for the slurmdbd of one cluster, through sacct and sacctmgr.

    Args:
        commands: Runs the commands.
        cluster: ClusterName in slurm.conf.
        list_fields: Returns the field names that a command lists, in lower case.
        resolver: Resolves uids, gids and names.
    """

    def __init__(
        self,
        commands: CommandRunner,
        cluster: str,
        list_fields: Callable[[str], Collection[str]],
        resolver: NameResolver,
    ) -> None:
        self._commands = commands
        self._cluster = cluster
        self._resolver = resolver
        self._list_fields = list_fields

    def read_admin_levels(self) -> dict[str, str]:
        """Return the AdminLevel (``Operator`` or ``Administrator``) of each user who has one.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run("sacctmgr", "-n", "-P", "show", "user", "format=User,AdminLevel")
        pairs = (line.rpartition("|") for line in decode_text(out).splitlines())
        return {user: level for user, _, level in pairs if user and level in _ADMIN_LEVELS}

    def read_coordinators(self) -> dict[str, frozenset[str]]:
        """Return the coordinators of each account that has any.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run(
            "sacctmgr", "-n", "-P", "show", "account", "WithCoord", "format=Account,Coordinators"
        )
        coordinators: dict[str, frozenset[str]] = {}
        # Split at "\n" only and skip malformed rows: a user who can choose an account's name must
        # not be able to name coordinators of other accounts.
        for line in decode_text(out).split("\n"):
            account, bar, names = line.partition("|")
            users = frozenset(name for name in names.split(",") if name)
            if account and bar and users and "|" not in names and account not in coordinators:
                coordinators[account] = users
        return coordinators

    def read_people(self) -> tuple[dict[int, str], dict[str, str], dict[str, str]]:
        """Return user names by uid, default accounts by user, and default QOS by ``ACCOUNT/USER``.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        from steward.slurm.cluster_model import parse_users

        command = ("sacctmgr", "-n", "-P", "show")
        users = self._commands.run(*command, "user", "format=User,DefaultAccount")
        cluster_filter = ("where", f"cluster={self._cluster}")
        fields = "format=Account,User,DefaultQOS,Partition"
        associations = self._commands.run(*command, "assoc", *cluster_filter, fields)
        return parse_users(users, associations, self._resolver)

    def read_associations(self) -> Associations:
        """Return the cluster's associations and account coordinators.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run(
            *("sacctmgr", "-n", "-P", "show", "associations", f"cluster={self._cluster}"),
            "format=Account,ParentName,User",
        )
        rows = [line.split("|") for line in decode_text(out).split("\n")]
        # A name that contains "|" makes a row of the wrong length, which is skipped.
        valid_rows = tuple((row[0], row[1], row[2]) for row in rows if len(row) == 3 and row[0])
        return Associations(rows=valid_rows, coordinators=self.read_coordinators())

    def query_jobs(self, job_id: int, *, texts: bool = True) -> list[JobRecord]:
        """Return the records of a job id: array tasks and het components included; [] if unknown.

        Args:
            job_id: The raw job id.
            texts: Also read name, account and other texts, if there is exactly one record; this
                runs one sacct per field.

        Raises:
            SlurmError: slurmdbd does not answer, or its output cannot be parsed.
        """
        available = self._list_fields("sacct")
        fields = [*_FIELDS, *(name for name in _OFFERED if name.lower() in available)]
        output = self._query_job(str(job_id), ",".join(fields)).decode("ascii", "backslashreplace")
        records = merge_resized_runs(
            [self._parse_record(row, fields) for row in output.splitlines() if row]
        )
        if len(records) != 1 or not texts:
            return records
        return [msgspec.structs.replace(records[0], **self._read_texts(job_id))]

    def read_stored_script(self, record: JobRecord) -> StoredScript:
        """Read the script and environment that slurmdbd stored for a run (AccountingStoreFlags).

        For an array or het job, name one task or component: sacct prints the scripts of all of
        them in a row, and a script may contain the separator.

        Args:
            record: The run, identified by its ids, submit and end time.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        texts = [self._read_stored(record, option) for option in ("--batch-script", "--env-vars")]
        script, environment = (None if text in (None, b"", _NONE) else text for text in texts)
        return StoredScript(script=script, environment=environment, is_unanswered=texts[0] is None)

    def read_submit_line(self, record: JobRecord) -> str:
        """Return the submit line of a run, or "" if slurmdbd has none.

        Args:
            record: The run, identified by its ids, submit and end time.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._query_run(record, "-X", "-P", "-o", "SubmitLine")
        lines = decode_text(out.removesuffix(b"\n")).split("\n")
        for count in range(1, len(lines)):
            # sacct repeats the line for each array task; the line itself may contain newlines.
            if lines[:count] * (len(lines) // count) == lines:
                return "\n".join(lines[:count])
        return "\n".join(lines)

    def _query_run(self, record: JobRecord, *options: str) -> bytes:
        """Run sacct for one run, array task or het component and return its output."""
        name = str(record.job_id)
        if record.array_job_id:
            # sacct prints pending array tasks as one row, under the array's own id.
            task = f"_{record.array_task}" if record.array_task.isdecimal() else ""
            name = f"{record.array_job_id}{task}"
        elif record.het_job_id:
            name = f"{record.het_job_id}+{record.het_offset}"
        times = [] if record.submit is None else ["-S", _format_slurm_time(record.submit)]
        if times and record.end is not None:
            # If the id was reused since, sacct without times prints the later job.
            # slurmdbd lists only jobs that became eligible before the end of the period.
            times += ["-E", _format_slurm_time(record.end + timedelta(seconds=1))]
        return self._commands.run("sacct", "-n", "-M", self._cluster, "-j", name, *times, *options)

    def _read_stored(self, record: JobRecord, option: str) -> bytes | None:
        """Return what sacct prints for --batch-script or --env-vars; None if it prints nothing."""
        out = self._query_run(record, option)
        if not out:
            return None
        heading = _HEADING.match(out)
        if heading is not None:
            # Slurm 22.05 prints a heading despite -n, and adds a newline to the content.
            out = out[heading.end() :].removesuffix(b"\n")
        return out

    def _query_job(self, job_id: str, fields: str) -> bytes:
        """Run sacct for all runs of a job id and return its output."""
        return self._commands.run(
            "sacct", *("-X", "-n", "-P", "-D", "-M", self._cluster, "-j", job_id, "-o", fields)
        )

    def _read_texts(self, job_id: int) -> dict[str, str]:
        """Read the text fields of a job, one sacct call for each."""
        return {
            name: decode_text(self._query_job(str(job_id), field).removesuffix(b"\n"))
            for field, name in _TEXTS
        }

    def _parse_record(self, row: str, fields: Sequence[str]) -> JobRecord:
        """Parse a row of sacct into a record."""
        parts = row.split("|")
        values = dict(zip(fields, parts, strict=False))
        name_match = _JOB_ID.fullmatch(values.get("JobID", ""))
        if len(parts) != len(fields) or name_match is None or not values["JobIDRaw"].isdigit():
            raise SlurmError(
                f"cluster {self._cluster}: cannot parse a row of sacct: {row[:200]!r}",
                ("sacct",),
                row,
            )
        uid, gid = parse_number(values["UID"]), parse_number(values["GID"])
        state, _, canceller = values["State"].partition(" ")
        derived_status = parse_exit_status(values["DerivedExitCode"])
        status = parse_exit_status(values["ExitCode"])
        limit_min = parse_number(values["TimelimitRaw"])
        is_array, is_het = "_" in name_match[0], name_match[4] is not None
        return JobRecord(
            job_id=int(values["JobIDRaw"]),
            uid=uid,
            user="" if uid is None else self._resolver.user(uid),
            gid=gid,
            group="" if gid is None else self._resolver.group(gid),
            state=state,
            array_job_id=int(name_match[1]) if is_array else 0,
            array_task=(name_match[2] or name_match[3]) if is_array else "",
            het_job_id=int(name_match[1]) if is_het else 0,
            het_offset=int(name_match[4]) if is_het else 0,
            sluid=values.get("SLUID", ""),
            original_sluid=values.get("OriginalSLUID", ""),
            restarts=parse_number(values.get("Restarts", "")) or 0,
            submit=parse_moment(values["Submit"]),
            eligible=parse_moment(values["Eligible"]),
            start=parse_moment(values["Start"]),
            end=parse_moment(values["End"]),
            time_limit_s=None if limit_min is None else limit_min * 60,
            nodes=parse_number(values["NNodes"]),
            cpus=parse_number(values["NCPUS"]),
            tres_requested=values["ReqTRES"],
            tres_allocated=values["AllocTRES"],
            nodelist="" if values["NodeList"] == "None assigned" else values["NodeList"],
            exit_code=status[0] if status else None,
            exit_signal=status[1] if status else None,
            derived_exit_code=derived_status[0] if derived_status else None,
            derived_exit_signal=derived_status[1] if derived_status else None,
            # "CANCELLED by 1000": the uid of the user who cancelled the job.
            cancelled_by=parse_number(canceller.removeprefix("by ")),
            suspended_s=parse_seconds(values["Suspended"]),
            requested_cpus=parse_number(values["ReqCPUS"]),
            priority=parse_number(values["Priority"]),
        )


def merge_resized_runs(records: Sequence[JobRecord]) -> list[JobRecord]:
    """Return rows of slurmdbd with start and suspended time of resized runs corrected.

    slurmdbd has a row for each size of a run. The last one counts from the resize; here it gets
    the first start and the total suspended time.

    Args:
        records: All rows of some job ids.
    """
    merged = []
    for record in records:
        sizes = [
            size
            for size in records
            if size.state == RESIZING
            and (size.job_id, size.submit) == (record.job_id, record.submit)
        ]
        if sizes and record.state != RESIZING:
            starts = [size.start for size in (record, *sizes) if size.start is not None]
            suspended_s = sum(size.suspended_s or 0 for size in (record, *sizes))
            record = msgspec.structs.replace(  # noqa: PLW2901 - the same row, completed
                record, start=min(starts, default=None), suspended_s=suspended_s
            )
        merged.append(record)
    return merged


def _format_slurm_time(moment: datetime) -> str:
    """Format a time for Slurm's commands, which run under TZ=UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S")
