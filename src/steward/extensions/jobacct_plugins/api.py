"""Plugin API for job accounting: base class :class:`JobAcctPlugin`, its hooks, and their arguments.

Hooks and names are those of Slurm's first job accounting plugins, version 0. The hooks of slurmctld
and of slurmd all run in one process of the plugin's own beside the daemon; no code runs on compute
nodes. The arguments are :class:`JobRun`, :class:`Step`, :class:`Rusage` and :class:`Message`.
:func:`parse_parameters` reads JobAcctParameters. :class:`NonePlugin` is jobacct/none.
"""

from collections.abc import Callable
from datetime import datetime
from typing import Final, Literal

import msgspec

from steward.accounting.errors import AccountingError, AccountingUnavailable, AccountingUsage
from steward.core.records import JobRecord
from steward.core.usage import StepEnd, TaskUsage
from steward.jobs.job_ids import format_job_name

API_VERSION: Final = 0
"""Version of this interface."""

CONTROLLER: Final = "controller"
"""Recipient of a message that is not for a node."""

MAX_MESSAGE_BYTES: Final = 1 << 20
"""Most bytes of one message."""


class PluginError(AccountingError):
    """Plugin that is unusable, or that does what plugins may not do."""


class SendFailed(AccountingUnavailable):
    """Message that could not be recorded now; a hook that lets this error pass is called again."""


class Rusage(msgspec.Struct, frozen=True, kw_only=True):
    """Resource usage of a task, with the names and units of ``resource.struct_rusage``.

    Attributes:
        ru_utime: User CPU time, seconds.
        ru_stime: System CPU time, seconds.
        ru_maxrss: Peak resident size, KiB; 0 where ``max_rss_bytes`` is None.
        ru_inblock: Blocks of 512 bytes that were read.
        ru_oublock: Blocks of 512 bytes that were written.
        user_us: User CPU time, µs.
        system_us: System CPU time, µs.
        max_rss_bytes: Peak resident size, bytes; None where another task of the node had more.
        includes_epilog: Whether a TaskEpilog's CPU time is included.
    """

    ru_utime: float
    ru_stime: float
    ru_maxrss: int = 0
    ru_ixrss: int = 0
    ru_idrss: int = 0
    ru_isrss: int = 0
    ru_minflt: int = 0
    ru_majflt: int = 0
    ru_nswap: int = 0
    ru_inblock: int = 0
    ru_oublock: int = 0
    ru_msgsnd: int = 0
    ru_msgrcv: int = 0
    ru_nsignals: int = 0
    ru_nvcsw: int = 0
    ru_nivcsw: int = 0
    user_us: int = 0
    system_us: int = 0
    max_rss_bytes: int | None = None
    includes_epilog: bool = False

    @classmethod
    def of(cls, task: TaskUsage) -> "Rusage":
        """Convert a task's usage as its node reported it."""
        return cls(
            ru_utime=task.user_us / 1e6,
            ru_stime=task.system_us / 1e6,
            ru_maxrss=(task.max_rss_bytes or 0) // 1024,
            ru_minflt=task.minor_faults,
            ru_majflt=task.major_faults,
            ru_inblock=task.read_bytes // 512,
            ru_oublock=task.written_bytes // 512,
            ru_nvcsw=task.voluntary_switches,
            ru_nivcsw=task.involuntary_switches,
            user_us=task.user_us,
            system_us=task.system_us,
            max_rss_bytes=task.max_rss_bytes,
            includes_epilog=task.includes_epilog,
        )


class JobRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a job, the argument of slurmctld's hooks.

    Attributes:
        event_id: Equal where a hook is called again for the same event.
        cluster: The cluster's name.
        job_id: The raw job id.
        first_submit: With cluster and job_id, the job's identity; UTC.
        restarts: With those, the run's identity.
        at: Time of the event, UTC.
        record: The latest known record of the run.
        piece_end: For a former size of a resized job, when that piece ended; None for a run.
        correction: Whether it corrects an earlier call.
    """

    event_id: str
    cluster: str
    job_id: int
    first_submit: datetime
    restarts: int
    at: datetime
    record: JobRecord
    piece_end: datetime | None = None
    correction: bool = False

    @property
    def label(self) -> str:
        """Job as Slurm prints it: 123, 123_7, 123+1."""
        return format_job_name(self.record)


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step on one node, the argument of slurmd's hooks.

    Fields that only the launch reports keep their defaults where that report was lost.

    Attributes:
        event_id: Equal where a hook is called again for the same event.
        cluster: The cluster's name.
        job_id: The raw job id.
        first_submit: With cluster and job_id, the job's identity; UTC.
        restarts: With those, the run's identity.
        step: Step name, as Slurm writes it behind the dot: ``batch``, ``extern``, ``0``.
        node: NodeName.
        launched: Launch time on this node, UTC.
        at: Time of the event, UTC.
        uid: The job's uid.
        gid: Its gid.
        tasks: Number of its tasks on this node.
        cpus: CPUs allocated on this node.
        memory_bytes: Memory limit on this node; None where none is set.
        name: Last part of the path of the program that srun was given.
        array_job_id: The array's id; 0 for none.
        array_task: The array task's index; "" for none.
        task: In ``slurmd_jobacct_task_exit`` the task's id within the step; else None.
        end: In ``slurmd_jobacct_jobstep_terminated`` the node's report of the whole step;
            None where that was lost.
        smgr_status: In ``slurmd_jobacct_jobstep_terminated`` the raw wait status of the
            session manager's tasks on the node: the highest of those that a signal ended, else
            the highest; None where no task's is known.
        correction: Whether all hooks of the step are called again, with better data.
        withdrawn: In ``slurmd_jobacct_jobstep_terminated``, which alone is called then,
            whether the step turned out to belong to another run: the plugin should discard
            what earlier calls said of it.
    """

    event_id: str
    cluster: str
    job_id: int
    first_submit: datetime
    restarts: int
    step: str
    node: str
    launched: datetime
    at: datetime
    uid: int | None = None
    gid: int | None = None
    tasks: int = 0
    cpus: int = 0
    memory_bytes: int | None = None
    name: str = ""
    array_job_id: int = 0
    array_task: str = ""
    task: int | None = None
    end: StepEnd | None = None
    smgr_status: int | None = None
    correction: bool = False
    withdrawn: bool = False


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Message that a plugin sent to its other half.

    Attributes:
        event_id: Equal where a hook is called again for the same message.
        cluster: Cluster of the hook that sent it.
        to: Recipient: ``controller``, or a node's name.
        sender: Sender: likewise.
        data: The plugin's own content.
        at: Time of sending, UTC.
    """

    event_id: str
    cluster: str
    to: str
    sender: str
    data: bytes
    at: datetime


Channel = Callable[[str, bytes], None]
"""Function that records a message: recipient, content."""


class JobAcctPlugin:
    """Base class of accounting plugins: override the hooks you need, the others do nothing.

    It is instantiated without arguments, once for each start of its process. A hook that raises is
    logged and counted, and the next one is called; only ``steward.core.errors.Unavailable`` means
    "not now": the same hook is called again later.

    Attributes:
        plugin_name: Name for people.
        plugin_type: ``jobacct/NAME``, as configured; NAME is its entry point's name.
        api_version: Version of this interface that the plugin was written for.
    """

    plugin_name: str = ""
    plugin_type: str = ""
    api_version: int = API_VERSION
    channel: Channel | None = None
    """Target of :meth:`send`, set while a hook is called for an event."""

    def slurmctld_jobacct_init(self, location: str, parameters: str) -> None:
        """Called first: at start, at every reload, and when slurmctld started or reconfigured.

        Args:
            location: JobAcctLoc: directory or file to write to, if the plugin writes.
            parameters: JobAcctParameters, see :func:`parse_parameters`.
        """

    def slurmctld_jobacct_job_start(self, job: JobRun) -> None:
        """Called when a run has started."""

    def slurmctld_jobacct_job_complete(self, job: JobRun) -> None:
        """Called when a run is over, also by requeue, or a piece of a resized job is."""

    def slurmctld_jobacct_job_suspend(self, job: JobRun) -> None:
        """Called when a run was suspended or resumed, as ``job.record.state`` says."""

    def slurmctld_jobacct_fini(self) -> None:
        """Called last, at a regular end of the process; it has three seconds."""

    def slurmd_jobacct_init(self, parameters: str) -> None:
        """Called after :meth:`slurmctld_jobacct_init`, before all other hooks."""

    def slurmd_jobacct_jobstep_launched(self, step: Step) -> None:
        """Called when a step was launched on a node."""

    def slurmd_jobacct_smgr(self, step: Step) -> None:
        """Called when the step's session manager has started its tasks on the node."""

    def slurmd_jobacct_task_exit(self, step: Step, pid: int, status: int, rusage: Rusage) -> None:
        """Called when a task has ended; ``status`` is its raw wait status, see wait(2)."""

    def slurmd_jobacct_jobstep_terminated(self, step: Step) -> None:
        """Called when the step is over on a node."""

    def slurm_jobacct_process_message(self, message: Message) -> None:
        """Called when a message has come from the other half."""

    def send(self, to: Literal["controller", "mynode"], data: bytes) -> None:
        """Send a message to the other half; it is durable when this returns.

        Args:
            to: ``controller``, or ``mynode``: the node that the hook is called for.
            data: The content, up to a MiB.

        Raises:
            PluginError: No hook is being called for an event, or the message is invalid.
            SendFailed: It could not be recorded now.
        """
        if self.channel is None:
            raise PluginError(
                "send() is not available in this hook: call it in hooks for a job, step or message"
            )
        self.channel(to, data)


class ParameterError(AccountingUsage):
    """JobAcctParameters that are not of the form ``name=value,name=value``."""


def parse_parameters(text: str) -> dict[str, str]:
    """Parse comma-separated ``name=value`` parameters; names keep their case.

    Raises:
        ParameterError: A part has no ``=``, or no name, or comes twice.
    """
    values: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ParameterError(f"invalid parameter {part!r}: write name=value", part)
        if name.lower() in {existing.lower() for existing in values}:
            raise ParameterError(f"duplicate parameter {name!r}", part)
        values[name] = value.strip()
    return values


def parse_number_parameter(text: str, name: str, default: int) -> int:
    """Return a parameter's value as a whole number; names are case-insensitive.

    Args:
        text: All parameters.
        name: The parameter to read.
        default: Value where it is not given.

    Raises:
        ParameterError: It is no whole number of 0 or more.
    """
    for parameter, value in parse_parameters(text).items():
        if parameter.lower() == name.lower():
            if not (value.isascii() and value.isdigit()) or len(value) > 9:
                raise ParameterError(
                    f"invalid {name}={value}: give a whole number of 0 or more", value
                )
            return int(value)
    return default


class NonePlugin(JobAcctPlugin):
    """Plugin jobacct/none: does nothing, for sites that want no plugin."""

    plugin_name = "No job accounting plugin"
    plugin_type = "jobacct/none"
