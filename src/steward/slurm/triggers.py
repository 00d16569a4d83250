"""Slurm's triggers (strigger): programs that slurmctld starts when something happens.

Only SlurmUser may set one. Their events differ by version; some can be set, and never
fire.
"""

import re
import time
from typing import Final

import msgspec

from steward.slurm import nodelists
from steward.slurm.client import Slurm
from steward.slurm.commands import Commands
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
# Of a job these mean the nodes that it has.
_OF_JOBS_NODES: Final = frozenset({"down", "up", "drained", "draining", "fail"})
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
_OF_BOOKS: Final = frozenset(
    {
        "primary_slurmctld_acct_buffer_full",
        "primary_slurmdbd_failure",
        "primary_slurmdbd_resumed_operation",
        "primary_database_failure",
        "primary_database_resumed_operation",
    }
)
_ALSO: Final = {"drain": "drained", "failing": "fail", "finished": "fini"}

# " 12 node  node[1-2] down    0 slurm    PERM  /usr/bin/x y": columns, of which the program's
# path, the last, begins with a slash.
_ROW: Final = re.compile(
    r"\s*(\d{1,10})\s+(\S+)\s+(\S+)\s+(\S+)\s+(-?\d{1,10})\s+(\S+)\s+(?:([A-Z,|]+)\s+)?(/.*)"
)
_GONE: Final = re.compile(r"No such process|Invalid argument")
_DUPLICATE: Final = re.compile(r"Duplicate event trigger")
_NO_NODE: Final = re.compile(r"Invalid node name")
# slurmctld forgets in its next turn, and takes one every 15 s.
_FORGOTTEN_S: Final = 30.0
_AGAIN_S: Final = 0.5
_OFFSET_S: Final = 0x8000
_LONGEST: Final = 1024


class TriggerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trigger.

    Attributes:
        id: Its number.
        resource: Of what it is: ``node``, ``job``, ``slurmctld``, ``slurmdbd``, ``database``.
        resource_id: Which: a node list, a job's id; "" for all.
        event: What it waits for, as strigger's option is called.
        offset_s: Seconds from the event to the program; before it where negative.
        user: Whose it is.
        permanent: Whether it stays when it has fired.
        program: What is started, with its arguments.
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
    """The triggers of one cluster, as SlurmUser; root sets them in SlurmUser's name.

    Args:
        cluster: Its name in the configuration.
        settings: How its commands are found and started.
    """

    def __init__(self, cluster: str, settings: ClusterSettings) -> None:
        self._commands = Commands(cluster, settings)
        self._slurm = Slurm(cluster, settings)
        self._user = ""

    def all(self) -> list[TriggerRecord]:
        """Every trigger there is, whoever set it.

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
        patience_s: float = _FORGOTTEN_S,
    ) -> int:
        """Have slurmctld start a program when something happens.

        Args:
            program: Its path and arguments, parted by blanks; slurmctld adds what it was.
            event: One of :meth:`events`; ``drain`` is ``drained``.
            nodes: Of these nodes; of all if empty.
            job: Of this job, or of its nodes.
            offset_s: Seconds from the event to the program.
            permanent: Whether it stays when it has fired.
            patience_s: Seconds that slurmctld has for forgetting the same one that has fired.

        Returns:
            Its id; of one that is there already, that one's.

        Raises:
            UnknownEvent: This Slurm has no such event.
            EventNeverFires: It has, but never starts a program for it.
            UnknownNode: Slurm does not have one of the nodes.
            UnknownJob: Slurm does not know the job.
            SlurmRefused: We are not SlurmUser.
            WrongUpdate: The trigger makes no sense.
        """
        name = _ALSO.get(event, event)
        known = self.events()
        if name not in known:
            raise UnknownEvent(
                f"there is no event {event!r} in this Slurm: use one of {', '.join(known)}"
            )
        if known[name]:
            raise EventNeverFires(f"a trigger for {event} never fires: {known[name]}")
        wanted = _wanted(program, name, nodes, job, offset_s, permanent)
        until = time.monotonic() + min(patience_s, _FORGOTTEN_S)
        while True:
            is_new = self._is_new(wanted)
            found = self._id_of(wanted)
            if found:
                return found
            if is_new:
                raise SlurmError(
                    f"the trigger for {event} was set, and is not there any more: "
                    "it has fired, or somebody has cleared it"
                )
            # A slurmctld that was started anew takes one that had fired for a duplicate until
            # it forgets it, and never shows one that has fired: what is shown still waits.
            if time.monotonic() >= until:
                raise SlurmError(
                    f"the same trigger for {event} has fired, and slurmctld still remembers it: "
                    "set it again in half a minute"
                )
            time.sleep(_AGAIN_S)

    def clear(self, trigger_id: int, user: str = "") -> None:
        """Take a trigger away.

        Args:
            trigger_id: Its id.
            user: Only if it is this user's; anybody's if empty.

        Raises:
            UnknownTrigger: There is none of this id, or it is another user's.
            SlurmRefused: It is another's, and we are not root.
        """
        of_user = ["--user", user] if user else []
        try:
            self._run("--clear", f"--id={int(trigger_id)}", *of_user)
        except SlurmError as error:
            if _GONE.search(error.said):
                whose = f" of user {user}" if user else ""
                raise UnknownTrigger(
                    f"there is no trigger {trigger_id}{whose}", error.command, error.said
                ) from error
            raise

    def events(self) -> dict[str, str]:
        """The events of this Slurm; with each, why it never fires, or "".

        Raises:
            SlurmError: Slurm cannot be asked.
        """
        version = self._slurm.version()
        words = self._commands.run("strigger", "--help").decode("ascii", "replace").split()
        options = {word.partition("=")[0].removeprefix("--") for word in words}
        config = self._slurm.config()
        books = config.get("AccountingStorageType") == "accounting_storage/slurmdbd"
        backup = "SlurmctldHost[1]" in config
        buffers = config.get("BurstBufferType", "")
        return {
            event: _why_never(event, version, books=books, backup=backup, buffers=buffers)
            for event in _EVENTS
            if event in options
        }

    def _is_new(self, wanted: TriggerRecord) -> bool:
        """Have it set; whether slurmctld had none that is the same."""
        try:
            self._run("--set", *_options(wanted))
        except UnknownJob:
            raise
        except SlurmError as error:
            if _NO_NODE.search(error.said):
                raise UnknownNode(nodelists.expand(wanted.resource_id)) from error
            if not _DUPLICATE.search(error.said):
                raise
            return False
        return True

    def _run(self, *words: str) -> bytes:
        return self._commands.run("strigger", *words, user=self._slurm_user())

    def _slurm_user(self) -> str:
        if not self._user:
            self._user = self._slurm.config().get("SlurmUser", "").partition("(")[0]
        return self._user

    def _id_of(self, wanted: TriggerRecord) -> int:
        """The number of what was just set, which strigger does not tell; 0 if it is not there."""
        found = (one.id for one in self.all() if _is_same(one, wanted, self._slurm_user()))
        return max(found, default=0)


def parse_triggers(out: bytes) -> list[TriggerRecord]:
    """What ``strigger --get --noheader`` writes; rows that are not understood are left out."""
    found: list[TriggerRecord] = []
    for line in out.decode("utf-8", "backslashreplace").split("\n"):
        row = _ROW.fullmatch(line.rstrip())
        if row is None:
            continue
        number, resource, resource_id, event, offset, user, flags, program = row.groups()
        found.append(
            TriggerRecord(
                id=int(number),
                resource=resource,
                resource_id="" if resource_id in ("*", "(null)") else resource_id,
                event=event,
                offset_s=int(offset),
                user=user,
                permanent="PERM" in (flags or ""),
                program=program,
            )
        )
    return sorted(found, key=lambda one: one.id)


def _wanted(
    program: str, event: str, nodes: str, job: str, offset_s: int, permanent: bool
) -> TriggerRecord:
    """The trigger as it is to be, without an id; checked as far as that goes without Slurm."""
    is_text = program.isprintable() and len(program) <= _LONGEST and program == program.strip()
    if not is_text or not program.startswith("/"):
        raise WrongUpdate(f"{program[:60]!r} cannot be started: a program's path begins with /")
    if not -_OFFSET_S < offset_s < _OFFSET_S:
        raise WrongUpdate(f"an offset of {offset_s} s is too far: Slurm takes up to 32767 s")
    if nodes and job:
        raise WrongUpdate("a trigger is of nodes or of a job, not of both")
    if event in _JOB_EVENTS and not job:
        raise WrongUpdate(f"a trigger for {event} is of a job: name it")
    if job and re.fullmatch(r"\d{1,10}", job) is None:
        raise WrongUpdate(f"{job!r} is no job's id: strigger takes a number")
    if job and event not in (*_JOB_EVENTS, *_OF_JOBS_NODES):
        raise WrongUpdate(f"{event} happens to no job")
    if nodes and event not in _NODE_EVENTS:
        raise WrongUpdate(f"{event} happens to no node")
    return TriggerRecord(
        id=0,
        resource="job" if job else "node",
        # In one form: slurmctld takes another spelling of the same nodes for another trigger.
        resource_id=job or (nodelists.fold(nodelists.expand(nodes)) if nodes else ""),
        event=event,
        offset_s=offset_s,
        permanent=permanent,
        program=program,
    )


def _options(wanted: TriggerRecord) -> list[str]:
    options = [f"--{wanted.event}", f"--program={wanted.program}"]
    if wanted.resource == "job":
        options.append(f"--jobid={wanted.resource_id}")
    elif wanted.resource_id:
        options.append(f"--node={wanted.resource_id}")
    elif wanted.event in _NODE_EVENTS:
        options.append("--node")
    if wanted.offset_s:
        options.append(f"--offset={wanted.offset_s}")
    if wanted.permanent:
        options.append("--flags=PERM")
    return options


def _is_same(one: TriggerRecord, wanted: TriggerRecord, user: str) -> bool:
    same = (one.event, one.offset_s, one.program, one.permanent, one.user)
    if same != (wanted.event, wanted.offset_s, wanted.program, wanted.permanent, user):
        return False
    if wanted.resource == "job" or not wanted.resource_id or not one.resource_id:
        return one.resource_id == wanted.resource_id
    return set(nodelists.expand(one.resource_id)) == set(nodelists.expand(wanted.resource_id))


def _why_never(event: str, version: Version, *, books: bool, backup: bool, buffers: str) -> str:
    """Why this Slurm never fires an event; "" where it does, as far as is known.

    ``fail`` is there in every version; up to 24.11 slurmctld fires ``drained`` instead.
    """
    if event == "fail" and version < _FAIL_FIRES:
        return "up to 24.11 slurmctld fires drained when a node is set FAIL"
    if event.startswith("backup_slurmctld") and not backup:
        return "there is no backup slurmctld"
    if event == "burst_buffer" and not buffers:
        return "there is no burst buffer (BurstBufferType)"
    if event in _OF_BOOKS and not books:
        return "there is no slurmdbd"
    return ""
