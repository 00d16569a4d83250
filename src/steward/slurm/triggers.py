"""Slurm triggers (strigger): list, set and clear programs that slurmctld starts on events.

:class:`Triggers` runs strigger for one cluster. Only SlurmUser may set triggers; root does so in
SlurmUser's name. The events differ by Slurm version, and some can be set but never fire.
"""

import re
import time
from typing import Final

import msgspec

from steward.slurm import nodelists
from steward.slurm.client import Slurm
from steward.slurm.commands import COMMAND_TIMEOUT_S, CommandRunner
from steward.slurm.errors import (
    EventNeverFires,
    SlurmError,
    UnknownEvent,
    UnknownJob,
    UnknownNode,
    UnknownTrigger,
    WrongUpdate,
)
from steward.slurm.queue import Version
from steward.slurm.settings import ClusterSettings

_NODE_EVENTS: Final = ("down", "up", "drained", "fail", "idle", "draining", "resume")
_JOB_EVENTS: Final = ("fini", "time")
# For a job, these events concern its nodes.
_JOB_NODE_EVENTS: Final = frozenset({"down", "up", "drained", "draining", "fail"})
_DAEMON_EVENTS: Final = (
    "primary_slurmctld_failure",
    "primary_slurmctld_resumed_operation",
    "primary_slurmctld_resumed_control",
    "primary_slurmctld_acct_buffer_full",
    "backup_slurmctld_failure",
    "backup_slurmctld_resumed_operation",
    "backup_slurmctld_assumed_control",
    "primary_slurmdbd_failure",
    "primary_slurmdbd_resumed_operation",
    "primary_database_failure",
    "primary_database_resumed_operation",
)
_EVENTS: Final = (*_NODE_EVENTS, *_JOB_EVENTS, "reconfig", "burst_buffer", *_DAEMON_EVENTS)
_FAIL_FIRES: Final[Version] = (25, 5, 0)
_SLURMDBD_EVENTS: Final = frozenset(
    {
        "primary_slurmctld_acct_buffer_full",
        "primary_slurmdbd_failure",
        "primary_slurmdbd_resumed_operation",
        "primary_database_failure",
        "primary_database_resumed_operation",
    }
)
_EVENT_ALIASES: Final = {"drain": "drained", "failing": "fail", "finished": "fini"}

# Columns of strigger --get, such as " 12 node  node[1-2] down    0 slurm    PERM  /usr/bin/x y".
# The program comes last and its path begins with a slash.
_ROW: Final = re.compile(
    r"\s*(\d{1,10})\s+(\S+)\s+(\S+)\s+(\S+)\s+(-?\d{1,10})\s+(\S+)\s+(?:([A-Z,|]+)\s+)?(/.*)"
)
_GONE: Final = re.compile(r"No such process|Invalid argument")
_DUPLICATE: Final = re.compile(r"Duplicate event trigger")
_NO_NODE: Final = re.compile(r"Invalid node name")
# slurmctld forgets a fired trigger in its next cycle, every 15 s.
_MAX_FORGET_WAIT_S: Final = 30.0
_RETRY_S: Final = 0.5
_OFFSET_S: Final = 0x8000
_MAX_PROGRAM_CHARS: Final = 1024


class TriggerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Trigger of strigger, as slurmctld lists it.

    Attributes:
        id: Trigger id.
        resource: Type: ``node``, ``job``, ``slurmctld``, ``slurmdbd`` or ``database``.
        resource_id: Node list or job id; "" for all.
        event: Event, by the name of strigger's option.
        offset_s: Seconds from the event to the program's start; negative for before it.
        user: Owner of the trigger.
        permanent: Whether the trigger stays after it fires.
        program: The program with its arguments.
    """

    id: int
    resource: str
    resource_id: str = ""
    event: str
    offset_s: int = 0
    user: str = ""
    permanent: bool = False
    program: str


class Triggers:
    """Client for the triggers of one cluster; runs strigger as SlurmUser.

    Args:
        cluster: Cluster name in Steward's configuration.
        settings: Where Slurm's commands are and how to run them.
        timeout_s: Time-out of each command, in seconds.
    """

    def __init__(
        self, cluster: str, settings: ClusterSettings, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> None:
        self._commands = CommandRunner(cluster, settings, timeout_s)
        self._slurm = Slurm(cluster, settings, timeout_s)
        self._cached_slurm_user = ""

    def list_all(self) -> list[TriggerRecord]:
        """Return all triggers of all users.

        Raises:
            SlurmError: slurmctld does not answer.
        """
        return parse_triggers(self._commands.run("strigger", "--get", "--noheader"))

    def set(
        self,
        program: str,
        event: str,
        *,
        nodes: str = "",
        job: str = "",
        offset_s: int = 0,
        permanent: bool = False,
        patience_s: float = _MAX_FORGET_WAIT_S,
    ) -> int:
        """Set a trigger: slurmctld starts a program when an event happens.

        Args:
            program: Path and arguments, separated by blanks; slurmctld appends what the event
                concerns.
            event: One of :meth:`list_events`; ``drain`` means ``drained``.
            nodes: Node list; "" for all nodes.
            job: Job id, for the job or its nodes.
            offset_s: Seconds from the event to the program's start.
            permanent: Whether the trigger stays after it fires.
            patience_s: Seconds to wait for slurmctld to forget the same trigger after it fired.

        Returns:
            Id of the trigger; if the same one exists, that one's id.

        Raises:
            UnknownEvent: This Slurm version lacks the event.
            EventNeverFires: The event exists, but never starts a program.
            UnknownNode: Slurm lacks at least one of the nodes.
            UnknownJob: Slurm does not know the job.
            SlurmRefused: We are not SlurmUser.
            WrongUpdate: The arguments contradict each other or are invalid.
        """
        name = _EVENT_ALIASES.get(event, event)
        events = self.list_events()
        if name not in events:
            raise UnknownEvent(f"this Slurm has no event {event!r}: use one of {', '.join(events)}")
        if events[name]:
            raise EventNeverFires(f"a trigger for {event} never fires: {events[name]}")
        requested = _build_trigger(program, name, nodes, job, offset_s, permanent)
        until = time.monotonic() + min(patience_s, _MAX_FORGET_WAIT_S)
        while True:
            is_new = self._try_to_set(requested)
            trigger_id = self._find_id(requested)
            if trigger_id:
                return trigger_id
            if is_new:
                raise SlurmError(
                    f"the trigger for {event} disappeared after it was set: it fired, or "
                    "somebody cleared it"
                )
            # After a restart, slurmctld reports a fired trigger as a duplicate until it forgets
            # it. It never lists a fired trigger, so a listed one is still waiting.
            if time.monotonic() >= until:
                raise SlurmError(
                    f"the same trigger for {event} has just fired, and slurmctld still keeps "
                    "it: try again in half a minute"
                )
            time.sleep(_RETRY_S)

    def clear(self, trigger_id: int, user: str = "") -> None:
        """Delete a trigger.

        Args:
            trigger_id: Trigger id.
            user: Delete it only if it belongs to this user; "" for any owner.

        Raises:
            UnknownTrigger: No trigger has this id, or it belongs to another user.
            SlurmRefused: It belongs to another user and we are not root.
        """
        user_option = ["--user", user] if user else []
        try:
            self._run("--clear", f"--id={int(trigger_id)}", *user_option)
        except SlurmError as error:
            if _GONE.search(error.output):
                owner_text = f" of user {user}" if user else ""
                raise UnknownTrigger(
                    f"unknown trigger {trigger_id}{owner_text}", error.command, error.output
                ) from error
            raise

    def list_events(self) -> dict[str, str]:
        """Return the events of this Slurm version, each with the reason why it never fires, or "".

        Raises:
            SlurmError: Slurm cannot be asked.
        """
        version = self._slurm.version()
        words = self._commands.run("strigger", "--help").decode("ascii", "replace").split()
        options = {word.partition("=")[0].removeprefix("--") for word in words}
        config = self._slurm.config()
        has_slurmdbd = config.get("AccountingStorageType") == "accounting_storage/slurmdbd"
        has_backup = "SlurmctldHost[1]" in config
        burst_buffer_type = config.get("BurstBufferType", "")
        return {
            event: _explain_never_fires(
                event,
                version,
                has_slurmdbd=has_slurmdbd,
                has_backup=has_backup,
                burst_buffer_type=burst_buffer_type,
            )
            for event in _EVENTS
            if event in options
        }

    def _try_to_set(self, requested: TriggerRecord) -> bool:
        """Set a trigger; return False if slurmctld already has the same one."""
        try:
            self._run("--set", *_build_options(requested))
        except UnknownJob:
            raise
        except SlurmError as error:
            if _NO_NODE.search(error.output):
                raise UnknownNode(nodelists.expand_nodelist(requested.resource_id)) from error
            if not _DUPLICATE.search(error.output):
                raise
            return False
        return True

    def _run(self, *words: str) -> bytes:
        """Run strigger as SlurmUser."""
        return self._commands.run("strigger", *words, user=self._read_slurm_user())

    def _read_slurm_user(self) -> str:
        """Return the name of SlurmUser; cached."""
        if not self._cached_slurm_user:
            self._cached_slurm_user = self._slurm.config().get("SlurmUser", "").partition("(")[0]
        return self._cached_slurm_user

    def _find_id(self, requested: TriggerRecord) -> int:
        """Return the id of a trigger just set, which strigger does not print; 0 if it is gone."""
        ids = (
            listed.id
            for listed in self.list_all()
            if _is_same(listed, requested, self._read_slurm_user())
        )
        return max(ids, default=0)


def parse_triggers(out: bytes) -> list[TriggerRecord]:
    """Parse ``strigger --get --noheader``; malformed rows are skipped."""
    triggers: list[TriggerRecord] = []
    for line in out.decode("utf-8", "backslashreplace").split("\n"):
        row = _ROW.fullmatch(line.rstrip())
        if row is None:
            continue
        trigger_id, resource, resource_id, event, offset, user, flags, program = row.groups()
        triggers.append(
            TriggerRecord(
                id=int(trigger_id),
                resource=resource,
                resource_id="" if resource_id in ("*", "(null)") else resource_id,
                event=event,
                offset_s=int(offset),
                user=user,
                permanent="PERM" in (flags or ""),
                program=program,
            )
        )
    return sorted(triggers, key=lambda trigger: trigger.id)


def _build_trigger(
    program: str, event: str, nodes: str, job: str, offset_s: int, permanent: bool
) -> TriggerRecord:
    """Validate the arguments of a trigger and return it without an id."""
    is_text = (
        program.isprintable() and len(program) <= _MAX_PROGRAM_CHARS and program == program.strip()
    )
    if not is_text or not program.startswith("/"):
        raise WrongUpdate(f"invalid program {program[:60]!r}: give an absolute path")
    if not -_OFFSET_S < offset_s < _OFFSET_S:
        raise WrongUpdate(f"invalid offset {offset_s} s: give {1 - _OFFSET_S} to {_OFFSET_S - 1}")
    if nodes and job:
        raise WrongUpdate("nodes and job exclude each other in a trigger: give one of them")
    if event in _JOB_EVENTS and not job:
        raise WrongUpdate(f"a trigger for {event} needs a job: give its id")
    if job and re.fullmatch(r"\d{1,10}", job) is None:
        raise WrongUpdate(f"invalid job id {job!r}: strigger accepts a number")
    if job and event not in (*_JOB_EVENTS, *_JOB_NODE_EVENTS):
        raise WrongUpdate(f"{event} is not an event of jobs")
    if nodes and event not in _NODE_EVENTS:
        raise WrongUpdate(f"{event} is not an event of nodes")
    return TriggerRecord(
        id=0,
        resource="job" if job else "node",
        # Normalize: slurmctld treats another spelling of the same nodes as another trigger.
        resource_id=job
        or (nodelists.fold_nodelist(nodelists.expand_nodelist(nodes)) if nodes else ""),
        event=event,
        offset_s=offset_s,
        permanent=permanent,
        program=program,
    )


def _build_options(requested: TriggerRecord) -> list[str]:
    """Return strigger's options for setting a trigger."""
    options = [f"--{requested.event}", f"--program={requested.program}"]
    if requested.resource == "job":
        options.append(f"--jobid={requested.resource_id}")
    elif requested.resource_id:
        options.append(f"--node={requested.resource_id}")
    elif requested.event in _NODE_EVENTS:
        options.append("--node")
    if requested.offset_s:
        options.append(f"--offset={requested.offset_s}")
    if requested.permanent:
        options.append("--flags=PERM")
    return options


