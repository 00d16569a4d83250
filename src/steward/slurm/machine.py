"""A cluster's machine as it stands: nodes, partitions, reservations, daemons, configuration."""

import re
import secrets
import string
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.slurm import job_details, machine_config, machine_rows, nodelists, steps, values
from steward.slurm.client import Slurm
from steward.slurm.commands import Commands
from steward.slurm.errors import SlurmError, SlurmUnavailable, UnknownJob, UnknownNode
from steward.slurm.machine_rows import (
    NodeReader,
    NodeRecord,
    PartitionRecord,
    Reason,
    ReservationRecord,
    Shown,
)
from steward.slurm.nodelists import NodeListError
from steward.slurm.queue import Version
from steward.slurm.settings import ClusterSettings
from steward.slurm.steps import Steps

_UP: Final = re.compile(r"(Slurmctld|Slurmdbd)\(([^)]*)\) at (.+) is (UP|DOWN)")
_NOT_FOUND: Final = re.compile(r"Node (\S+) not found")
_NO_STEPS: Final = re.compile(r"Job step \S+ not found|No job steps")
_UNIT: Final = "\x1f"
_LETTERS: Final = 12
_AGAIN_S: Final = 600.0
_SHOWS_ALL: Final[Version] = (24, 11, 0)
"""22.05 hides nodes of a cloud that are powered down, unless PrivateData=cloud."""
_PING_S: Final = 10.0


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """Whether one of Slurm's daemons answers.

    Attributes:
        daemon: Which.
        role: ``primary``, ``backup`` and the like, as Slurm says it.
        host: The host that it is to run on.
        up: Whether it answers.
    """

    daemon: Literal["slurmctld", "slurmdbd"]
    role: str = ""
    host: str = ""
    up: bool


