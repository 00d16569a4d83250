"""What slurmdbd knows: who stands where, jobs that slurmctld forgot, the scripts that it stored.

sacct prints no separator that its rows cannot hold, so identity and text are
never asked for in one question: rows of numbers come with fields that Slurm
alone writes, and a text is asked for by itself, of one job.
"""

import re
from datetime import datetime
from typing import Final

import msgspec

from steward.records import JobRecord
from steward.slurm import values
from steward.slurm.commands import Commands
from steward.slurm.errors import SlurmError
from steward.slurm.people import People
from steward.slurm.queue import Version

# Names of sacct's fields; the last two came with 23.02 and 26.05.
_FIELDS: Final[tuple[tuple[str, Version], ...]] = (
    ("JobIDRaw", (0, 0, 0)),
    ("JobID", (0, 0, 0)),
    ("UID", (0, 0, 0)),
    ("GID", (0, 0, 0)),
    ("State", (0, 0, 0)),
    ("ExitCode", (0, 0, 0)),
    ("Submit", (0, 0, 0)),
    ("Eligible", (0, 0, 0)),
    ("Start", (0, 0, 0)),
    ("End", (0, 0, 0)),
    ("TimelimitRaw", (0, 0, 0)),
    ("NNodes", (0, 0, 0)),
    ("NCPUS", (0, 0, 0)),
    ("ReqTRES", (0, 0, 0)),
    ("AllocTRES", (0, 0, 0)),
    ("NodeList", (0, 0, 0)),
    ("DerivedExitCode", (0, 0, 0)),
    ("Suspended", (0, 0, 0)),
    ("Priority", (0, 0, 0)),
    ("ReqCPUS", (0, 0, 0)),
    ("Restarts", (23, 2, 0)),
    ("SLUID", (26, 5, 0)),
    ("OriginalSLUID", (26, 5, 0)),
)
# Texts of a job, each asked for by itself.
_TEXTS: Final[tuple[tuple[str, str, Version], ...]] = (
    ("JobName", "name", (0, 0, 0)),
    ("Account", "account", (0, 0, 0)),
    ("Partition", "partition", (0, 0, 0)),
    ("QOS", "qos", (0, 0, 0)),
    ("WorkDir", "work_dir", (0, 0, 0)),
    ("SubmitLine", "submit_line", (0, 0, 0)),
)
_OFFICERS: Final = frozenset({"Operator", "Administrator"})
_JOB_ID: Final = re.compile(r"(\d+)(?:_(?:\[(.+)\]|(\d+))|\+(\d+))?")
_NONE: Final = b"NONE\n"


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
        version: Slurm's version.
        people: Who looks names up.
    """

    def __init__(self, commands: Commands, cluster: str, version: Version, people: People) -> None:
        self._commands = commands
        self._cluster = cluster
        self._people = people
        self._version = version
        self._fields = [name for name, since in _FIELDS if version >= since]

    def officers(self) -> dict[str, str]:
        """The AdminLevel of the users who have one: ``Operator`` or ``Administrator``, by name.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run("sacctmgr", "-n", "-P", "show", "user", "format=User,AdminLevel")
        pairs = (line.rpartition("|") for line in values.text(out).splitlines())
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
        for line in values.text(out).split("\n"):
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
        from steward.slurm.picture_rows import people

        ask = ("sacctmgr", "-n", "-P", "show")
        users = self._commands.run(*ask, "user", "format=User,DefaultAccount")
        of_cluster = ("where", f"cluster={self._cluster}")
        fields = "format=Account,User,DefaultQOS,Partition"
        associations = self._commands.run(*ask, "assoc", *of_cluster, fields)
        return people(users, associations, self._people)

    def associations(self) -> Associations:
        """Who may run jobs under which account.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        out = self._commands.run(
            *("sacctmgr", "-n", "-P", "show", "associations", f"cluster={self._cluster}"),
            "format=Account,ParentName,User",
        )
        rows = [line.split("|") for line in values.text(out).split("\n")]
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
        rows = self._ask(str(job_id), ",".join(self._fields)).decode("ascii", "backslashreplace")
        records = [self._record(row) for row in rows.splitlines() if row]
        if len(records) != 1 or not texts:
            return records
        return [msgspec.structs.replace(records[0], **self._texts(job_id))]

    def ids(self, since: datetime, until: datetime) -> list[int]:
        """Raw ids of the jobs that were eligible or ran between two times, in order.

        Raises:
            SlurmError: slurmdbd does not answer, or says what is not understood.
        """
        out = self._commands.run(
            "sacct",
            *("-X", "-n", "-P", "-a", "-D", "-M", self._cluster, "-o", "JobIDRaw"),
            *("-S", _slurm_time(since), "-E", _slurm_time(until)),
            timeout_s=600.0,
        )
        return sorted({int(line) for line in out.split() if line.isdigit()})

    def stored(self, job_id: int) -> StoredScript:
        """The script and environment that slurmdbd stored (AccountingStoreFlags).

        Of an array or a het job these are its first task's or component's: sacct would
        print all of them behind headings that a script may hold as well.

        Raises:
            SlurmError: slurmdbd does not answer, or refuses.
        """
        named = self._ask(str(job_id), "JobIDRaw,JobID").decode("ascii", "backslashreplace")
        names = dict(reversed([line.split("|", 1) for line in named.splitlines() if "|" in line]))
        if not names:
            return StoredScript()
        name = names.get(str(job_id)) or next(reversed(names.values()))
        return StoredScript(
            script=self._stored(name, "--batch-script"),
            environment=self._stored(name, "--env-vars"),
        )

    def _stored(self, name: str, option: str) -> bytes | None:
        # Without a heading (-n) what follows is as slurmdbd holds it, to the byte.
        out = self._commands.run("sacct", "-n", "-M", self._cluster, "-j", name, option)
        return None if out in (b"", _NONE) else out

    def _ask(self, job_id: str, fields: str) -> bytes:
        return self._commands.run(
            "sacct", *("-X", "-n", "-P", "-D", "-M", self._cluster, "-j", job_id, "-o", fields)
        )

    def _texts(self, job_id: int) -> dict[str, str]:
        return {
            name: values.text(self._ask(str(job_id), field).removesuffix(b"\n"))
            for field, name, since in _TEXTS
            if self._version >= since
        }

    def _record(self, row: str) -> JobRecord:
        parts = row.split("|")
        shown = dict(zip(self._fields, parts, strict=False))
        named = _JOB_ID.fullmatch(shown.get("JobID", ""))
        if len(parts) != len(self._fields) or named is None or not shown["JobIDRaw"].isdigit():
            raise SlurmError("a row of sacct is not understood", ("sacct",), row)
        uid, gid = values.number(shown["UID"]), values.number(shown["GID"])
        state, _, by = shown["State"].partition(" ")
        derived = values.exit_status(shown["DerivedExitCode"])
        status = values.exit_status(shown["ExitCode"])
        limit = values.number(shown["TimelimitRaw"])
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
            restarts=values.number(shown.get("Restarts", "")) or 0,
            submit=values.moment(shown["Submit"]),
            eligible=values.moment(shown["Eligible"]),
            start=values.moment(shown["Start"]),
            end=values.moment(shown["End"]),
            time_limit_s=None if limit is None else limit * 60,
            nodes=values.number(shown["NNodes"]),
            cpus=values.number(shown["NCPUS"]),
            tres_requested=shown["ReqTRES"],
            tres_allocated=shown["AllocTRES"],
            nodelist="" if shown["NodeList"] == "None assigned" else shown["NodeList"],
            exit_code=status[0] if status else None,
            exit_signal=status[1] if status else None,
            derived_exit_code=derived[0] if derived else None,
            derived_exit_signal=derived[1] if derived else None,
            # "CANCELLED by 1000": the uid that cancelled it.
            cancelled_by=values.number(by.removeprefix("by ")),
            suspended_s=values.seconds(shown["Suspended"]),
            requested_cpus=values.number(shown["ReqCPUS"]),
            priority=values.number(shown["Priority"]),
        )


def _slurm_time(moment: datetime) -> str:
    """A time as Slurm's commands take it under TZ=UTC."""
    return moment.strftime("%Y-%m-%dT%H:%M:%S")
