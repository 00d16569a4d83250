"""Slurm client for one cluster: job queue, job records, configuration, permissions and estimates.

:class:`Slurm` runs squeue, scontrol, sacct and sacctmgr through
:class:`steward.slurm.commands.CommandRunner` and returns typed records. It raises the errors of
:mod:`steward.slurm.errors`. Nodes, partitions and reservations are in
:mod:`steward.slurm.cluster`.
"""

import logging
import re
import socket
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from steward.core.access import ClusterRoles
from steward.core.events import utc_now
from steward.core.records import JobRecord
from steward.core.timestamps import to_micros
from steward.slurm.cluster_model import (
    SHOW_NODES_ARGUMENTS,
    SHOW_PARTITIONS_ARGUMENTS,
    ClusterModel,
)
from steward.slurm.commands import COMMAND_TIMEOUT_S, CommandRunner
from steward.slurm.errors import SlurmError, SlurmUnavailable, UnknownJob
from steward.slurm.queue import (
    QueueFormat,
    QueueSnapshot,
    Version,
    complete_from_json,
    complete_from_text,
    parse_queue,
)
from steward.slurm.sacct import SacctHistory
from steward.slurm.settings import ClusterSettings
from steward.slurm.slurmdbd import Associations, SlurmdbdClient, StoredScript
from steward.slurm.users import NameResolver
from steward.slurm.values import decode_text, parse_moment

log = logging.getLogger(__name__)

_QUEUE_OPTIONS: Final = ("-a", "-t", "all", "--local", "-h", "--noconvert")
_VERSION: Final = re.compile(r"\b(\d+)\.(\d+)(?:\.(\d+))?")
_SETTING: Final = re.compile(r"([A-Za-z_][^=\n]*?)\s*=\s?([^\n]*)")
MAX_COMPLETED: Final = 16
"""Largest number of records of one job id that scontrol completes.

Beyond it (an array split into many records) they come from squeue alone: scontrol writes 8 KB for
each record and holds slurmctld's lock meanwhile.
"""
_DATED: Final = re.compile(r"Configuration data as of (\S+)")
_AGAIN_S: Final = 600.0
_LISTS_FIELDS: Final = {"squeue": "--helpFormat", "sacct": "--helpformat"}