class Machine:
    """One cluster's machine, as slurmctld shows it.

    Args:
        cluster: Its name in the configuration.
        settings: How its commands are found and started.
    """

    def __init__(self, cluster: str, settings: ClusterSettings) -> None:
        self._cluster = cluster
        self._commands = Commands(cluster, settings)
        self._slurm = Slurm(cluster, settings)
        self._people = self._slurm.people
        self._reader = NodeReader(self._people)
        self._has_books = False
        self._books_until = 0.0

    def nodes(self, nodelist: str = "") -> dict[str, NodeRecord]:
        """The nodes, by name.

        Args:
            nodelist: Only these; all if empty. One node is asked singly.

        Raises:
            UnknownNode: Slurm does not have all of them.
            NodeListError: It is no node list.
            SlurmError: slurmctld does not answer.
        """
        wanted = None if _is_all(nodelist) else _expand(nodelist)
        if wanted is not None and len(wanted) == 1:
            return {wanted[0]: self._node(wanted[0])}
        found = self._all_nodes()
        if wanted is None:
            return found
        unknown = [name for name in wanted if name not in found]
        if unknown:
            raise UnknownNode(unknown)
        return {name: found[name] for name in wanted}

    def node_states(self) -> dict[str, NodeRecord]:
        """All nodes, without ``details``, for who looks often: what has not changed costs little.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return self._all_nodes(self._reader)

    def node_names(self, nodelist: str) -> list[str]:
        """The nodes of a list in any of Slurm's forms, in order; ``ALL`` are all of them.

        Raises:
            UnknownNode: Slurm does not have all of them.
            NodeListError: It is no node list, or an empty one.
            SlurmError: slurmctld does not answer.
        """
        if not nodelist.strip():
            raise NodeListError("no node is named", (), nodelist)
        return list(self.nodes(nodelist))

    def partitions(self) -> dict[str, PartitionRecord]:
        """The partitions, by name.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return machine_rows.partitions(self._show("partition"))

    def reservations(self) -> dict[str, ReservationRecord]:
        """The reservations, by name.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return machine_rows.reservations(self._show("reservation"))

    def started_at(self) -> datetime:
        """When this slurmctld started (its BOOT_TIME), UTC.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        out = self._commands.run("scontrol", "show", "config")
        for line in out.decode("utf-8", "backslashreplace").splitlines():
            name, equals, text = line.partition("=")
            if equals and name.strip() == "BOOT_TIME":
                at = values.moment(text.strip())
                if at is not None:
                    return at
        raise SlurmError(
            f"cluster {self._cluster}: scontrol show config shows no BOOT_TIME",
            ("scontrol", "show", "config"),
            out[:200].decode("utf-8", "backslashreplace"),
        )

    def config_items(self) -> dict[str, Any]:
        """Slurm's configuration in snake_case, see :mod:`steward.slurm.machine_config`.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return machine_config.items(self._commands.run("scontrol", "show", "config"))

    def pings(self) -> tuple[Ping, ...]:
        """Which of Slurm's daemons answer: each slurmctld, and slurmdbd where there is one.

        A slurmctld that does not answer is no error here.

        Raises:
            SlurmError: ``scontrol`` cannot be run.
        """
        found = self.controllers()
        if self._books() and all(ping.daemon != "slurmdbd" for ping in found):
            found.append(self._ping_of_books())
        return tuple(found)

    def controllers(self, *, timeout_s: float | None = None) -> list[Ping]:
        """Ask ``scontrol ping`` which daemons answer: each slurmctld, in some versions slurmdbd.

        Args:
            timeout_s: Seconds that it may take; the cluster's setting if None.

        Raises:
            SlurmUnavailable: It took longer: one of them neither answers nor refuses.
            SlurmError: ``scontrol`` cannot be run.
        """
        try:
            out = self._commands.run("scontrol", "ping", timeout_s=timeout_s).decode(
                "utf-8", "backslashreplace"
            )
        except SlurmError as error:
            if not _UP.search(error.said):
                raise
            out = error.said  # one that is down is said so with an exit code
        return [
            Ping(
                daemon="slurmctld" if match[1] == "Slurmctld" else "slurmdbd",
                role=match[2],
                host=match[3],
                up=match[4] == "UP",
            )
            for match in _UP.finditer(out)
        ]

    def job_details(self, jobs: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Every field of some jobs, see :mod:`steward.slurm.job_details`; each asked singly.

        Args:
            jobs: Their names: ``12``, ``12_3``, ``12+1``. An array's id gives all its tasks.

        Returns:
            The records of each; [] for a job that slurmctld does not know (any more).

        Raises:
            SlurmError: slurmctld does not answer, or one of these is no job's name.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for job in jobs:
            job_id, task, offset = _job_named(job)
            records = [
                record
                for record in self._slurm.job(job_id)
                if (task is None or record.array_task == str(task))
                and (offset is None or record.het_offset == offset)
            ]
            text = self._texts_of(str(job_id)) if records else {}
            found[job] = [
                job_details.details(record, job_details.extras(record, text)) for record in records
            ]
        return found

    def all_job_details(
        self, *, full: bool = False, dependency_bytes: int = 512
    ) -> list[dict[str, Any]]:
        """The fields of all jobs that slurmctld holds, as the queue shows them.

        Args:
            full: Whether with :data:`job_details.OF_SCONTROL`, which takes slurmctld much longer.
            dependency_bytes: How much of a dependency is read, which can be very long.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        text = self._texts_of() if full else {}
        return [
            job_details.details(record, job_details.extras(record, text) if full else None)
            for record in self._slurm.all_jobs(is_whole=full, dependency_bytes=dependency_bytes)
        ]

    def steps(self, jobs: Iterable[str]) -> dict[str, Steps]:
        """The steps that run, by job and step; {} for a job without any.

        Of an array, and of a heterogeneous job, those of all its tasks or components are
        under their own names beside the one that was asked for.

        Raises:
            SlurmError: slurmctld does not answer, or one of these is no job's name.
        """
        found: dict[str, Steps] = {}
        for job in jobs:
            job_id, task, offset = _job_named(job)
            found[job] = {}
            try:
                out = self._show("step", job)
            except UnknownJob:
                continue
            except SlurmError as error:
                if _NO_STEPS.search(error.said):
                    continue
                raise
            found |= steps.parse(out, job_id, task, offset)
        return found

    def _texts_of(self, *job: str) -> dict[int, str]:
        try:
            return job_details.segments(self._show("job", *job))
        except UnknownJob:
            return {}

    def _books(self) -> bool:
        """Whether there is a slurmdbd; as it was where slurmctld cannot be asked."""
        now = time.monotonic()
        if now >= self._books_until:
            try:
                self._has_books = self._slurm.has_accounting()
            except SlurmUnavailable:
                return self._has_books
            self._books_until = now + _AGAIN_S
        return self._has_books

    def _ping_of_books(self) -> Ping:
        """What ``scontrol ping`` leaves out: slurmdbd is asked for the least that it knows."""
        try:
            self._commands.run(
                *("sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster"),
                timeout_s=_PING_S,
            )
        except SlurmUnavailable:
            return Ping(daemon="slurmdbd", role="primary", up=False)
        return Ping(daemon="slurmdbd", role="primary", up=True)

    def _show(self, *what: str, future: bool = False) -> bytes:
        options = ("-a", "-F") if future else ("-a",)
        return self._commands.run("scontrol", *options, "-o", "show", *what)

    def _all_nodes(self, reader: NodeReader | None = None) -> dict[str, NodeRecord]:
        hides = self._hides_some()
        # Of those that are hidden from the list, FUTURE ones can be told from the others so.
        out = self._show("node", future=hides)
        shown = reader.nodes(out) if reader else machine_rows.nodes(out, self._people)
        unsure = any(not one.is_sure for one in shown)
        listed = self._listed() if hides or unsure else set()
        count = Counter(one.node.name for one in shown)
        found: dict[str, Shown] = {}
        for one in shown:
            name = one.node.name
            if name in found:
                continue
            if count[name] == 1 and (one.is_sure or name in listed):
                found[name] = one
                continue
            # A comment may hold a line that looks like another node: such a name is there
            # twice, or no partition knows it.
            try:
                found[name] = self._shown(name)
            except UnknownNode:
                continue
        nodes = self._with_sure_reasons(found)
        if not hides:
            return nodes
        nodes |= {name: machine_rows.powered_down(name) for name in sorted(listed - nodes.keys())}
        return {name: node for name, node in nodes.items() if node.base != "FUTURE"}

    def _hides_some(self) -> bool:
        """Whether this Slurm shows no nodes of a cloud that are powered down."""
        return self._slurm.version() < _SHOWS_ALL

    def _listed(self) -> set[str]:
        """The nodes that partitions have; these know them all."""
        lists = (partition.nodes for partition in self.partitions().values())
        return {name for nodelist in lists if nodelist for name in nodelists.expand(nodelist)}

    def _node(self, name: str) -> NodeRecord:
        try:
            shown = self._shown(name)
        except UnknownNode:
            if self._hides_some() and name in self._listed():
                return self._all_nodes()[name]
            raise
        return self._with_sure_reasons({name: shown})[name]

    def _shown(self, name: str) -> Shown:
        """One node, asked singly: the first record is its own, whatever its texts hold."""
        try:
            out = self._show("node", name)
        except SlurmError as error:
            if _NOT_FOUND.search(error.said):
                raise UnknownNode([name]) from error
            raise
        shown = next(iter(machine_rows.nodes(out, self._people)), None)
        if shown is None or shown.node.name != name:
            raise UnknownNode([name])
        return shown

    def _with_sure_reasons(self, found: Mapping[str, Shown]) -> dict[str, NodeRecord]:
        unsure = [name for name, shown in found.items() if not shown.has_sure_reason]
        sure = self._reasons(unsure) if unsure else {}
        return {
            name: machine_rows.with_reason(shown.node, sure[name]) if name in sure else shown.node
            for name, shown in found.items()
        }

    def _reasons(self, names: Sequence[str]) -> dict[str, Reason]:
        """Reasons in a form that they cannot break: with a separator that nobody knows.

        It goes by the environment: arguments can be read by everybody in /proc. (With
        ``-N``, a node a line, ``sinfo`` has no ear for the environment.)
        """
        word = _UNIT + "".join(secrets.choice(string.ascii_letters) for _ in range(_LETTERS))
        out = self._commands.run(
            *("sinfo", "-a", "-h", "-n", ",".join(names)),
            variables={"SINFO_FORMAT": _UNIT.join(("%N", "%U", "%H", "%E")) + word},
        )
        found: dict[str, Reason] = {}
        for row in out.decode("utf-8", "backslashreplace").split(f"{word}\n"):
            parts = row.split(_UNIT, 3)
            if len(parts) == 4:
                reason = machine_rows.reason_of_sinfo(*parts[1:])
                found |= dict.fromkeys(nodelists.expand(parts[0]), reason)
        return found


def _is_all(nodelist: str) -> bool:
    return nodelist.strip().upper() in ("", "ALL")


def _job_named(job: str) -> tuple[int, int | None, int | None]:
    name = job_details.named(job)
    if name is None:
        raise UnknownJob(f"{job!r} is no job's name: use 12, 12_3 or 12+1", (), job)
    return name


def _expand(nodelist: str) -> list[str]:
    """The names of a list, each once; blanks part them as commas do."""
    names = nodelists.expand(",".join(nodelist.replace(",", " ").split()))
    if not names:
        raise NodeListError(f"{nodelist!r} names no node", (), nodelist)
    return list(dict.fromkeys(names))
