"""Reads what scontrol and sacctmgr write of partitions, nodes and people into a picture."""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Final

import msgspec

from steward.slurm import tres, values
from steward.slurm.nodelists import fold
from steward.slurm.people import People
from steward.slurm.picture import KILL_WAIT_S, NodeShape, PartitionPicture, Picture

_WORD: Final = re.compile(r"(?:^| )([A-Za-z/]+)=(\S*)")
# Those of a node's words that stand before, or can be no part of, what somebody wrote.
_NODE: Final = re.compile(r"^NodeName=(\S+) ", re.MULTILINE)
_SHOWN: Final = frozenset(
    ("CoresPerSocket", "CPUTot", "CPUEfctv", "Gres", "RealMemory", "Sockets", "Partitions")
)

People_ = tuple[dict[int, str], dict[str, str], dict[str, str]]


def picture(
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
        max_array=values.number(config.get("MaxArraySize", "")) or 0,
        kill_wait_s=_kill_wait(config.get("KillWait", "")),
        accounting=config.get("AccountingStorageType", "") == "accounting_storage/slurmdbd",
        enforced=not _ASSOCIATED.isdisjoint(
            config.get("AccountingStorageEnforce", "").lower().split(",")
        ),
    )


def people(named: bytes, associations: bytes, known: People) -> People_:
    """Users by uid, default accounts by user, and default QOS by account and user.

    Args:
        named: What ``sacctmgr -n -P show user format=User,DefaultAccount`` wrote.
        associations: The same of ``assoc format=Account,User,DefaultQOS,Partition``.
        known: Who looks names up.
    """
    users: dict[int, str] = {}
    accounts: dict[str, str] = {}
    qos: dict[str, str] = {}
    for line in values.text(named).split("\n"):
        user, bar, account = line.partition("|")
        if not bar or "|" in account:
            continue
        if account:
            accounts[user] = account
        uid = known.uid(user)
        if uid is not None:
            users[uid] = user
    for line in values.text(associations).split("\n"):
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
    total = values.number(cpus) or 1
    of_sockets = values.number(sockets) or 1
    return NodeShape(
        nodes=fold(names),
        count=len(names),
        cpus=total,
        usable_cpus=values.number(usable) or total,
        cores=of_sockets * (values.number(cores) or 1),
        sockets=of_sockets,
        memory_mib=values.number(memory) or 1,
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
    count = values.number(shown.get("TotalNodes", "")) or 0
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
        max_nodes=values.number(shown.get("MaxNodes", "")) or 0,
        min_nodes=values.number(shown.get("MinNodes", "")) or 0,
        max_time_s=values.seconds(shown.get("MaxTime", "")),
        default_time_s=values.seconds(shown.get("DefaultTime", "")),
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
            per_cpu = values.number(source.get(f"{which}MemPerCPU", "")) or 0
            per_node = values.number(source.get(f"{which}MemPerNode", "")) or 0
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
    total = tres.parse(shown.get("TRES", ""))
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
    minutes = values.number(text.partition(" ")[0])
    return (minutes or 0) * 60


def _kill_wait(text: str) -> int:
    """KillWait in seconds: ``30 sec``."""
    seconds = values.number(text.partition(" ")[0])
    return KILL_WAIT_S if seconds is None else seconds


def _defaults(text: str) -> dict[str, int]:
    """JobDefaults: ``DefCpuPerGPU=4,DefMemPerGPU=2048``."""
    return {
        name: count
        for name, _, value in (part.partition("=") for part in text.split(","))
        if (count := values.number(value)) is not None
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
            per = tres.amount_of(name.lower(), f"1{match[2]}")
            value = value / per if per else value * 1024
        # Slurm knows TRES by name in any case, but a GRES' type is as it is written.
        kind, slash, rest = name.partition("/")
        found[kind.lower() + slash + rest] = str(value)
    return found


def with_people(shown: Picture, found: People_) -> Picture:
    """The picture with the people in it."""
    users, accounts, qos = found
    return msgspec.structs.replace(shown, users=users, accounts=accounts, qos=qos)
