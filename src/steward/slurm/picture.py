"""What an estimate needs to know of a cluster: its partitions, its kinds of nodes, its people.

It is read by ``scontrol show partition``, ``node`` and ``config``, and where
there is a slurmdbd by sacctmgr. Who has it asks Slurm nothing more.
"""

from typing import Final

import msgspec

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
