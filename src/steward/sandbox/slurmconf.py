"""slurm.conf for a cluster that is thrown away: every daemon on one host, nothing of it outside.

The options are those that 22.05, 24.11 and 26.05 all understand, see
slurm.conf(5) of each.
"""

from collections.abc import Sequence

from steward.sandbox import database
from steward.sandbox.spec import BACKUP_ADDRESS, SandboxError, SandboxSpec


def node_names(spec: SandboxSpec) -> tuple[str, ...]:
    """The virtual nodes: node1, node2 and so on."""
    return tuple(f"node{number}" for number in range(1, spec.nodes + 1))


def backup_host(host: str) -> str:
    """What the second controller's host is called, beside that of the first."""
    return f"{host}b"


def check(spec: SandboxSpec) -> None:
    """See that nothing in a spec would break out of its line of slurm.conf.

    Raises:
        SandboxError: A value that cannot be written, or makes no sense.
    """
    if not 1 <= spec.nodes <= 256:
        raise SandboxError(f"{spec.nodes} nodes cannot be had: ask for 1 to 256", spec.nodes)
    if not spec.cluster.isidentifier() or not spec.cluster.isascii() or len(spec.cluster) > 40:
        raise SandboxError(f"{spec.cluster!r} cannot be a cluster's name: use letters", spec)
    database.check(spec)
    words = (spec.private_data, spec.slurm_user, *spec.job_submit, *spec.plugin_dirs)
    lines = [(line, "slurm.conf") for line in (*words, *spec.extra)]
    lines += [(line, "plugstack.conf") for line in spec.plugstack]
    for line, file in lines:
        if (line and not line.isprintable()) or line.endswith("\\"):  # which would join lines
            raise SandboxError(f"{line!r} cannot be one line of {file}", line)


def text(
    spec: SandboxSpec,
    *,
    directory: str,
    host: str,
    ports: Sequence[int],
    slurm_user: str,
    slurmd_user: str,
    munge_socket: str,
    plugin_dir: str,
) -> str:
    """The whole file.

    Args:
        spec: What was asked for.
        directory: The sandbox's directory.
        host: Name of the host, as its daemons see it.
        ports: slurmctld's, then one for each node, then slurmdbd's where there is one.
        slurm_user: Who slurmctld runs as.
        slurmd_user: Who slurmd runs as.
        munge_socket: munged's socket.
        plugin_dir: PluginDir, all of it; "" for the one that was built in.
    """
    lines = [
        f"ClusterName={spec.cluster}",
        f"SlurmctldHost={host}(127.0.0.1)",
        *_lines_of_backup(spec, host),
        f"SlurmctldPort={ports[0]}",
        f"SlurmUser={slurm_user}",
        f"SlurmdUser={slurmd_user}",
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge_socket}",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool/%n",
        f"SlurmctldPidFile={directory}/pid/slurmctld.pid",
        f"SlurmdPidFile={directory}/pid/slurmd.%n.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd.%n.log",
        f"PlugStackConfig={directory}/etc/plugstack.conf",
        # Daemons listen on the address that they go by, the loopback, and on no other.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        # Neither cgroups nor affinity: they are the host's, and several sandboxes share it.
        "ProctrackType=proctrack/linuxproc",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        # A node has the CPUs that we say, so that jobs run side by side on a small host.
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,bf_interval=5,sched_min_interval=0",
        "ReturnToService=2",
        "PropagateResourceLimits=NONE",
        "MailProg=/bin/true",
        "KillWait=2",
        "CompleteWait=0",
        "MessageTimeout=20",
        "MaxJobCount=200000",
        "MaxArraySize=100001",
        f"MinJobAge={spec.min_job_age_s}",
        f"FirstJobId={spec.first_job_id}",
        f"JobRequeue={int(spec.job_requeue)}",
    ]
    if spec.max_job_id:
        lines.append(f"MaxJobId={spec.max_job_id}")
    if spec.private_data:
        lines.append(f"PrivateData={spec.private_data}")
    if spec.jobcomp_lua:
        lines.append("JobCompType=jobcomp/lua")
    if spec.job_submit:
        lines.append(f"JobSubmitPlugins={','.join(spec.job_submit)}")
    if spec.accounting:
        lines += database.lines_of_slurm_conf(ports[-1], munge_socket)
    if plugin_dir:
        lines.append(f"PluginDir={plugin_dir}")
    lines += [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={spec.cpus} RealMemory={spec.memory_mib} State=UNKNOWN"
        for name, port in zip(node_names(spec), ports[1 : spec.nodes + 1], strict=True)
    ]
    lines += [
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
        "PartitionName=debug Nodes=ALL MaxTime=00:30:00 State=UP",
        *spec.extra,
    ]
    return "\n".join(lines) + "\n"


def _lines_of_backup(spec: SandboxSpec, host: str) -> list[str]:
    if not spec.backup:
        return []
    # Soon, as far as it goes: Slurm asks the first controller a few times within this.
    return [f"SlurmctldHost={backup_host(host)}({BACKUP_ADDRESS})", "SlurmctldTimeout=5"]
