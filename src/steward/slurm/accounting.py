"""What slurmdbd knows: who stands where, jobs that slurmctld forgot, the scripts that it stored.

sacct prints no separator that its rows cannot hold, so identity and text are
never asked for in one question: rows of numbers come with fields that Slurm
alone writes, and a text is asked for by itself, of one job.
"""

import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import Final

import msgspec

from steward.core.records import JobRecord
from steward.slurm.commands import Commands
from steward.slurm.errors import SlurmError
from steward.slurm.job_states import RESIZING
from steward.slurm.users import People
from steward.slurm.values import (
    decode_text,
    parse_exit_status,
    parse_moment,
    parse_number,
    parse_seconds,
)

# Names of sacct's fields, in 22.05 to 26.05.
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
"""Fields that are asked for where sacct offers them."""
# Texts of a job, each asked for by itself.
_TEXTS: Final = (
    ("JobName", "name"),
    ("Account", "account"),
    ("Partition", "partition"),
    ("QOS", "qos"),
    ("WorkDir", "work_dir"),
    ("SubmitLine", "submit_line"),
)
_OFFICERS: Final = frozenset({"Operator", "Administrator"})
_JOB_ID: Final = re.compile(r"(\d+)(?:_(?:\[(.+)\]|(\d+))|\+(\d+))?")
_NONE: Final = b"NONE\n"
_HEADING: Final = re.compile(
    rb"(?:Batch Script for [^\n]+|Environment used for [^\n]+ \(must be batch to display\))\n"
    rb"-{80}\n"
)


class StoredScript(msgspec.Struct, frozen=True, kw_only=True):
    """What slurmdbd stored of a job's submission.

    Attributes:
        script: The script as slurmdbd holds it; None for none. Its database may have
            written bytes that are not UTF-8 as "?".
        environment: The environment as slurmdbd holds it, one variable a line: values
            with newlines cannot be told from variables; None for none.
    """

    script: bytes | None = None
    environment: bytes | None = None


class Associations(msgspec.Struct, frozen=True, kw_only=True):
    """Who may run jobs under which account.

    Attributes:
        rows: Account, its parent ("" where the row is a user's), user ("" where it is the
            account's own).
        coordinators: For each account the users who coordinate it.
    """

    rows: tuple[tuple[str, str, str], ...]
    coordinators: dict[str, frozenset[str]]


