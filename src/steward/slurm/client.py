"""Slurm, as the rest of Steward sees it: one object a cluster, typed records, our own errors."""

import logging
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from steward.core.access import Standing
from steward.core.events import utc_now
from steward.core.records import JobRecord
from steward.core.timestamps import micros
from steward.slurm.accounting import Accounting, Associations, StoredScript
from steward.slurm.cluster_model import ASK_NODES, ASK_PARTITIONS, Picture
from steward.slurm.commands import Commands
from steward.slurm.errors import SlurmError, SlurmUnavailable, UnknownJob
from steward.slurm.queue import (
    Queue,
    QueueFormat,
    Version,
    completed_by_json,
    completed_by_text,
    parse_queue,
)
from steward.slurm.sacct import History
from steward.slurm.settings import ClusterSettings
from steward.slurm.users import People
from steward.slurm.values import decode_text, parse_moment

log = logging.getLogger(__name__)

_ASK: Final = ("-a", "-t", "all", "--local", "-h", "--noconvert")
_VERSION: Final = re.compile(r"\b(\d+)\.(\d+)(?:\.(\d+))?")
_SETTING: Final = re.compile(r"([A-Za-z_][^=\n]*?)\s*=\s?([^\n]*)")
MOST_WHOLE: Final = 16
"""More records than these of one id (a torn array) come without what scontrol adds: it writes
8 KB for each, and locks slurmctld meanwhile."""
_DATED: Final = re.compile(r"Configuration data as of (\S+)")
_AGAIN_S: Final = 600.0
_LISTS_FIELDS: Final = {"squeue": "--helpFormat", "sacct": "--helpformat"}


