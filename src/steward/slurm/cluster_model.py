"""Cluster model for job estimates: partitions, node shapes, billing weights, users and accounts.

:func:`parse_cluster_model` builds a :class:`ClusterModel` from ``scontrol show config``,
``partition`` and ``node``; :func:`parse_users` and :func:`add_users` add users from sacctmgr,
where there is a slurmdbd. The gate and the price estimates use the model without asking Slurm
again.

Memory is in MiB, times are in seconds unless a name ends in ``_us``.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import msgspec

from steward.slurm import tres
from steward.slurm.nodelists import fold_nodelist
from steward.slurm.tres import parse_tres, parse_tres_amount
from steward.slurm.users import NameResolver
from steward.slurm.values import decode_text, parse_number, parse_seconds

SHOW_PARTITIONS_ARGUMENTS: Final = ("-a", "-o", "show", "partition")
SHOW_NODES_ARGUMENTS: Final = ("-a", "-o", "show", "node")
"""Arguments of scontrol to list partitions and nodes for :func:`parse_cluster_model`."""

KILL_WAIT_S: Final = 30
"""Slurm's default for KillWait, in seconds."""


class _Model(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # Base of the model's structs; defaults are omitted when encoded.
    pass


class NodeShape(_Model, frozen=True):
    """Group of nodes with identical hardware.

    Attributes:
        nodes: Node list of the group; "" if the names are unknown.
        count: Number of nodes.
        cpus: CPUs per node (CPUTot).
        usable_cpus: CPUs per node that jobs can use (CPUEfctv): all but specialized ones.
        cores: Cores per node.
        sockets: Sockets per node.
        memory_mib: RealMemory per node.
        tres: GRES per node, by name and by name and type (``gres/gpu``, ``gres/gpu:a100``).
    """

    nodes: str = ""
    count: int = 1
    cpus: int = 1
    usable_cpus: int = 1
    cores: int = 1
    sockets: int = 1
    memory_mib: int = 1
    tres: dict[str, int] = {}

    @property
    def cpus_per_core(self) -> int:
        """CPUs per core: its threads, or 1 where CPUs are configured as cores."""
        return max(1, -(-self.cpus // max(1, self.cores)))

    @property
    def whole(self) -> dict[str, int]:
        """TRES of a job that has such a node to itself."""
        return {"cpu": self.usable_cpus, "mem": self.memory_mib, "node": 1, **self.tres}


class PartitionModel(_Model, frozen=True):
    """Partition, with the limits and defaults that apply to its jobs.

    Attributes:
        name: Partition name, case-sensitive.
        shapes: (index into ``ClusterModel.shapes``, number of nodes) for each shape it has.
        nodes: Number of nodes.
        max_nodes: MaxNodes; 0 for no limit.
        min_nodes: MinNodes.
        max_time_s: MaxTime in seconds; None for no limit.
        default_time_s: DefaultTime in seconds; None if not set.
        over_time_s: OverTimeLimit in seconds, its own or the cluster's; None for no limit.
        exclusive: Whether jobs get whole nodes (OverSubscribe=EXCLUSIVE).
        selects: Its own SelectTypeParameters in lower case; "" for the cluster's.
        def_mem_per_cpu_mib: DefMemPerCPU, its own or the cluster's; 0 if not set.
        def_mem_per_node_mib: DefMemPerNode, likewise.
        max_mem_per_cpu_mib: MaxMemPerCPU, likewise.
        max_mem_per_node_mib: MaxMemPerNode, likewise.
        def_cpu_per_gpu: DefCpuPerGPU of JobDefaults, likewise.
        def_mem_per_gpu_mib: DefMemPerGPU of JobDefaults, likewise.
        billing: TRESBillingWeights: weight per unit by TRES name (``mem`` per MiB), as the text of
            a fraction (``1/4096``).
    """

    name: str
    shapes: tuple[tuple[int, int], ...] = ()
    nodes: int = 0
    max_nodes: int = 0
    min_nodes: int = 0
    max_time_s: int | None = None
    default_time_s: int | None = None
    over_time_s: int | None = 0
    exclusive: bool = False
    selects: str = ""
    def_mem_per_cpu_mib: int = 0
    def_mem_per_node_mib: int = 0
    max_mem_per_cpu_mib: int = 0
    max_mem_per_node_mib: int = 0
    def_cpu_per_gpu: int = 0
    def_mem_per_gpu_mib: int = 0
    billing: dict[str, str] = {}

    @property
    def usual_time_s(self) -> int | None:
        """Time limit of a job that requests none, in seconds; None for no limit."""
        return self.max_time_s if self.default_time_s is None else self.default_time_s


class ClusterModel(_Model, frozen=True):
    """Model of one cluster at one moment.

    Attributes:
        cluster: Cluster name.
        taken_us: Time of the query, µs since the epoch.
        zone: IANA name of the cluster's time zone; "" for this host's.
        partitions: Partitions by name.
        default_partition: Name of the default partition; "" if none.
        shapes: Node shapes that the partitions refer to.
        selects: SelectTypeParameters in lower case.
        linear: Whether jobs always get whole nodes (select/linear).
        billing_max: Kinds of TRES (``cpu``, ``gres``) of which billing counts only the most
            expensive; all other TRES are added. Empty without MAX_TRES and MAX_TRES_GRES.
        tracked: AccountingStorageTRES: the TRES that AllocTRES can show.
        max_array: MaxArraySize; 0 if unknown.
        kill_wait_s: KillWait in seconds: how long an ending job may continue.
        accounting: Whether the cluster has a slurmdbd.
        users: User names in slurmdbd, by uid.
        accounts: Default account by user name.
        qos: Default QOS of all associations by ``ACCOUNT/USER``; "" if an association has none.
        enforced: Whether Slurm rejects jobs of users without an association.
    """

    cluster: str
    taken_us: int = 0
    zone: str = ""
    partitions: dict[str, PartitionModel] = {}
    default_partition: str = ""
    shapes: tuple[NodeShape, ...] = ()
    selects: str = ""
    linear: bool = False
    billing_max: tuple[str, ...] = ()
    tracked: tuple[str, ...] = ()
    max_array: int = 0
    kill_wait_s: int = KILL_WAIT_S
    accounting: bool = False
    enforced: bool = False
    users: dict[int, str] = {}
    accounts: dict[str, str] = {}
    qos: dict[str, str] = {}

    def tracks(self, name: str) -> bool:
        """Return True if AllocTRES shows this TRES, so that its use by a job can be read."""
        if not self.tracked:
            return True
        if not self.accounting and name.startswith("gres/"):
            # Only slurmdbd assigns the numbers under which Slurm counts GRES.
            return False
        return name in self.tracked


_WORD: Final = re.compile(r"(?:^| )([A-Za-z/]+)=(\S*)")
_NODE: Final = re.compile(r"^NodeName=(\S+) ", re.MULTILINE)
# Fields of a node that come before any text users write, or that such text cannot contain.
_NODE_FIELDS: Final = frozenset(
    ("CoresPerSocket", "CPUTot", "CPUEfctv", "Gres", "RealMemory", "Sockets", "Partitions")
)

UserTables = tuple[dict[int, str], dict[str, str], dict[str, str]]
"""User names by uid, default accounts by user, and default QOS by ``ACCOUNT/USER``."""


def parse_cluster_model(
    cluster: str,
    config: Mapping[str, str],
    partitions: bytes,
    nodes: bytes,
    *,
    zone: str = "",
    taken_us: int = 0,
) -> ClusterModel:
    """Build the model of a cluster, without users and accounts.

    Args:
        cluster: Cluster name.
        config: Settings from ``scontrol show config``.
        partitions: Output of ``scontrol -a -o show partition``.
        nodes: Output of ``scontrol -a -o show node``.
        zone: IANA name of the cluster's time zone.
        taken_us: Time of the query, µs since the epoch.
    """
    shapes, shape_counts = _parse_shapes(nodes)
    models: dict[str, PartitionModel] = {}
    default = ""
    for line in partitions.decode("utf-8", "backslashreplace").splitlines():
        fields = dict(_WORD.findall(line))
        name = fields.get("PartitionName", "")
        if not name:
            continue
        models[name] = _parse_partition(name, fields, config, shape_counts.get(name, {}), shapes)
        if fields.get("Default") == "YES":
            default = name
    return ClusterModel(
        cluster=cluster,
        taken_us=taken_us,
        zone=zone,
        partitions=models,
        default_partition=default,
        shapes=tuple(shapes),
        selects=config.get("SelectTypeParameters", "").lower(),
        linear=config.get("SelectType", "") == "select/linear",
        billing_max=_parse_billing_max(config.get("PriorityFlags", "")),
        tracked=tuple(filter(None, config.get("AccountingStorageTRES", "").split(","))),
        max_array=parse_number(config.get("MaxArraySize", "")) or 0,
        kill_wait_s=_parse_kill_wait(config.get("KillWait", "")),
        accounting=config.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        enforced=not _REQUIRES_ASSOCIATION.isdisjoint(
            config.get("AccountingStorageEnforce", "").lower().split(",")
        ),
    )


def parse_users(
    users_output: bytes, associations_output: bytes, resolver: NameResolver
) -> UserTables:
    """Return users by uid, default accounts by user, and default QOS by ``ACCOUNT/USER``.

    Args:
        users_output: Output of ``sacctmgr -n -P show user format=User,DefaultAccount``.
        associations_output: Output of ``sacctmgr -n -P show assoc
            format=Account,User,DefaultQOS,Partition``.
        resolver: Resolves user names; the first table omits users without a uid on this host.
    """
    users: dict[int, str] = {}
    accounts: dict[str, str] = {}
    qos: dict[str, str] = {}
    for line in decode_text(users_output).split("\n"):
        user, bar, account = line.partition("|")
        if not bar or "|" in account:
            continue
        if account:
            accounts[user] = account
        uid = resolver.uid(user)
        if uid is not None:
            users[uid] = user
    for line in decode_text(associations_output).split("\n"):
        columns = line.split("|")
        if len(columns) == 4 and columns[1]:
            # An association of a single partition does not determine the QOS in the others.
            qos.setdefault(f"{columns[0]}/{columns[1]}", "")
            if columns[2] and not columns[3]:
                qos[f"{columns[0]}/{columns[1]}"] = columns[2]
    return users, accounts, qos


_BILLING_MAX: Final = {
    "MAX_TRES": ("cpu", "mem", "node", "gres"),
    "MAX_TRES_GRES": ("cpu", "mem", "node"),
}
"""Kinds of TRES of which billing counts only the most expensive, by PriorityFlags (slurm.conf(5)).
"""


def _parse_billing_max(flags: str) -> tuple[str, ...]:
    """Return the kinds of TRES that PriorityFlags makes billing count by maximum."""
    for flag in flags.upper().split(","):
        if kinds := _BILLING_MAX.get(flag.strip()):
            return kinds
    return ()


_REQUIRES_ASSOCIATION: Final = frozenset({"associations", "limits", "qos", "safe", "wckeys", "all"})
"""Values of AccountingStorageEnforce that require an association, see slurm.conf(5)."""


def _parse_shapes(nodes: bytes) -> tuple[list[NodeShape], dict[str, dict[int, int]]]:
    """Group nodes by hardware; return the shapes and how many of each a partition has."""
    names_by_key: dict[tuple[str, ...], list[str]] = {}
    counts_by_key: dict[tuple[str, ...], dict[str, int]] = {}
    for line in nodes.decode("utf-8", "backslashreplace").splitlines():
        match = _NODE.match(line)
        if match is None:
            continue
        fields: dict[str, str] = {}
        for name, value in _WORD.findall(line):
            # Text that people write comes last in a line, so the first value of a field is
            # genuine.
            if name in _NODE_FIELDS:
                fields.setdefault(name, value)
        key = tuple(
            fields.get(name, "")
            for name in ("CPUTot", "CPUEfctv", "Sockets", "CoresPerSocket", "RealMemory", "Gres")
        )
        names_by_key.setdefault(key, []).append(match[1])
        counts = counts_by_key.setdefault(key, {})
        for partition in filter(None, fields.get("Partitions", "").split(",")):
            counts[partition] = counts.get(partition, 0) + 1
    shapes: list[NodeShape] = []
    shape_counts: dict[str, dict[int, int]] = {}
    for index, (key, names) in enumerate(names_by_key.items()):
        shapes.append(_build_shape(key, names))
        for partition, count in counts_by_key[key].items():
            shape_counts.setdefault(partition, {})[index] = count
    return shapes, shape_counts


def _build_shape(key: tuple[str, ...], names: list[str]) -> NodeShape:
    """Build a node shape from a group's fields."""
    cpus, usable_cpus, sockets, cores, memory, gres = key
    cpu_count = parse_number(cpus) or 1
    socket_count = parse_number(sockets) or 1
    return NodeShape(
        nodes=fold_nodelist(names),
        count=len(names),
        cpus=cpu_count,
        usable_cpus=parse_number(usable_cpus) or cpu_count,
        cores=socket_count * (parse_number(cores) or 1),
        sockets=socket_count,
        memory_mib=parse_number(memory) or 1,
        tres=tres.parse_gres(gres),
    )


def _parse_partition(
    name: str,
    fields: Mapping[str, str],
    config: Mapping[str, str],
    shape_counts: Mapping[int, int],
    shapes: list[NodeShape],
) -> PartitionModel:
    """Build the model of a partition."""
    defaults = {
        **_parse_job_defaults(config.get("JobDefaults", "")),
        **_parse_job_defaults(fields.get("JobDefaults", "")),
    }
    count = parse_number(fields.get("TotalNodes", "")) or 0
    counts = dict(shape_counts)
    hidden = _estimate_hidden_nodes(fields, count, counts, shapes)
    if hidden is not None:
        shapes.append(hidden)
        counts[len(shapes) - 1] = hidden.count
    selects = fields.get("SelectTypeParameters", "NONE").lower()
    return PartitionModel(
        name=name,
        shapes=tuple(counts.items()),
        nodes=count,
        max_nodes=parse_number(fields.get("MaxNodes", "")) or 0,
        min_nodes=parse_number(fields.get("MinNodes", "")) or 0,
        max_time_s=parse_seconds(fields.get("MaxTime", "")),
        default_time_s=parse_seconds(fields.get("DefaultTime", "")),
        over_time_s=_parse_over_time(
            fields.get("OverTimeLimit", ""), config.get("OverTimeLimit", "")
        ),
        # Slurm 26.05 has a field of its own for this.
        exclusive=fields.get("OverSubscribe") == "EXCLUSIVE" or fields.get("Exclusive") == "NODE",
        selects="" if selects == "none" else selects,
        **_parse_memory_limits(fields, config),
        def_cpu_per_gpu=defaults.get("DefCpuPerGPU", 0),
        def_mem_per_gpu_mib=defaults.get("DefMemPerGPU", 0),
        billing=_parse_billing_weights(fields.get("TRESBillingWeights", "")),
    )


def _parse_memory_limits(fields: Mapping[str, str], config: Mapping[str, str]) -> dict[str, int]:
    """Return memory defaults and limits: the partition's own, or the cluster's.

    Of each pair (per CPU, per node) only one applies. A partition's value hides both of the
    cluster's.
    """
    limits: dict[str, int] = {}
    for kind in ("Def", "Max"):
        for settings in (fields, config):
            per_cpu = parse_number(settings.get(f"{kind}MemPerCPU", "")) or 0
            per_node = parse_number(settings.get(f"{kind}MemPerNode", "")) or 0
            if per_cpu or per_node:
                limits[f"{kind.lower()}_mem_per_cpu_mib"] = per_cpu
                limits[f"{kind.lower()}_mem_per_node_mib"] = per_node
                break
    return limits


def _estimate_hidden_nodes(
    fields: Mapping[str, str],
    count: int,
    counts_by_shape: Mapping[int, int],
    shapes: list[NodeShape],
) -> NodeShape | None:
    """Return a shape for nodes that Slurm counts but hides, such as powered-down cloud nodes.

    Their TRES are the partition's total minus those of listed nodes, divided by their number and
    rounded up.
    """
    hidden_count = count - sum(counts_by_shape.values())
    if hidden_count <= 0:
        return None
    remaining = parse_tres(fields.get("TRES", ""))
    for index, node_count in counts_by_shape.items():
        for name, amount in shapes[index].whole.items():
            if name in remaining:
                remaining[name] -= amount * node_count
    per_node = {name: max(0, -(-amount // hidden_count)) for name, amount in remaining.items()}
    cpus = max(1, per_node.get("cpu", 1))
    return NodeShape(
        count=hidden_count,
        cpus=cpus,
        usable_cpus=cpus,
        # Nearly all machines have at most two threads per core.
        cores=max(1, cpus // 2),
        memory_mib=max(1, per_node.get("mem", 1)),
        tres={
            name: amount for name, amount in per_node.items() if name.startswith("gres/") and amount
        },
    )


def _parse_over_time(partition_text: str, cluster_text: str) -> int | None:
    """Parse OverTimeLimit into seconds.

    ``5`` and ``5 min`` are minutes, ``NONE`` means the cluster's.
    """
    text = cluster_text if partition_text in ("", "NONE", "(null)") else partition_text
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    minutes = parse_number(text.partition(" ")[0])
    return (minutes or 0) * 60


def _parse_kill_wait(text: str) -> int:
    """Parse KillWait (``30 sec``) into seconds."""
    seconds = parse_number(text.partition(" ")[0])
    return KILL_WAIT_S if seconds is None else seconds


def _parse_job_defaults(text: str) -> dict[str, int]:
    """Parse JobDefaults: ``DefCpuPerGPU=4,DefMemPerGPU=2048``."""
    return {
        name: count
        for name, _, value in (part.partition("=") for part in text.split(","))
        if (count := parse_number(value)) is not None
    }


_WEIGHT: Final = re.compile(
    r"\+?(0x[0-9a-f.]+(?:p[+-]?[0-9]+)?|[0-9]*\.?[0-9]*(?:e[+-]?[0-9]+)?)([KMGTP]?)", re.IGNORECASE
)
"""A number as strtod(3) reads it, which Slurm calls, and its suffix."""


def _parse_weight(number: str) -> Fraction:
    """Parse a billing weight as strtod(3) does."""
    if "x" in number.lower():
        return Fraction(float.fromhex(number))
    # Like Slurm, go through a double if the number is long or has an exponent.
    return (
        Fraction(float(number)) if "e" in number.lower() or len(number) > 15 else Fraction(number)
    )


def _parse_billing_weights(text: str) -> dict[str, str]:
    """Parse TRESBillingWeights: ``CPU=1.0,Mem=0.25G,GRES/gpu:a100=2``; memory per MiB."""
    weights: dict[str, str] = {}
    for part in text.split(","):
        name, equals, weight = part.rpartition("=")
        match = _WEIGHT.fullmatch(weight.strip())
        if not equals or match is None or not match[1].strip("."):
            continue
        try:
            value = _parse_weight(match[1])
        except (ValueError, OverflowError):
            continue
        if match[2]:
            # A suffix is the unit that the weight applies to: 0.25G is 0.25 per GiB.
            unit_mib = parse_tres_amount(name.lower(), f"1{match[2]}")
            value = value / unit_mib if unit_mib else value * 1024
        # Slurm ignores case in TRES names, but not in the type of a GRES.
        kind, slash, rest = name.partition("/")
        weights[kind.lower() + slash + rest] = str(value)
    return weights


def add_users(model: ClusterModel, tables: UserTables) -> ClusterModel:
    """Return the model with users, accounts and QOS added."""
    users, accounts, qos = tables
    return msgspec.structs.replace(model, users=users, accounts=accounts, qos=qos)
