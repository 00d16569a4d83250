"""What an estimate needs to know of a cluster: its partitions, its kinds of nodes, its people.

It is read by ``scontrol show partition``, ``node`` and ``config``, and where
there is a slurmdbd by sacctmgr. Who has it asks Slurm nothing more.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import msgspec

from steward.slurm import tres
from steward.slurm.nodelists import fold
from steward.slurm.tres import amount_of_tres, parse_tres
from steward.slurm.users import People
from steward.slurm.values import decode_text, parse_number, parse_seconds

ASK_PARTITIONS: Final = ("-a", "-o", "show", "partition")
ASK_NODES: Final = ("-a", "-o", "show", "node")
"""Arguments of scontrol for a picture, beside its configuration."""

KILL_WAIT_S: Final = 30
"""KillWait where slurm.conf does not say, in seconds."""


class _Noun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    pass


class NodeShape(_Noun, frozen=True):
    """Nodes that are all alike.

    Attributes:
        nodes: Their names, as a node list.
        count: How many they are.
        cpus: CPUs that each has (CPUTot).
        usable_cpus: Those that jobs can have (CPUEfctv), all but specialized ones.
        cores: Cores that each has.
        sockets: Sockets that each has.
        memory_mib: RealMemory.
        tres: GRES of each, under name and type (``gres/gpu``, ``gres/gpu:a100``).
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
        """CPUs that a core counts as: its threads, or one where the site counts cores."""
        return max(1, -(-self.cpus // max(1, self.cores)))

    @property
    def whole(self) -> dict[str, int]:
        """What a job has that has the node to itself."""
        return {"cpu": self.usable_cpus, "mem": self.memory_mib, "node": 1, **self.tres}


class PartitionPicture(_Noun, frozen=True):
    """One partition.

    Attributes:
        name: As Slurm has it; Slurm's names are case-sensitive here.
        shapes: Which of the picture's shapes it has, and how many nodes of each.
        nodes: How many nodes it has.
        max_nodes: MaxNodes; 0 for no limit.
        min_nodes: MinNodes.
        max_time_s: MaxTime in seconds; None for no limit.
        default_time_s: DefaultTime in seconds; None where there is none.
        over_time_s: OverTimeLimit in seconds, the cluster's where it has none of its own;
            None for no limit.
        exclusive: Whether jobs get whole nodes (OverSubscribe=EXCLUSIVE).
        selects: SelectTypeParameters of its own in lower case; "" for the cluster's.
        def_mem_per_cpu_mib: DefMemPerCPU, the cluster's where it has none; 0 for none.
        def_mem_per_node_mib: DefMemPerNode, likewise.
        max_mem_per_cpu_mib: MaxMemPerCPU, likewise.
        max_mem_per_node_mib: MaxMemPerNode, likewise.
        def_cpu_per_gpu: DefCpuPerGPU of JobDefaults, likewise.
        def_mem_per_gpu_mib: DefMemPerGPU of JobDefaults, likewise.
        billing: TRESBillingWeights: weight of a TRES' unit by name, of ``mem`` a MiB's, as text
            of a fraction (``1/4096``).
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


class Picture(_Noun, frozen=True):
    """One cluster at one moment.

    Attributes:
        cluster: Its name.
        taken_us: When it was taken, µs since the epoch.
        zone: IANA name of the zone that its times of day are of; "" for this host's.
        partitions: By name.
        default_partition: Name of the default one; "" for none.
        shapes: The kinds of nodes there are.
        selects: SelectTypeParameters in lower case.
        linear: Whether whole nodes are handed out always (select/linear).
        billing_max: Kinds of TRES of which billing counts the dearest alone (``cpu``, ``gres``);
            it adds every other TRES. Empty without MAX_TRES and MAX_TRES_GRES.
        tracked: AccountingStorageTRES: what AllocTRES can show.
        max_array: MaxArraySize; 0 where it is not known.
        kill_wait_s: KillWait in seconds: how long a job may go on that is to end.
        accounting: Whether there is a slurmdbd.
        users: Names of the users that slurmdbd knows, by uid.
        accounts: Default account by user name.
        qos: Default QOS, by ``ACCOUNT/USER``, of all associations; "" where one names none.
        enforced: Whether Slurm refuses jobs of users without an association.
    """

    cluster: str
    taken_us: int = 0
    zone: str = ""
    partitions: dict[str, PartitionPicture] = {}
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
        """Whether AllocTRES shows this TRES, so that what a job used of it can be told."""
        if not self.tracked:
            return True
        if not self.accounting and name.startswith("gres/"):
            # slurmdbd gives GRES the numbers that they are counted under.
            return False
        return name in self.tracked


_WORD: Final = re.compile(r"(?:^| )([A-Za-z/]+)=(\S*)")
# Those of a node's words that stand before, or can be no part of, what somebody wrote.
_NODE: Final = re.compile(r"^NodeName=(\S+) ", re.MULTILINE)
_SHOWN: Final = frozenset(
    ("CoresPerSocket", "CPUTot", "CPUEfctv", "Gres", "RealMemory", "Sockets", "Partitions")
)

People_ = tuple[dict[int, str], dict[str, str], dict[str, str]]


def parse_picture(
    cluster: str,
    config: Mapping[str, str],
    partitions: bytes,
    nodes: bytes,
    *,
    zone: str = "",
    taken_us: int = 0,
) -> Picture:
    """A cluster's picture, without people.

    Args:
        cluster: Its name.
        config: What ``scontrol show config`` shows.
        partitions: What ``scontrol -a -o show partition`` wrote.
        nodes: What ``scontrol -a -o show node`` wrote.
        zone: Its zone.
        taken_us: When it was asked, µs since the epoch.
    """
    shapes, members = _shapes(nodes)
    found: dict[str, PartitionPicture] = {}
    default = ""
    for line in partitions.decode("utf-8", "backslashreplace").splitlines():
        shown = dict(_WORD.findall(line))
        name = shown.get("PartitionName", "")
        if not name:
            continue
        found[name] = _partition(name, shown, config, members.get(name, {}), shapes)
        if shown.get("Default") == "YES":
            default = name
    return Picture(
        cluster=cluster,
        taken_us=taken_us,
        zone=zone,
        partitions=found,
        default_partition=default,
        shapes=tuple(shapes),
        selects=config.get("SelectTypeParameters", "").lower(),
        linear=config.get("SelectType", "") == "select/linear",
        billing_max=_billing_max(config.get("PriorityFlags", "")),
        tracked=tuple(filter(None, config.get("AccountingStorageTRES", "").split(","))),
        max_array=parse_number(config.get("MaxArraySize", "")) or 0,
        kill_wait_s=_kill_wait(config.get("KillWait", "")),
        accounting=config.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        enforced=not _ASSOCIATED.isdisjoint(
            config.get("AccountingStorageEnforce", "").lower().split(",")
        ),
    )


def parse_people(named: bytes, associations: bytes, known: People) -> People_:
    """Users by uid, default accounts by user, and default QOS by account and user.

    Args:
        named: What ``sacctmgr -n -P show user format=User,DefaultAccount`` wrote.
        associations: The same of ``assoc format=Account,User,DefaultQOS,Partition``.
        known: Who looks names up.
    """
    users: dict[int, str] = {}
    accounts: dict[str, str] = {}
    qos: dict[str, str] = {}
    for line in decode_text(named).split("\n"):
        user, bar, account = line.partition("|")
        if not bar or "|" in account:
            continue
        if account:
            accounts[user] = account
        uid = known.uid(user)
        if uid is not None:
            users[uid] = user
    for line in decode_text(associations).split("\n"):
        words = line.split("|")
        if len(words) == 4 and words[1]:
            # One of one partition alone does not say what QOS holds in the others.
            qos.setdefault(f"{words[0]}/{words[1]}", "")
            if words[2] and not words[3]:
                qos[f"{words[0]}/{words[1]}"] = words[2]
    return users, accounts, qos


_BILLING_MAX: Final = {
    "MAX_TRES": ("cpu", "mem", "node", "gres"),
    "MAX_TRES_GRES": ("cpu", "mem", "node"),
}
"""Kinds of TRES of which billing counts the dearest alone, by PriorityFlags of slurm.conf(5)."""


def _billing_max(flags: str) -> tuple[str, ...]:
    """Read PriorityFlags as ``scontrol show config`` writes them."""
    for flag in flags.upper().split(","):
        if kinds := _BILLING_MAX.get(flag.strip()):
            return kinds
    return ()


_ASSOCIATED: Final = frozenset({"associations", "limits", "qos", "safe", "wckeys", "all"})
"""What of AccountingStorageEnforce asks for an association, see slurm.conf(5)."""


def _shapes(nodes: bytes) -> tuple[list[NodeShape], dict[str, dict[int, int]]]:
    """The kinds of nodes, and for each partition how many it has of each."""
    kinds: dict[tuple[str, ...], list[str]] = {}
    parts: dict[tuple[str, ...], dict[str, int]] = {}
    for line in nodes.decode("utf-8", "backslashreplace").splitlines():
        match = _NODE.match(line)
        if match is None:
            continue
        shown: dict[str, str] = {}
        for name, value in _WORD.findall(line):
            # Texts that people write come last: what is there already holds.
            if name in _SHOWN:
                shown.setdefault(name, value)
        key = tuple(
            shown.get(name, "")
            for name in ("CPUTot", "CPUEfctv", "Sockets", "CoresPerSocket", "RealMemory", "Gres")
        )
        kinds.setdefault(key, []).append(match[1])
        counts = parts.setdefault(key, {})
        for partition in filter(None, shown.get("Partitions", "").split(",")):
            counts[partition] = counts.get(partition, 0) + 1
    shapes: list[NodeShape] = []
    members: dict[str, dict[int, int]] = {}
    for number, (key, names) in enumerate(kinds.items()):
        shapes.append(_shape(key, names))
        for partition, count in parts[key].items():
            members.setdefault(partition, {})[number] = count
    return shapes, members


def _shape(key: tuple[str, ...], names: list[str]) -> NodeShape:
    cpus, usable, sockets, cores, memory, gres = key
    total = parse_number(cpus) or 1
    of_sockets = parse_number(sockets) or 1
    return NodeShape(
        nodes=fold(names),
        count=len(names),
        cpus=total,
        usable_cpus=parse_number(usable) or total,
        cores=of_sockets * (parse_number(cores) or 1),
        sockets=of_sockets,
        memory_mib=parse_number(memory) or 1,
        tres=tres.gres(gres),
    )


def _partition(
    name: str,
    shown: Mapping[str, str],
    config: Mapping[str, str],
    members: Mapping[int, int],
    shapes: list[NodeShape],
) -> PartitionPicture:
    defaults = {
        **_defaults(config.get("JobDefaults", "")),
        **_defaults(shown.get("JobDefaults", "")),
    }
    count = parse_number(shown.get("TotalNodes", "")) or 0
    kinds = dict(members)
    unseen = _unseen(shown, count, kinds, shapes)
    if unseen is not None:
        shapes.append(unseen)
        kinds[len(shapes) - 1] = unseen.count
    selects = shown.get("SelectTypeParameters", "NONE").lower()
    return PartitionPicture(
        name=name,
        shapes=tuple(kinds.items()),
        nodes=count,
        max_nodes=parse_number(shown.get("MaxNodes", "")) or 0,
        min_nodes=parse_number(shown.get("MinNodes", "")) or 0,
        max_time_s=parse_seconds(shown.get("MaxTime", "")),
        default_time_s=parse_seconds(shown.get("DefaultTime", "")),
        over_time_s=_over_time(shown.get("OverTimeLimit", ""), config.get("OverTimeLimit", "")),
        # 26.05 says it in a word of its own.
        exclusive=shown.get("OverSubscribe") == "EXCLUSIVE" or shown.get("Exclusive") == "NODE",
        selects="" if selects == "none" else selects,
        **_memory(shown, config),
        def_cpu_per_gpu=defaults.get("DefCpuPerGPU", 0),
        def_mem_per_gpu_mib=defaults.get("DefMemPerGPU", 0),
        billing=_weights(shown.get("TRESBillingWeights", "")),
    )


def _memory(shown: Mapping[str, str], config: Mapping[str, str]) -> dict[str, int]:
    """The defaults and limits of memory: a partition's own, or the cluster's.

    Of each pair (by CPU, by node) one alone holds, and a partition's hides both of the cluster's.
    """
    found: dict[str, int] = {}
    for which in ("Def", "Max"):
        for source in (shown, config):
            per_cpu = parse_number(source.get(f"{which}MemPerCPU", "")) or 0
            per_node = parse_number(source.get(f"{which}MemPerNode", "")) or 0
            if per_cpu or per_node:
                found[f"{which.lower()}_mem_per_cpu_mib"] = per_cpu
                found[f"{which.lower()}_mem_per_node_mib"] = per_node
                break
    return found


def _unseen(
    shown: Mapping[str, str], count: int, kinds: Mapping[int, int], shapes: list[NodeShape]
) -> NodeShape | None:
    """Nodes that Slurm counts but does not show, as those of a cloud that are powered down.

    What they have is what the partition has beside the others; none is known singly, so that
    each is taken for all that is left, up to the mean of it where they are many.
    """
    missing = count - sum(kinds.values())
    if missing <= 0:
        return None
    total = parse_tres(shown.get("TRES", ""))
    for number, many in kinds.items():
        for name, amount in shapes[number].whole.items():
            if name in total:
                total[name] -= amount * many
    each = {name: max(0, -(-amount // missing)) for name, amount in total.items()}
    cpus = max(1, each.get("cpu", 1))
    return NodeShape(
        count=missing,
        cpus=cpus,
        usable_cpus=cpus,
        # Two threads a core is the most there is on all but a few machines.
        cores=max(1, cpus // 2),
        memory_mib=max(1, each.get("mem", 1)),
        tres={name: amount for name, amount in each.items() if name.startswith("gres/") and amount},
    )


def _over_time(own: str, clusters: str) -> int | None:
    """OverTimeLimit in seconds: ``NONE`` is the cluster's, ``5`` and ``5 min`` are minutes."""
    text = clusters if own in ("", "NONE", "(null)") else own
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    minutes = parse_number(text.partition(" ")[0])
    return (minutes or 0) * 60


def _kill_wait(text: str) -> int:
    """KillWait in seconds: ``30 sec``."""
    seconds = parse_number(text.partition(" ")[0])
    return KILL_WAIT_S if seconds is None else seconds


def _defaults(text: str) -> dict[str, int]:
    """JobDefaults: ``DefCpuPerGPU=4,DefMemPerGPU=2048``."""
    return {
        name: count
        for name, _, value in (part.partition("=") for part in text.split(","))
        if (count := parse_number(value)) is not None
    }


_WEIGHT: Final = re.compile(
    r"\+?(0x[0-9a-f.]+(?:p[+-]?[0-9]+)?|[0-9]*\.?[0-9]*(?:e[+-]?[0-9]+)?)([KMGTP]?)", re.IGNORECASE
)
"""A number as strtod(3) reads it, which Slurm calls, and its suffix."""


def _weight(number: str) -> Fraction:
    if "x" in number.lower():
        return Fraction(float.fromhex(number))
    # By way of a double, like Slurm, where a number can be of any size or length.
    return (
        Fraction(float(number)) if "e" in number.lower() or len(number) > 15 else Fraction(number)
    )


def _weights(text: str) -> dict[str, str]:
    """TRESBillingWeights: ``CPU=1.0,Mem=0.25G,GRES/gpu:a100=2``, of memory for a MiB."""
    found: dict[str, str] = {}
    for part in text.split(","):
        name, equals, weight = part.rpartition("=")
        match = _WEIGHT.fullmatch(weight.strip())
        if not equals or match is None or not match[1].strip("."):
            continue
        try:
            value = _weight(match[1])
        except (ValueError, OverflowError):
            continue
        if match[2]:
            # A weight with a suffix is that of so much: 0.25G is a quarter for each GiB.
            per = amount_of_tres(name.lower(), f"1{match[2]}")
            value = value / per if per else value * 1024
        # Slurm knows TRES by name in any case, but a GRES' type is as it is written.
        kind, slash, rest = name.partition("/")
        found[kind.lower() + slash + rest] = str(value)
    return found


def with_people(shown: Picture, found: People_) -> Picture:
    """The picture with the people in it."""
    users, accounts, qos = found
    return msgspec.structs.replace(shown, users=users, accounts=accounts, qos=qos)