class Slurm:
    """One cluster's Slurm.

    Args:
        cluster: Its name in the configuration.
        settings: How its commands are found and started.
    """

    def __init__(self, cluster: str, settings: ClusterSettings) -> None:
        self.cluster = cluster
        self.people = People()
        self._commands = Commands(cluster, settings)
        self._version: Version | None = None
        self._stamp: tuple[int, ...] = ()
        self._offered: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}
        self._format: QueueFormat | None = None
        self._format_until = 0.0
        self._has_json = True
        self._accounts: bool | None = None
        self._accounts_until = 0.0

    def version(self) -> Version:
        """Slurm's version (22, 5, 8); asked again where other commands take the place of these.

        Raises:
            SlurmError: squeue cannot be run.
        """
        stamp = self._commands.stamp("squeue")
        if self._version is None or stamp != self._stamp:
            self._stamp, self._version = stamp, None
            said = self._commands.run("squeue", "--version").decode("utf-8", "replace")
            found = _VERSION.search(said)
            if found is None:
                raise SlurmError(f"no version in {said!r}", ("squeue", "--version"), said)
            self._version = (int(found[1]), int(found[2]), int(found[3] or 0))
        return self._version

    def offered(self, program: str) -> frozenset[str]:
        """Names of the fields that squeue or sacct can show, in lower case; none if not listed.

        Asked again where another command takes the place of this one.

        Args:
            program: ``squeue`` or ``sacct``.

        Raises:
            SlurmError: It cannot be run.
        """
        stamp = self._commands.stamp(program)
        if program not in self._offered or stamp != self._offered[program][0]:
            try:
                out = self._commands.run(program, _LISTS_FIELDS[program])
            except SlurmUnavailable:
                raise
            except SlurmError:
                if program != "squeue":
                    raise
                out = b""  # up to 23.02 it has no such option, and none of the fields in question
            fields = frozenset(out.decode("ascii", "replace").lower().split())
            self._offered[program] = (stamp, fields)
        return self._offered[program][1]

    @property
    def known_version(self) -> str:
        """Slurm's version as it was told last ("22.05.8"); "" where it was not asked yet."""
        if self._version is None:
            return ""
        major, minor, micro = self._version
        return f"{major}.{minor:02}.{micro}"

    def config(self) -> dict[str, str]:
        """What ``scontrol show config`` shows: names as there, "" for ``(null)``.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        out = self._commands.run("scontrol", "show", "config")
        shown: dict[str, str] = {}
        for line in out.decode("utf-8", "backslashreplace").splitlines():
            setting = _SETTING.fullmatch(line)
            # cgroup.conf's settings come after slurm.conf's and must not pass for them.
            if setting and setting[1] not in shown:
                shown[setting[1]] = "" if setting[2] == "(null)" else setting[2].strip()
        if "StateSaveLocation" not in shown:
            raise SlurmError(
                f"cluster {self.cluster}: scontrol show config shows no StateSaveLocation",
                ("scontrol", "show", "config"),
                out[:200].decode("utf-8", "backslashreplace"),
            )
        return shown

    def clock(self) -> datetime:
        """What slurmctld's clock shows now, UTC, to the second below.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        words = ("show", "config")
        out = self._commands.run("scontrol", *words).decode("utf-8", "backslashreplace")
        found = _DATED.match(out)
        at = parse_moment(found[1]) if found else None
        if at is None:
            raise SlurmError(
                f"cluster {self.cluster}: scontrol show config is not dated",
                ("scontrol", *words),
                out[:200],
            )
        return at

    def queue(self, previous: Mapping[int, int] | None = None) -> Queue:
        """All jobs that slurmctld holds, finished ones until MinJobAge included.

        An array's pending tasks that have records of their own (requeued ones) are not
        among them: squeue folds them into the array's row, whose task expression covers
        them, see :func:`steward.slurm.arrays.covers`. Asked singly they are shown.

        Args:
            previous: ``rows`` of the last queue of this object: only jobs that changed
                since are made into records. Now and then all are, all the same, so
                that names which resolve meanwhile are found.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        known = self._format if previous is not None else None
        form = self._form_of_queue(known)
        rows_before = previous if previous is not None and form is known else {}
        began = time.monotonic()
        taken_at = utc_now()
        out = self._squeue(form)
        cost_s = time.monotonic() - began
        records, rows, strange = parse_queue(form, out, self.people, rows_before)
        return Queue(
            records=records, rows=rows, taken_at=taken_at, cost_s=cost_s, passed_over=strange
        )

    def all_jobs(self, *, is_whole: bool = False, dependency_bytes: int = 512) -> list[JobRecord]:
        """The records of all jobs with the fields of :meth:`job`.

        Args:
            is_whole: Whether with what scontrol alone shows, which takes slurmctld much longer.
            dependency_bytes: How much of a dependency is read, which can be very long.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
            SlurmError: It says what we do not understand.
        """
        form = QueueFormat(self.offered("squeue"), of_one=True, dependency_bytes=dependency_bytes)
        records, _, strange = parse_queue(form, self._squeue(form), self.people, {})
        if strange:
            raise SlurmError(f"{strange} rows of squeue are not understood", ("squeue",))
        return self._completed("", list(records)) if is_whole and records else list(records)

    def job(self, job_id: int, *, apart: bool = False) -> list[JobRecord]:
        """The whole record of one job, asked singly.

        Args:
            job_id: A raw id; an array's id gives all its tasks, a het leader's all components.
            apart: Whether each of an array's waiting tasks comes by itself, which tells those
                that have records of their own from the others.

        Returns:
            The records; [] if slurmctld does not know the job (any more). More than
            ``MOST_WHOLE`` are not whole.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
            SlurmError: It says what we do not understand.
        """
        form = QueueFormat(self.offered("squeue"), of_one=True)
        try:
            out = self._squeue(form, "-j", str(job_id), *(["-r"] if apart else []))
        except UnknownJob:
            return []
        parsed, _, strange = parse_queue(form, out, self.people, {})
        records = list(parsed)
        if strange:
            raise SlurmError(f"a row of squeue -j {job_id} is not understood", ("squeue",))
        return self._completed(str(job_id), records) if len(records) <= MOST_WHOLE else records

    def standing(self) -> Standing:
        """Who stands where: PrivateData, and from slurmdbd AdminLevel and coordinators.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        config = self.config()
        words = (word.strip().lower() for word in config.get("PrivateData", "").split(","))
        private = frozenset(word for word in words if word and word != "none")
        accounting = self._accounting(config)
        if accounting is None:
            return Standing(private_data=private)
        officers = accounting.officers()
        return Standing(
            private_data=private,
            admins=frozenset(officers),
            administrators=frozenset(
                user for user, level in officers.items() if level == "Administrator"
            ),
            coordinators=accounting.coordinators(),
        )

    def picture(self, zone: str = "") -> Picture:
        """What an estimate needs to know of the cluster: partitions, kinds of nodes, people.

        Args:
            zone: The cluster's zone, for rates that differ by time of day.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        from steward.slurm.cluster_model import parse_picture, with_people

        taken_us = micros(utc_now())
        config = self.config()
        partitions = self._commands.run("scontrol", *ASK_PARTITIONS)
        nodes = self._commands.run("scontrol", *ASK_NODES)
        found = parse_picture(self.cluster, config, partitions, nodes, zone=zone, taken_us=taken_us)
        accounting = self._accounting(config)
        if accounting is None:
            return found
        return with_people(found, accounting.members())

    def configuration_mark(self) -> str:
        """Ask for a text that differs after slurmctld restarts or changes what a picture shows.

        It has the boot time, slurm.conf and the partitions with their weights and TRES. It asks
        for no nodes and no people, and costs slurmctld little on a large cluster too.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        config = self.config()
        config.pop("NEXT_JOB_ID", None)
        partitions = self._commands.run("scontrol", *ASK_PARTITIONS)
        return f"{config}\n{decode_text(partitions)}"

    def has_accounting(self) -> bool:
        """Whether the cluster has a slurmdbd; asked again now and then.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        now = time.monotonic()
        if self._accounts is None or now >= self._accounts_until:
            self._accounts = self._accounting(self.config()) is not None
            self._accounts_until = now + _AGAIN_S
        return self._accounts

    def accounted(self, job_id: int) -> list[JobRecord]:
        """What slurmdbd knows of a job; [] where there is no slurmdbd.

        Raises:
            SlurmError: slurmdbd does not answer, or says what is not understood.
        """
        accounting = self._accounting(self.config())
        return [] if accounting is None else accounting.jobs(job_id)

    def accounted_end(self, job_id: int) -> list[JobRecord]:
        """The same without the texts, for one question: how a job ended, and who cancelled it.

        Raises:
            SlurmError: slurmdbd does not answer, or says what is not understood.
        """
        accounting = self._accounting(self.config())
        return [] if accounting is None else accounting.jobs(job_id, texts=False)

    def stored_script(self, record: JobRecord) -> StoredScript:
        """Read the script and environment that slurmdbd stored of a run; empty for none.

        Args:
            record: The run; its ids and submit time count.

        Raises:
            SlurmError: slurmdbd does not answer.
        """
        accounting = self._accounting(self.config())
        return StoredScript() if accounting is None else accounting.stored(record)

    def submit_line(self, record: JobRecord) -> str:
        """Read the submit line of a run from slurmdbd; "" where there is none.

        Args:
            record: The run; its ids and submit time count.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        accounting = self._accounting(self.config())
        return "" if accounting is None else accounting.submit_line(record)

    def history(self) -> History | None:
        """Who is asked for all that slurmdbd knows of a time; None where there is no slurmdbd.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        config = self.config()
        if self._accounting(config) is None:
            return None
        return History(self._commands, config.get("ClusterName", self.cluster))

    def associations(self) -> Associations | None:
        """Who may run jobs under which account; None where there is no slurmdbd.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        accounting = self._accounting(self.config())
        return None if accounting is None else accounting.associations()

    def _accounting(self, config: Mapping[str, str]) -> Accounting | None:
        if config.get("AccountingStorageType") != "accounting_storage/slurmdbd":
            return None
        name = config.get("ClusterName", self.cluster)
        return Accounting(self._commands, name, self.offered, self.people)

    def _form_of_queue(self, known: QueueFormat | None) -> QueueFormat:
        """How the queue is asked for: as before, or anew for other commands, and now and then."""
        before = self._version
        if known is not None and time.monotonic() < self._format_until and self.version() == before:
            return known
        # A new secret; and where the commands' file cannot be seen, the version is asked again.
        self._version = None
        self.version()
        self._offered.clear()
        self._format = QueueFormat(self.offered("squeue"))
        self._format_until = time.monotonic() + _AGAIN_S
        # A build without JSON may have been exchanged for one that has it.
        self._has_json = True
        return self._format

    def _squeue(self, form: QueueFormat, *arguments: str) -> bytes:
        return self._commands.run(
            "squeue", *_ASK, *arguments, variables={"SQUEUE_FORMAT2": form.variable}
        )

    def _completed(self, job: str, records: list[JobRecord]) -> list[JobRecord]:
        """The records with what scontrol adds; without it where the job is gone meanwhile.

        Args:
            job: The job that they are of; "" for all jobs.
            records: The records.
        """
        words = ("show", "job", job) if job else ("show", "job")
        try:
            if self._has_json:
                try:
                    out = self._commands.run("scontrol", *words, "--json")
                    return completed_by_json(records, out)
                except (SlurmUnavailable, UnknownJob):
                    raise
                except SlurmError as error:
                    self._has_json = False
                    log.info("cluster %s: no JSON from Slurm: %s", self.cluster, error)
            return completed_by_text(records, self._commands.run("scontrol", "-o", *words))
        except UnknownJob:
            return records