class Accounting:
    """A cluster's slurmdbd, asked through sacct and sacctmgr.

    Args:
        commands: How they are run.
        cluster: ClusterName in slurm.conf.
        offered: Returns the names of the fields that a command offers, in lower case.
        people: Who looks names up.
    """

    def __init__(
        self,
        commands: Commands,
        cluster: str,
        offered: Callable[[str], Collection[str]],
        people: People,
    ) -> None:
        self._commands = commands
        self._cluster = cluster
        self._people = people
        self._offered = offered

    def officers(self) -> dict[str, str]:
        """The AdminLevel of the users who have one: ``Operator`` or ``Administrator``, by name.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run("sacctmgr", "-n", "-P", "show", "user", "format=User,AdminLevel")
        pairs = (line.rpartition("|") for line in decode_text(out).splitlines())
        return {user: level for user, _, level in pairs if user and level in _OFFICERS}

    def coordinators(self) -> dict[str, frozenset[str]]:
        """For each account the users who coordinate it.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run(
            "sacctmgr", "-n", "-P", "show", "account", "WithCoord", "format=Account,Coordinators"
        )
        found: dict[str, frozenset[str]] = {}
        # Only real line ends count, and a row that is no row makes nobody a coordinator:
        # whoever may name an account must not name coordinators of others.
        for line in decode_text(out).split("\n"):
            account, bar, names = line.partition("|")
            users = frozenset(name for name in names.split(",") if name)
            if account and bar and users and "|" not in names and account not in found:
                found[account] = users
        return found

    def members(self) -> tuple[dict[int, str], dict[str, str], dict[str, str]]:
        """Users by uid, their default accounts by name, and default QOS by ``ACCOUNT/USER``.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        from steward.slurm.cluster_model import parse_people

        ask = ("sacctmgr", "-n", "-P", "show")
        users = self._commands.run(*ask, "user", "format=User,DefaultAccount")
        of_cluster = ("where", f"cluster={self._cluster}")
        fields = "format=Account,User,DefaultQOS,Partition"
        associations = self._commands.run(*ask, "assoc", *of_cluster, fields)
        return parse_people(users, associations, self._people)

    def associations(self) -> Associations:
        """Who may run jobs under which account.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run(
            *("sacctmgr", "-n", "-P", "show", "associations", f"cluster={self._cluster}"),
            "format=Account,ParentName,User",
        )
        rows = [line.split("|") for line in decode_text(out).split("\n")]
        # A name with a bar in it makes a row that is none: it is passed over.
        found = tuple((row[0], row[1], row[2]) for row in rows if len(row) == 3 and row[0])
        return Associations(rows=found, coordinators=self.coordinators())

    def jobs(self, job_id: int, *, texts: bool = True) -> list[JobRecord]:
        """What is known of a job id: an array's tasks, a het job's components; [] for nothing.

        Args:
            job_id: The id.
            texts: Whether to ask for names and the like as well, of a single job: that takes
                a question each.

        Raises:
            SlurmError: slurmdbd does not answer, or says what is not understood.
        """
        offered = self._offered("sacct")
        fields = [*_FIELDS, *(name for name in _OFFERED if name.lower() in offered)]
        rows = self._ask(str(job_id), ",".join(fields)).decode("ascii", "backslashreplace")
        records = whole_runs([self._record(row, fields) for row in rows.splitlines() if row])
        if len(records) != 1 or not texts:
            return records
        return [msgspec.structs.replace(records[0], **self._texts(job_id))]

    def stored(self, record: JobRecord) -> StoredScript:
        """Read the script and environment that slurmdbd stored of a run (AccountingStoreFlags).

        Of an array or a het job, name one task or component: sacct prints those of all of them
        one after the other, and a script may hold what it prints between them.

        Args:
            record: The run; its ids and submit time count.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        return StoredScript(
            script=self._stored(record, "--batch-script"),
            environment=self._stored(record, "--env-vars"),
        )

    def submit_line(self, record: JobRecord) -> str:
        """Read the submit line of a run; "" where slurmdbd has none.

        Args:
            record: The run; its ids and submit time count.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._of_run(record, "-X", "-P", "-o", "SubmitLine")
        lines = decode_text(out.removesuffix(b"\n")).split("\n")
        for count in range(1, len(lines)):
            # Rows of an array's tasks, all with the one line, which may hold line ends.
            if lines[:count] * (len(lines) // count) == lines:
                return "\n".join(lines[:count])
        return "\n".join(lines)

    def _of_run(self, record: JobRecord, *options: str) -> bytes:
        """What sacct prints of one run, task or component: of several it parts nothing."""
        name = str(record.job_id)
        if record.array_job_id:
            # Of tasks that wait sacct prints one row, under the array's own id.
            task = f"_{record.array_task}" if record.array_task.isdecimal() else ""
            name = f"{record.array_job_id}{task}"
        elif record.het_job_id:
            name = f"{record.het_job_id}+{record.het_offset}"
        times = [] if record.submit is None else ["-S", _slurm_time(record.submit)]
        if times and record.end is not None:
            # An id that was used again since is another job's: without times sacct prints that.
            times += ["-E", _slurm_time(record.end)]
        return self._commands.run("sacct", "-n", "-M", self._cluster, "-j", name, *times, *options)

    def _stored(self, record: JobRecord, option: str) -> bytes | None:
        out = self._of_run(record, option)
        heading = _HEADING.match(out)
        if heading is not None:
            # Slurm 22.05 prints a heading despite -n, and a line end behind what it holds.
            out = out[heading.end() :].removesuffix(b"\n")
        return None if out in (b"", _NONE) else out

    def _ask(self, job_id: str, fields: str) -> bytes:
        return self._commands.run(
            "sacct", *("-X", "-n", "-P", "-D", "-M", self._cluster, "-j", job_id, "-o", fields)
        )

    def _texts(self, job_id: int) -> dict[str, str]:
        return {
            name: decode_text(self._ask(str(job_id), field).removesuffix(b"\n"))
            for field, name in _TEXTS
        }

    def _record(self, row: str, fields: Sequence[str]) -> JobRecord:
        parts = row.split("|")
        shown = dict(zip(fields, parts, strict=False))
        named = _JOB_ID.fullmatch(shown.get("JobID", ""))
        if len(parts) != len(fields) or named is None or not shown["JobIDRaw"].isdigit():
            raise SlurmError("a row of sacct is not understood", ("sacct",), row)
        uid, gid = parse_number(shown["UID"]), parse_number(shown["GID"])
        state, _, by = shown["State"].partition(" ")
        derived = parse_exit_status(shown["DerivedExitCode"])
        status = parse_exit_status(shown["ExitCode"])
        limit = parse_number(shown["TimelimitRaw"])
        is_array, is_het = "_" in named[0], named[4] is not None
        return JobRecord(
            job_id=int(shown["JobIDRaw"]),
            uid=uid,
            user="" if uid is None else self._people.user(uid),
            gid=gid,
            group="" if gid is None else self._people.group(gid),
            state=state,
            array_job_id=int(named[1]) if is_array else 0,
            array_task=(named[2] or named[3]) if is_array else "",
            het_job_id=int(named[1]) if is_het else 0,
            het_offset=int(named[4]) if is_het else 0,
            sluid=shown.get("SLUID", ""),
            original_sluid=shown.get("OriginalSLUID", ""),
            restarts=parse_number(shown.get("Restarts", "")) or 0,
            submit=parse_moment(shown["Submit"]),
            eligible=parse_moment(shown["Eligible"]),
            start=parse_moment(shown["Start"]),
            end=parse_moment(shown["End"]),
            time_limit_s=None if limit is None else limit * 60,
            nodes=parse_number(shown["NNodes"]),
            cpus=parse_number(shown["NCPUS"]),
            tres_requested=shown["ReqTRES"],
            tres_allocated=shown["AllocTRES"],
            nodelist="" if shown["NodeList"] == "None assigned" else shown["NodeList"],
            exit_code=status[0] if status else None,
            exit_signal=status[1] if status else None,
            derived_exit_code=derived[0] if derived else None,
            derived_exit_signal=derived[1] if derived else None,
            # "CANCELLED by 1000": the uid that cancelled it.
            cancelled_by=parse_number(by.removeprefix("by ")),
            suspended_s=parse_seconds(shown["Suspended"]),
            requested_cpus=parse_number(shown["ReqCPUS"]),
            priority=parse_number(shown["Priority"]),
        )


def whole_runs(records: Sequence[JobRecord]) -> list[JobRecord]:
    """Rows of slurmdbd, with the start and the suspended time of resized runs as a whole.

    slurmdbd keeps a row for each size of a run; that of the last one counts since the resize.

    Args:
        records: All rows of some job ids.
    """
    found = []
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
        found.append(record)
    return found


def _slurm_time(moment: datetime) -> str:
    """A time as Slurm's commands take it under TZ=UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S")