def _is_same(listed: TriggerRecord, requested: TriggerRecord, user: str) -> bool:
    """Return True if a listed trigger equals the requested one; node lists compare as sets."""
    listed_values = (listed.event, listed.offset_s, listed.program, listed.permanent, listed.user)
    if listed_values != (
        requested.event,
        requested.offset_s,
        requested.program,
        requested.permanent,
        user,
    ):
        return False
    if requested.resource == "job" or not requested.resource_id or not listed.resource_id:
        return listed.resource_id == requested.resource_id
    return set(nodelists.expand_nodelist(listed.resource_id)) == set(
        nodelists.expand_nodelist(requested.resource_id)
    )


def _explain_never_fires(
    event: str, version: Version, *, has_slurmdbd: bool, has_backup: bool, burst_buffer_type: str
) -> str:
    """Return why this Slurm never fires an event; "" if it does, as far as known.

    Every version has ``fail``, but up to 24.11 slurmctld fires ``drained`` instead.
    """
    if event == "fail" and version < _FAIL_FIRES:
        return "up to 24.11 slurmctld fires drained when a node is set FAIL"
    if event.startswith("backup_slurmctld") and not has_backup:
        return "no backup slurmctld is configured"
    if event == "burst_buffer" and not burst_buffer_type:
        return "no burst buffer is configured (BurstBufferType)"
    if event in _SLURMDBD_EVENTS and not has_slurmdbd:
        return "no slurmdbd is configured"
    return ""
