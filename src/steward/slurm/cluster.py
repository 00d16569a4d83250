"""Cluster queries: nodes, partitions, reservations, daemons, slurm.conf and job steps.

:class:`ClusterQueries` runs ``scontrol show`` and ``scontrol ping`` for one cluster. Before it come
two parsers that it uses:

- :func:`parse_config` reads ``scontrol show config`` into snake_case keys, as pyslurm does. Where
  pyslurm's older dictionary shortened a name, that name is present too. Passwords are omitted.
- :func:`parse_steps` reads ``scontrol show step``.

Last come :func:`node_addresses` and :func:`slurmd_uid`, with which capture checks who sends node
reports.
"""

import re
import secrets
import string
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from steward.slurm import cluster_records, job_details, nodelists
from steward.slurm.client import Slurm
from steward.slurm.cluster_records import (
    NodeReader,
    NodeRecord,
    ParsedNode,
    PartitionRecord,
    Reason,
    ReservationRecord,
    make_powered_down_node,
    parse_sinfo_reason,
    replace_reason,
)
from steward.slurm.commands import COMMAND_TIMEOUT_S, CommandRunner
from steward.slurm.errors import SlurmError, SlurmUnavailable, UnknownJob, UnknownNode
from steward.slurm.nodelists import NodeListError
from steward.slurm.queue import Version
from steward.slurm.settings import ClusterSettings
from steward.slurm.values import parse_moment, to_snake_case

_SETTING: Final = re.compile(r"([A-Za-z_][^=\n]*?)\s*=\s?([^\n]*)")
_INDEXED: Final = re.compile(r"(\w+)\[(\d+)\]")
_MEASURE: Final = re.compile(r"(\d{1,18}) (sec|min|usec|percent|nodes/min)")
_USER: Final = re.compile(r"(.*)\((\d{1,10})\)")
_SECRET: Final = re.compile(r"pass(?:word)?$")
_NO_SETTING: Final = frozenset({"", "(null)"})

# Shorter names of pyslurm's config().get() for the same settings.
_PYSLURM_NAMES: Final = {
    "accounting_storage_parameters": "accounting_storage_params",
    "auth_info": "authinfo",
    "auth_type": "authtype",
    "burst_buffer_type": "bb_type",
    "communication_parameters": "comm_params",
    "cpu_freq_governors": "cpu_freq_govs",
    "dependency_parameters": "dependency_params",
    "federation_parameters": "fed_params",
    "gres_types": "gres_plugins",
    "launch_parameters": "launch_params",
    "max_array_size": "max_array_sz",
    "max_job_count": "max_job_cnt",
    "max_step_count": "max_step_cnt",
    "message_timeout": "msg_timeout",
    "plugin_dir": "plugindir",
    "plug_stack_config": "plugstack",
    "priority_decay_half_life": "priority_decay_hl",
    "priority_parameters": "priority_params",
    "scheduler_parameters": "sched_params",
    "scheduler_time_slice": "sched_time_slice",
    "scheduler_type": "schedtype",
    "select_type_parameters": "select_type_param",
    "slurm_version": "version",
    "slurmctld_log_file": "slurmctld_logfile",
    "slurmctld_parameters": "slurmctld_params",
    "slurmctld_pid_file": "slurmctld_pidfile",
    "slurmd_log_file": "slurmd_logfile",
    "slurmd_parameters": "slurmd_params",
    "slurmd_pid_file": "slurmd_pidfile",
    "slurmd_spool_dir": "slurmd_spooldir",
    "unkillable_step_program": "unkillable_program",
    "unkillable_step_timeout": "unkillable_timeout",
    "prep_parameters": "prep_params",
    "v_size_factor": "vsize_factor",
    "x11_parameters": "x11_params",
}


def parse_config(out: bytes) -> dict[str, Any]:
    """Parse ``scontrol show config`` into a dictionary.

    Numbers are in Slurm's unit (nearly always seconds; ``OverTimeLimit`` in minutes), BOOT_TIME
    is seconds since the epoch, and unset settings are None.
    """
    settings: dict[str, Any] = {}
    for line in out.decode("utf-8", "backslashreplace").splitlines():
        match = _SETTING.fullmatch(line)
        if match is None:
            if settings:
                break  # settings of cgroup.conf and others follow; they are not slurm.conf's
            continue
        _add_setting(settings, match[1].strip(), match[2].strip())
    for name, short in _PYSLURM_NAMES.items():
        if name in settings:
            settings.setdefault(short, settings[name])
    hosts = settings.get("slurmctld_host")
    if hosts:
        # pyslurm has the first host under these names.
        host, _, address = hosts[0].partition("(")
        settings |= {"control_machine": host, "control_addr": address.rstrip(")") or None}
    return settings