class Slurm:
    """Client for the Slurm of one cluster.

    Args:
        cluster: Cluster name in Steward's configuration.
        settings: Where Slurm's commands are and how to run them.
        timeout_s: Time-out of each command, in seconds.
    """

    def __init__(
        self, cluster: str, settings: ClusterSettings, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self.cluster = cluster
        self.resolver = NameResolver()
        self._commands = CommandRunner(cluster, settings, timeout_s)
        self._version: Version | None = None
        self._version_fingerprint: tuple[int, ...] = ()
        self._fields_by_program: dict[str, tuple[tuple[int, ...], frozenset[str]]] = {}
        self._format: QueueFormat | None = None
        self._format_until = 0.0
        self._has_json = True
        self._slurmdbd_cluster = ""
        """Name of the cluster in slurmdbd, as last read; "" without slurmdbd."""
        self._slurmdbd_until = float("-inf")

    def version(self) -> Version:
        """Return Slurm's version, such as (22, 5, 8); cached until the squeue binary changes.

        Raises:
            SlurmError: squeue cannot be run.
        """
        fingerprint = self._commands.compute_fingerprint("squeue")
        if self._version is None or fingerprint != self._version_fingerprint:
            self._version_fingerprint, self._version = fingerprint, None
            reply = self._commands.run("squeue", "--version").decode("utf-8", "replace")
            match = _VERSION.search(reply)
            if match is None:
                raise SlurmError(
                    f"no version number in the output {reply!r}", ("squeue", "--version"), reply
                )
            self._version = (int(match[1]), int(match[2]), int(match[3] or 0))
        return self._version

    def list_fields(self, program: str) -> frozenset[str]:
        """Return the fields that squeue or sacct can print, in lower case; empty if unknown.

        Cached until the program file changes.

        Args:
            program: ``squeue`` or ``sacct``.

        Raises:
            SlurmError: The program cannot be run.
        """
        fingerprint = self._commands.compute_fingerprint(program)
        if (
            program not in self._fields_by_program
            or fingerprint != self._fields_by_program[program][0]
        ):
            try:
                out = self._commands.run(program, _LISTS_FIELDS[program])
            except SlurmUnavailable:
                raise
            except SlurmError:
                if program != "squeue":
                    raise
                out = b""  # up to 23.02 it lacks the option, and the fields in question
            fields = frozenset(out.decode("ascii", "replace").lower().split())
            self._fields_by_program[program] = (fingerprint, fields)
        return self._fields_by_program[program][1]

    @property
    def known_version(self) -> str:
        """Slurm's version as last read ("22.05.8"), or "" before the first query."""
        if self._version is None:
            return ""
        major, minor, micro = self._version
        return f"{major}.{minor:02}.{micro}"

    def config(self) -> dict[str, str]:
        """Return the settings of ``scontrol show config``, with "" for ``(null)``.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
            SlurmError: The output lacks StateSaveLocation, so it is not a configuration.
        """
        out = self._commands.run("scontrol", "show", "config")
        settings: dict[str, str] = {}
        for line in out.decode("utf-8", "backslashreplace").splitlines():
            match = _SETTING.fullmatch(line)
            # The settings of cgroup.conf follow and may repeat a name; slurm.conf's value wins.
            if match and match[1] not in settings:
                settings[match[1]] = "" if match[2] == "(null)" else match[2].strip()
        if "StateSaveLocation" not in settings:
            raise SlurmError(
                f"cluster {self.cluster}: cannot read the settings of slurm.conf: 'scontrol show "
                "config' prints no StateSaveLocation. Is scontrol Slurm's?",
                ("scontrol", "show", "config"),
                out[:200].decode("utf-8", "backslashreplace"),
            )
        return settings

    def read_clock(self) -> datetime:
        """Return slurmctld's current time, UTC, rounded down to the second.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        arguments = ("show", "config")
        out = self._commands.run("scontrol", *arguments).decode("utf-8", "backslashreplace")
        match = _DATED.match(out)
        at = parse_moment(match[1]) if match else None
        if at is None:
            raise SlurmError(
                f"cluster {self.cluster}: scontrol show config shows no date",
                ("scontrol", *arguments),
                out[:200],
            )
        return at

    def queue(self, previous: Mapping[int, int] | None = None) -> QueueSnapshot:
        """Poll the queue: all jobs that slurmctld holds, including ended ones until MinJobAge.

        squeue folds pending array tasks that have records of their own (requeued tasks) into the
        array's row. The row's task expression covers them, see
        :func:`steward.slurm.arrays.includes_task`. :meth:`job` shows them.

        Args:
            previous: ``rows`` of this object's last queue. Only jobs whose row changed become
                records. Every ten minutes all of them do, so that user names resolved since are
                picked up.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        current = self._format if previous is not None else None
        queue_format = self._choose_queue_format(current)
        rows_before = previous if previous is not None and queue_format is current else {}
        began = time.monotonic()
        taken_at = utc_now()
        out = self._squeue(queue_format)
        cost_s = time.monotonic() - began
        records, rows, malformed_count = parse_queue(queue_format, out, self.resolver, rows_before)
        return QueueSnapshot(
            records=records,
            rows=rows,
            taken_at=taken_at,
            cost_s=cost_s,
            passed_over=malformed_count,
        )

    def all_jobs(
        self, *, uid: int | None = None, is_whole: bool = False, dependency_bytes: int = 512
    ) -> list[JobRecord]:
        """Return the records of all jobs, with the fields of :meth:`job`.

        Args:
            uid: Only jobs of this user, which costs slurmctld less.
            is_whole: Add the fields that only scontrol shows. This costs slurmctld much more time.
            dependency_bytes: Maximum number of bytes read of a dependency, which can be very long.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
            SlurmError: A row of squeue cannot be parsed.
        """
        queue_format = QueueFormat(
            self.list_fields("squeue"), is_single_job=True, dependency_bytes=dependency_bytes
        )
        arguments = () if uid is None else (f"--user={uid}",)
        records, _, malformed_count = parse_queue(
            queue_format, self._squeue(queue_format, *arguments), self.resolver, {}
        )
        if malformed_count:
            raise SlurmError(f"cannot parse {malformed_count} rows of squeue", ("squeue",))
        return self._complete_records("", list(records)) if is_whole and records else list(records)

    def job(self, job_id: int, *, apart: bool = False) -> list[JobRecord]:
        """Return the complete record of one job id.

        Args:
            job_id: Raw id. An array's id gives all tasks, a het leader's id all components.
            apart: Return each pending array task separately, which shows those with records of
                their own.

        Returns:
            The records; [] if slurmctld does not know the job, or no longer. More than
            ``MAX_COMPLETED`` records lack the fields of scontrol.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
            SlurmError: The output cannot be parsed.
        """
        queue_format = QueueFormat(self.list_fields("squeue"), is_single_job=True)
        try:
            out = self._squeue(queue_format, "-j", str(job_id), *(["-r"] if apart else []))
        except UnknownJob:
            return []
        parsed, _, malformed_count = parse_queue(queue_format, out, self.resolver, {})
        records = list(parsed)
        if malformed_count:
            raise SlurmError(f"cannot parse a row of squeue -j {job_id}", ("squeue",))
        return (
            self._complete_records(str(job_id), records)
            if len(records) <= MAX_COMPLETED
            else records
        )

    def read_roles(self) -> ClusterRoles:
        """Return the facts that permissions depend on: PrivateData, AdminLevels and coordinators.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        config = self.config()
        words = (word.strip().lower() for word in config.get("PrivateData", "").split(","))
        private_data = frozenset(word for word in words if word and word != "none")
        accounting = self._get_slurmdbd_client(config)
        if accounting is None:
            return ClusterRoles(private_data=private_data)
        admin_levels = accounting.read_admin_levels()
        return ClusterRoles(
            private_data=private_data,
            admins=frozenset(admin_levels),
            administrators=frozenset(
                user for user, level in admin_levels.items() if level == "Administrator"
            ),
            coordinators=accounting.read_coordinators(),
        )

    def find_state_directory(self) -> str:
        """Return StateSaveLocation, or "" if no slurmctld of this cluster is on this host.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        config = self.config()
        hosts = {
            value.partition("(")[0].partition(".")[0].lower()
            for key, value in config.items()
            if key.startswith("SlurmctldHost")
        }
        own = socket.gethostname().partition(".")[0].lower()
        return config["StateSaveLocation"] if hosts & {own, "localhost"} else ""

    def read_model(self, zone: str = "") -> ClusterModel:
        """Return the cluster model for estimates: partitions, node shapes, users and accounts.

        Args:
            zone: IANA name of the cluster's time zone, for rates that depend on the time of day.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        from steward.slurm.cluster_model import add_users, parse_cluster_model

        taken_us = to_micros(utc_now())
        config = self.config()
        partitions = self._commands.run("scontrol", *SHOW_PARTITIONS_ARGUMENTS)
        nodes = self._commands.run("scontrol", *SHOW_NODES_ARGUMENTS)
        model = parse_cluster_model(
            self.cluster, config, partitions, nodes, zone=zone, taken_us=taken_us
        )
        accounting = self._get_slurmdbd_client(config)
        if accounting is None:
            return model
        return add_users(model, accounting.read_people())

    def read_configuration_mark(self) -> str:
        """Return a text that changes when slurmctld restarts or the cluster model changes.

        The text has the boot time, slurm.conf, and partitions with weights and TRES. It omits
        nodes and users, so it costs slurmctld little even on a large cluster.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        config = self.config()
        config.pop("NEXT_JOB_ID", None)
        partitions = self._commands.run("scontrol", *SHOW_PARTITIONS_ARGUMENTS)
        return f"{config}\n{decode_text(partitions)}"

    def has_accounting(self) -> bool:
        """Return True if the cluster has a slurmdbd; cached for ten minutes.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        return self._get_slurmdbd_client() is not None

    def query_accounting(self, job_id: int) -> list[JobRecord]:
        """Return slurmdbd's records of a job id; [] without slurmdbd.

        Raises:
            SlurmError: slurmdbd does not answer, or its output cannot be parsed.
        """
        accounting = self._get_slurmdbd_client()
        return [] if accounting is None else accounting.query_jobs(job_id)

    def query_accounting_end(self, job_id: int) -> list[JobRecord]:
        """Return slurmdbd's records without texts: how a job ended and who cancelled it.

        Raises:
            SlurmError: slurmdbd does not answer, or its output cannot be parsed.
        """
        accounting = self._get_slurmdbd_client()
        return [] if accounting is None else accounting.query_jobs(job_id, texts=False)

    def read_stored_script(self, record: JobRecord) -> StoredScript:
        """Return the script and environment that slurmdbd stored for a run, each None if absent.

        Args:
            record: The run, identified by its ids and submit time.

        Raises:
            SlurmError: slurmdbd does not answer.
        """
        accounting = self._get_slurmdbd_client()
        return StoredScript() if accounting is None else accounting.read_stored_script(record)

    def read_submit_line(self, record: JobRecord) -> str:
        """Return the submit line of a run from slurmdbd, or "" if it has none.

        Args:
            record: The run, identified by its ids and submit time.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        accounting = self._get_slurmdbd_client()
        return "" if accounting is None else accounting.read_submit_line(record)

    def history(self) -> SacctHistory | None:
        """Return the client for slurmdbd's records of a period, or None without slurmdbd.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        if not self.has_accounting():
            return None
        return SacctHistory(self._commands, self._slurmdbd_cluster)

    def associations(self) -> Associations | None:
        """Return the cluster's associations, or None without slurmdbd.

        Raises:
            SlurmError: slurmctld or slurmdbd does not answer.
        """
        accounting = self._get_slurmdbd_client()
        return None if accounting is None else accounting.read_associations()

    def _get_slurmdbd_client(
        self, config: Mapping[str, str] | None = None
    ) -> SlurmdbdClient | None:
        """Return the client for slurmdbd, or None if the cluster has none; cached for ten minutes.

        Args:
            config: slurm.conf's settings, if they have just been read.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        now = time.monotonic()
        if config is None and now >= self._slurmdbd_until:
            config = self.config()
        if config is not None:
            has_slurmdbd = config.get("AccountingStorageType") == "accounting_storage/slurmdbd"
            name = config.get("ClusterName", self.cluster)
            self._slurmdbd_cluster = name if has_slurmdbd else ""
            self._slurmdbd_until = now + _AGAIN_S
        if not self._slurmdbd_cluster:
            return None
        return SlurmdbdClient(
            self._commands, self._slurmdbd_cluster, self.list_fields, self.resolver
        )

    def _choose_queue_format(self, current: QueueFormat | None) -> QueueFormat:
        """Return the queue format: the given one, or a new one after ten minutes or an upgrade."""
        before = self._version
        if (
            current is not None
            and time.monotonic() < self._format_until
            and self.version() == before
        ):
            return current
        # A new format has a new secret word. The version is read again too, because an upgrade goes
        # unnoticed where the binary cannot be inspected.
        self._version = None
        self.version()
        self._fields_by_program.clear()
        self._format = QueueFormat(self.list_fields("squeue"))
        self._format_until = time.monotonic() + _AGAIN_S
        # An upgrade may have brought JSON support.
        self._has_json = True
        return self._format

    def _squeue(self, queue_format: QueueFormat, *arguments: str) -> bytes:
        """Run squeue in a queue format and return its output."""
        return self._commands.run(
            "squeue",
            *_QUEUE_OPTIONS,
            *arguments,
            variables={"SQUEUE_FORMAT2": queue_format.format_text},
        )

    def _complete_records(self, job: str, records: list[JobRecord]) -> list[JobRecord]:
        """Add scontrol's fields to the records; return them unchanged if the job is gone.

        Args:
            job: The job id, or "" for all jobs.
            records: The records.
        """
        arguments = ("show", "job", job) if job else ("show", "job")
        try:
            if self._has_json:
                try:
                    out = self._commands.run("scontrol", *arguments, "--json")
                    return complete_from_json(records, out)
                except (SlurmUnavailable, UnknownJob):
                    raise
                except SlurmError as error:
                    self._has_json = False
                    log.info("cluster %s: no JSON from Slurm: %s", self.cluster, error)
            return complete_from_text(records, self._commands.run("scontrol", "-o", *arguments))
        except UnknownJob:
            return records