def _add_setting(settings: dict[str, Any], name: str, text: str) -> None:
    """Add one setting to the dictionary; skip passwords and repeated names."""
    indexed = _INDEXED.fullmatch(name)
    key = to_snake_case(indexed[1] if indexed else name)
    if _SECRET.search(key):
        return
    if indexed:
        settings.setdefault(key, []).append(text)
        return
    if key in settings:
        return
    settings[key] = _parse_setting(text)
    user = _USER.fullmatch(text)
    if user and key in ("slurm_user", "slurmd_user"):
        settings |= {f"{key}_name": user[1], f"{key}_id": int(user[2])}


def _parse_setting(text: str) -> Any:
    """Parse the value of a setting: None, a number, seconds since the epoch, or text."""
    if text in _NO_SETTING:
        return None
    if re.fullmatch(r"\d{1,18}", text):
        return int(text)
    if measure := _MEASURE.fullmatch(text):
        return int(measure[1])
    moment = parse_moment(text) if re.match(r"\d{4}-", text) else None
    return text if moment is None else int(moment.timestamp())


Steps = dict[str, dict[str, Any]]
"""Steps of a job by name: ``batch``, ``extern``, ``interactive``, ``0`` and so on."""

_STEP_HEAD: Final = re.compile(
    r"^StepId=(\d{1,10})(?:_(\d{1,10})|\+(\d{1,10}))?\.(\w{1,20}) (UserId=\d+ .*? Name=)",
    re.MULTILINE,
)
_FIELD: Final = re.compile(r"(?:^| )([A-Za-z:]+)=(\S*)")
_NAMES: Final = {
    "NodeList": "nodes",
    "Nodes": "num_nodes",
    "CPUs": "num_cpus",
    "Tasks": "num_tasks",
    "TRES": "tres_alloc_str",
    "CPUFreqReq": "cpu_freq",
    "Dist": "task_dist",
    "SrunHost:Pid": "srun_host_pid",
}
_NO_VALUE: Final = frozenset({"", "(null)", "(null):0", "N/A", "None", "Unknown"})


def parse_steps(
    out: bytes, job_id: int, task: int | None = None, het_offset: int | None = None
) -> dict[str, Steps]:
    """Parse ``scontrol -o show step`` into steps by job name (array tasks have their own).

    Args:
        out: The command's output.
        job_id: The requested id; steps of other jobs are skipped.
        task: Return only this array task's steps.
        het_offset: Return only this het component's steps.
    """
    text = out.decode("utf-8", "backslashreplace")
    heads = [
        head
        for head in _STEP_HEAD.finditer(text)
        if int(head[1]) == job_id
        and (task is None or head[2] == str(task))
        and (het_offset is None or head[3] == str(het_offset))
    ]
    steps: dict[str, Steps] = {}
    for head, next_head in zip(heads, [*heads[1:], None], strict=False):
        rest = text[head.end() : next_head.start() if next_head else None].rstrip("\n")
        # Slurm 22.05 to 24.11 misspell TBD, the id of a step that has no number yet.
        step = "TBD" if head[4] == "TDB" else head[4]
        job_name = head[1] + (f"_{head[2]}" if head[2] else f"+{head[3]}" if head[3] else "")
        # The first step of a name is real; a second one is text inside the first one's fields.
        steps.setdefault(job_name, {}).setdefault(step, _parse_step(step, head[5], rest))
    return steps


def _parse_step(step: str, head: str, rest: str) -> dict[str, Any]:
    """Parse the fields of one step."""
    name, _, tail = rest.rpartition(" Network=")
    network, _, after = tail.partition(" TRES=")
    fields: dict[str, Any] = {
        "step_id": step,
        "name": _clear_empty(name),
        "network": _clear_empty(network),
    }
    for key, value in _FIELD.findall(f"{head.removesuffix('Name=')} TRES={after}"):
        fields.setdefault(_NAMES.get(key, to_snake_case(key)), _parse_field(key, value))
    return fields


def _parse_field(key: str, text: str) -> Any:
    """Parse the value of a step's field."""
    if text in _NO_VALUE:
        return None
    if key == "StartTime":
        moment = parse_moment(text)
        return None if moment is None else int(moment.timestamp())
    return int(text) if re.fullmatch(r"\d{1,18}", text) else text


def _clear_empty(text: str) -> str | None:
    """Return a text, or None for Slurm's spellings of no value."""
    return None if text in _NO_VALUE else text


_PING_LINE: Final = re.compile(r"(Slurmctld|Slurmdbd)\(([^)]*)\) at (.+) is (UP|DOWN)")
_NOT_FOUND: Final = re.compile(r"Node (\S+) not found")
_NO_STEPS: Final = re.compile(r"Job step \S+ not found|No job steps")
_SEPARATOR: Final = "\x1f"
_LETTERS: Final = 12
_RECHECK_S: Final = 600.0
_LISTS_POWERED_DOWN_SINCE: Final[Version] = (24, 11, 0)
"""First version that lists powered-down cloud nodes; older ones do so only with PrivateData=cloud.
"""
_PING_S: Final = 10.0


class Ping(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of ``scontrol ping`` for one Slurm daemon.

    Attributes:
        daemon: The daemon.
        role: ``primary``, ``backup`` and so on, in Slurm's words.
        host: The host it is configured on.
        up: Whether it answers.
    """

    daemon: Literal["slurmctld", "slurmdbd"]
    role: str = ""
    host: str = ""
    up: bool


class ClusterQueries:
    """Client for the nodes, partitions, reservations and daemons of one cluster.

    Args:
        cluster: Cluster name in Steward's configuration.
        settings: Where Slurm's commands are and how to run them.
        timeout_s: Time-out of each command, in seconds.
    """

    def __init__(
        self, cluster: str, settings: ClusterSettings, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._cluster = cluster
        self._commands = CommandRunner(cluster, settings, timeout_s)
        self._slurm = Slurm(cluster, settings, timeout_s)
        self._resolver = self._slurm.resolver
        self._node_reader = NodeReader(self._resolver)
        self._node_lists: tuple[str, ...] = ()
        self._listed_names: set[str] | None = None
        self._cached_has_slurmdbd = False
        self._has_slurmdbd_until = 0.0

    def nodes(self, nodelist: str = "") -> dict[str, NodeRecord]:
        """Return node records by name.

        Args:
            nodelist: Node list; "" or ``ALL`` for all nodes. One name queries only that node.

        Raises:
            UnknownNode: Slurm lacks at least one of them.
            NodeListError: The node list is malformed.
            SlurmError: slurmctld does not answer.
        """
        names = None if _is_all(nodelist) else _expand_names(nodelist)
        if names is not None and len(names) == 1:
            return {names[0]: self._query_node(names[0])}
        nodes = self._query_nodes()
        if names is None:
            return nodes
        unknown = [name for name in names if name not in nodes]
        if unknown:
            raise UnknownNode(unknown)
        return {name: nodes[name] for name in names}

    def node_states(self) -> dict[str, NodeRecord]:
        """Return all nodes without ``details``, cheaply: unchanged nodes are not parsed again.

        Partitions are taken to list the nodes that they listed when last queried.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return self._query_nodes(self._node_reader)

    def node_names(self, nodelist: str) -> list[str]:
        """Return the names in a node list, in order; ``ALL`` means every node.

        Raises:
            UnknownNode: Slurm lacks at least one of them.
            NodeListError: The node list is malformed or empty.
            SlurmError: slurmctld does not answer.
        """
        if not nodelist.strip():
            raise NodeListError("the node list is empty: name a node", (), nodelist)
        return list(self.nodes(nodelist))

    def partitions(self) -> dict[str, PartitionRecord]:
        """Return the partitions by name.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        partitions = cluster_records.parse_partitions(self._show("partition"))
        self._node_lists = tuple(partition.nodes for partition in partitions.values())
        self._listed_names = None
        return partitions

    def reservations(self) -> dict[str, ReservationRecord]:
        """Return the reservations by name.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return cluster_records.parse_reservations(self._show("reservation"))

    def read_start_time(self) -> datetime:
        """Return when slurmctld started (BOOT_TIME), UTC.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        out = self._commands.run("scontrol", "show", "config")
        for line in out.decode("utf-8", "backslashreplace").splitlines():
            name, equals, text = line.partition("=")
            if equals and name.strip() == "BOOT_TIME":
                moment = parse_moment(text.strip())
                if moment is not None:
                    return moment
        raise SlurmError(
            f"cluster {self._cluster}: scontrol show config shows no BOOT_TIME",
            ("scontrol", "show", "config"),
            out[:200].decode("utf-8", "backslashreplace"),
        )

    def config_items(self) -> dict[str, Any]:
        """Return slurm.conf's settings with snake_case keys, see :func:`parse_config`.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return parse_config(self._commands.run("scontrol", "show", "config"))

    def pings(self) -> tuple[Ping, ...]:
        """Return which Slurm daemons answer: each slurmctld, and slurmdbd if configured.

        A slurmctld that does not answer raises no error; its ping has ``up=False``.

        Raises:
            SlurmError: ``scontrol`` cannot be run.
        """
        pings = self.ping_controllers()
        if self._has_slurmdbd() and all(ping.daemon != "slurmdbd" for ping in pings):
            pings.append(self.ping_slurmdbd())
        return tuple(pings)

    def ping_controllers(self, *, timeout_s: float | None = None) -> list[Ping]:
        """Run ``scontrol ping``: each slurmctld, and in some versions slurmdbd.

        Args:
            timeout_s: Time-out in seconds; None for the cluster's setting.

        Raises:
            SlurmUnavailable: The command timed out: a daemon neither answers nor refuses.
            SlurmError: ``scontrol`` cannot be run.
        """
        try:
            out = self._commands.run("scontrol", "ping", timeout_s=timeout_s).decode(
                "utf-8", "backslashreplace"
            )
        except SlurmError as error:
            if not _PING_LINE.search(error.output):
                raise
            out = error.output  # scontrol exits with an error if one daemon is down
        return [
            Ping(
                daemon="slurmctld" if match[1] == "Slurmctld" else "slurmdbd",
                role=match[2],
                host=match[3],
                up=match[4] == "UP",
            )
            for match in _PING_LINE.finditer(out)
        ]

    def ping_slurmdbd(self) -> Ping:
        """Ping slurmdbd by a small query of sacctmgr, which slurmctld does not see.

        Raises:
            SlurmError: ``sacctmgr`` cannot be run.
        """
        try:
            self._commands.run(
                *("sacctmgr", "-n", "-P", "show", "cluster", "format=Cluster"),
                timeout_s=_PING_S,
            )
        except SlurmUnavailable:
            return Ping(daemon="slurmdbd", role="primary", up=False)
        return Ping(daemon="slurmdbd", role="primary", up=True)

    def job_details(self, jobs: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Return every field of some jobs, see :mod:`steward.slurm.job_details`.

        Each raw job id is queried once, for all its tasks and components.

        Args:
            jobs: Job names: ``12``, ``12_3``, ``12+1``. An array's id gives all its tasks.

        Returns:
            The records of each job; [] for one that slurmctld does not know, or no longer.

        Raises:
            SlurmError: slurmctld does not answer, or a job name is malformed.
        """
        targets = {job: _parse_job_target(job) for job in jobs}
        job_ids = dict.fromkeys(job_id for job_id, _, _ in targets.values())
        records = {job_id: self._slurm.job(job_id) for job_id in job_ids}
        texts = {
            job_id: self._read_job_texts(str(job_id)) for job_id, found in records.items() if found
        }
        return {
            job: [
                job_details.build_job_details(
                    record, job_details.read_extras(record, texts[job_id])
                )
                for record in records[job_id]
                if (task is None or record.array_task == str(task))
                and (het_offset is None or record.het_offset == het_offset)
            ]
            for job, (job_id, task, het_offset) in targets.items()
        }

    def all_job_details(
        self, *, uid: int | None = None, full: bool = False, dependency_bytes: int = 512
    ) -> list[dict[str, Any]]:
        """Return the fields of all jobs in the queue.

        Args:
            uid: Only jobs of this user.
            full: Include :data:`job_details.SCONTROL_FIELDS`. This costs slurmctld much more time.
            dependency_bytes: Maximum number of bytes read of a dependency, which can be very long.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        records = self._slurm.all_jobs(uid=uid, is_whole=full, dependency_bytes=dependency_bytes)
        texts = self._read_job_texts() if full and records else {}
        return [
            job_details.build_job_details(
                record, job_details.read_extras(record, texts) if full else None
            )
            for record in records
        ]

    def steps(self, jobs: Iterable[str]) -> dict[str, Steps]:
        """Return the running steps by job and step name; {} for a job without steps.

        For an array or het job, the steps of each task or component appear under its own name,
        beside the requested name.

        Raises:
            SlurmError: slurmctld does not answer, or a job name is malformed.
        """
        steps: dict[str, Steps] = {}
        for job in jobs:
            job_id, task, het_offset = _parse_job_target(job)
            steps[job] = {}
            try:
                out = self._show("step", job)
            except UnknownJob:
                continue
            except SlurmError as error:
                if _NO_STEPS.search(error.output):
                    continue
                raise
            steps |= parse_steps(out, job_id, task, het_offset)
        return steps

    def _read_job_texts(self, *job: str) -> dict[int, str]:
        """Return scontrol's text for jobs, by job id."""
        try:
            return job_details.split_segments(self._show("job", *job))
        except UnknownJob:
            return {}

    def _has_slurmdbd(self) -> bool:
        """Return True if there is a slurmdbd, as last known while slurmctld is unreachable."""
        now = time.monotonic()
        if now >= self._has_slurmdbd_until:
            try:
                self._cached_has_slurmdbd = self._slurm.has_accounting()
            except SlurmUnavailable:
                return self._cached_has_slurmdbd
            self._has_slurmdbd_until = now + _RECHECK_S
        return self._cached_has_slurmdbd

    def _show(self, *arguments: str, include_future: bool = False) -> bytes:
        """Run ``scontrol -o show`` and return its output."""
        options = ("-a", "-F") if include_future else ("-a",)
        return self._commands.run("scontrol", *options, "-o", "show", *arguments)

    def _query_nodes(self, reader: NodeReader | None = None) -> dict[str, NodeRecord]:
        """Query all nodes; re-query those whose records a user's text may have forged."""
        hides_nodes = self._hides_nodes()
        # FUTURE nodes are listed only with -F, and must be told from hidden cloud nodes.
        out = self._show("node", include_future=hides_nodes)
        parsed = (
            reader.parse_nodes(out) if reader else cluster_records.parse_nodes(out, self._resolver)
        )
        is_unsure = any(not parsed_node.is_sure for parsed_node in parsed)
        listed_names = self._read_listed_nodes(reader) if hides_nodes or is_unsure else set()
        counts = Counter(parsed_node.node.name for parsed_node in parsed)
        accepted: dict[str, ParsedNode] = {}
        for parsed_node in parsed:
            name = parsed_node.node.name
            if name in accepted:
                continue
            if counts[name] == 1 and (parsed_node.is_sure or name in listed_names):
                accepted[name] = parsed_node
                continue
            # A comment may contain a line that looks like a node record. Such a name occurs twice,
            # or no partition lists it.
            try:
                accepted[name] = self._query_parsed_node(name)
            except UnknownNode:
                continue
        nodes = self._confirm_reasons(accepted)
        if not hides_nodes:
            return nodes
        nodes |= {
            name: make_powered_down_node(name) for name in sorted(listed_names - nodes.keys())
        }
        return {name: node for name, node in nodes.items() if node.base != "FUTURE"}

    def _hides_nodes(self) -> bool:
        """Return True if this version omits powered-down cloud nodes."""
        return self._slurm.version() < _LISTS_POWERED_DOWN_SINCE

    def _read_listed_nodes(self, reader: NodeReader | None = None) -> set[str]:
        """Return the nodes that partitions list, hidden ones included; read once for a reader."""
        if reader is None or not self._node_lists:
            self.partitions()
        if self._listed_names is None:
            self._listed_names = {
                name
                for nodelist in self._node_lists
                if nodelist
                for name in nodelists.expand_nodelist(nodelist)
            }
        return self._listed_names

    def _query_node(self, name: str) -> NodeRecord:
        """Query one node, hidden cloud nodes included."""
        try:
            parsed = self._query_parsed_node(name)
        except UnknownNode:
            if self._hides_nodes() and name in self._read_listed_nodes():
                return self._query_nodes()[name]
            raise
        return self._confirm_reasons({name: parsed})[name]

    def _query_parsed_node(self, name: str) -> ParsedNode:
        """Query one node; the first record is genuine, whatever its texts contain."""
        try:
            out = self._show("node", name)
        except SlurmError as error:
            if _NOT_FOUND.search(error.output):
                raise UnknownNode([name]) from error
            raise
        parsed = next(iter(cluster_records.parse_nodes(out, self._resolver)), None)
        if parsed is None or parsed.node.name != name:
            raise UnknownNode([name])
        return parsed

    def _confirm_reasons(self, nodes: Mapping[str, ParsedNode]) -> dict[str, NodeRecord]:
        """Return the records, with uncertain reasons read again from sinfo."""
        unsure = [name for name, parsed in nodes.items() if not parsed.has_sure_reason]
        reasons = self._query_reasons(unsure) if unsure else {}
        return {
            name: replace_reason(parsed.node, reasons[name]) if name in reasons else parsed.node
            for name, parsed in nodes.items()
        }

    def _query_reasons(self, names: Sequence[str]) -> dict[str, Reason]:
        """Read node reasons from sinfo with a secret separator, which no reason can contain.

        The format travels in the environment: everybody can read arguments in /proc. (With ``-N``,
        one node per line, ``sinfo`` ignores SINFO_FORMAT.)
        """
        row_end = _SEPARATOR + "".join(
            secrets.choice(string.ascii_letters) for _ in range(_LETTERS)
        )
        out = self._commands.run(
            *("sinfo", "-a", "-h", "-n", ",".join(names)),
            variables={"SINFO_FORMAT": _SEPARATOR.join(("%N", "%U", "%H", "%E")) + row_end},
        )
        reasons: dict[str, Reason] = {}
        for row in out.decode("utf-8", "backslashreplace").split(f"{row_end}\n"):
            parts = row.split(_SEPARATOR, 3)
            if len(parts) == 4:
                reason = parse_sinfo_reason(*parts[1:])
                reasons |= dict.fromkeys(nodelists.expand_nodelist(parts[0]), reason)
        return reasons


def _is_all(nodelist: str) -> bool:
    return nodelist.strip().upper() in ("", "ALL")


def _parse_job_target(job: str) -> tuple[int, int | None, int | None]:
    """Parse a job name into raw id, array task and het component, or raise UnknownJob."""
    target = job_details.parse_job_target(job)
    if target is None:
        raise UnknownJob(f"invalid job id {job!r}: use 12, 12_3 or 12+1", (), job)
    return target


def _expand_names(nodelist: str) -> list[str]:
    """Return the distinct names of a node list that uses commas or blanks."""
    names = nodelists.expand_nodelist(",".join(nodelist.replace(",", " ").split()))
    if not names:
        raise NodeListError(
            f"empty node list {nodelist!r}: name nodes, such as n1,n[3-5]", (), nodelist
        )
    return list(dict.fromkeys(names))


_UID: Final = re.compile(r".*\((\d+)\)")


class NodePlace(msgspec.Struct, frozen=True):
    """Address and host name of a node.

    Attributes:
        address: NodeAddr, a name or an IP address.
        hostname: NodeHostName.
    """

    address: str
    hostname: str


def node_addresses(cluster: str, settings: ClusterSettings) -> Mapping[str, NodePlace]:
    """Return the address of each node of a cluster, by NodeName.

    Raises:
        SlurmError: Slurm does not answer, or denies permission.
    """
    nodes = ClusterQueries(cluster, settings).node_states()
    # A hidden powered-down node has no address yet.
    return {
        name: NodePlace(node.address, node.hostname or node.address)
        for name, node in nodes.items()
        if node.address
    }


def slurmd_uid(cluster: str, settings: ClusterSettings) -> int:
    """Return the uid that slurmd runs as on the nodes (SlurmdUser).

    Raises:
        SlurmError: Slurm does not answer.
    """
    match = _UID.fullmatch(Slurm(cluster, settings).config().get("SlurmdUser", ""))
    return int(match[1]) if match else 0
