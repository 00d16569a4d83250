"""What Slurm says of one job that waits, or did: why, what it expects, the limit behind it.

Asked for one job at a time, when a person looks at it: three commands at most,
none of which makes slurmctld look through its queue for more than that job.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec

from steward.slurm.commands import Commands
from steward.slurm.errors import SlurmError, UnknownJob
from steward.slurm.job_changes import read_comment
from steward.slurm.job_states import WAITING
from steward.slurm.settings import ClusterSettings
from steward.slurm.values import decode_text, parse_moment, parse_number

_ONE: Final = ("-a", "--local", "-h", "-t", "all")
_FORM: Final = "%A|%T|%S|%Y|%Q|%N|%r"
"""Raw id, state, start (expected or not), expected nodes, priority, nodes, reason: the last may
hold a bar."""
_COMMENT: Final = 8192
"""Bytes of a comment that squeue is asked for: it pads what is shorter."""
_PAIR: Final = re.compile(r"([A-Za-z][A-Za-z0-9]*)=(\S*)")
_BLOCK: Final = re.compile(r"(\S+)=\{([^{}]*)\}")
"""In a QOS, what one account or one user (by uid) has of it."""
_WORD: Final = re.compile(r"[\w.@+-]+")
"""What is given to scontrol as a name: nothing that it would take for a list or an option."""
_UNLIMITED: Final = frozenset({"", "N", "UNLIMITED", "(null)", "NONE", "None", "ALL"})


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """How a job stands.

    Attributes:
        reason: Slurm's word, with what stands behind it.
        state: Its state.
        expected_start: When Slurm expects to start it, or did; None where it does not say.
        expected_nodes: Where; "" likewise.
        priority: Its priority.
    """

    reason: str
    state: str = "PENDING"
    expected_start: datetime | None = None
    expected_nodes: str = ""
    priority: int | None = None


class Pending:
    """Asks one cluster's Slurm about jobs that wait.

    Args:
        cluster: Its name in the configuration.
        settings: How its commands are found and started.
    """

    def __init__(self, cluster: str, settings: ClusterSettings) -> None:
        self._commands = Commands(cluster, settings)

    def outlook(self, job_id: int) -> Outlook | None:
        """How a job stands; None if Slurm does not know it (any more).

        Args:
            job_id: A raw id; of an array its tasks that have no record of their own.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        try:
            out = self._commands.run("squeue", *_ONE, "-j", str(job_id), "-o", _FORM)
        except UnknownJob:
            return None
        for row in out.decode("utf-8", "backslashreplace").split("\n"):
            fields = row.split("|", 6)
            if len(fields) == 7 and fields[0] == str(job_id):
                nodes = fields[3] if fields[1] in WAITING else fields[5]
                return Outlook(
                    reason=fields[6].strip(),
                    state=fields[1],
                    expected_start=parse_moment(fields[2]),
                    expected_nodes="" if nodes in _UNLIMITED else nodes,
                    priority=parse_number(fields[4]),
                )
        return None

    def why_held(self, job_id: int) -> str:
        """What Steward said when it held a job, for its user; "" where it said nothing.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        wide = f"admin_comment:{_COMMENT}"
        try:
            out = self._commands.run("squeue", *_ONE, "-j", str(job_id), "-O", wide)
        except UnknownJob:
            return ""
        # Tasks of an array that have records of their own have rows, and comments, of their own.
        for row in out.splitlines():
            reason = read_comment(decode_text(row))
            if reason:
                return reason
        return ""

    def partition(self, name: str) -> dict[str, str]:
        """What ``scontrol show partition`` says: MaxTime, MaxNodes, State …; {} for none.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        return self._shown("partition", name)

    def reservation(self, name: str) -> dict[str, str]:
        """What ``scontrol show reservation`` says: StartTime, EndTime, Nodes …; {} for none.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        return self._shown("reservation", name)

    def limits(
        self, *, user: str, uid: int | None, account: str, qos: str
    ) -> dict[str, dict[str, str]]:
        """What slurmctld holds of limits: each as "most(used)", without those that are not set.

        Args:
            user: The job's owner.
            uid: The same.
            account: Its account.
            qos: Its QOS.

        Returns:
            ``assoc`` and ``qos``, each with names as :class:`Limit` gives them; empty where
            the cluster has no slurmdbd.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        names = {"users": user, "accounts": account, "qos": qos}
        words = [f"{name}={value}" for name, value in names.items() if _WORD.fullmatch(value)]
        if not words:
            return {}
        try:
            out = self._commands.run(
                "scontrol", "-o", "show", "assoc_mgr", *words, "flags=assoc,qos"
            )
        except UnknownJob:
            return {}
        return parse_limits(decode_text(out), user=user, uid=uid, account=account, qos=qos)

    def _shown(self, what: str, name: str) -> dict[str, str]:
        if not _WORD.fullmatch(name):
            return {}
        try:
            out = self._commands.run("scontrol", "-o", "show", what, name)
        except SlurmError as error:
            if "not found" in error.said or "Invalid" in error.said:
                return {}
            raise
        pairs = _PAIR.findall(decode_text(out))
        return {key: value for key, value in pairs if value not in _UNLIMITED}


def parse_limits(
    text: str, *, user: str, uid: int | None, account: str, qos: str
) -> dict[str, dict[str, str]]:
    """The limits in what ``scontrol show assoc_mgr`` writes.

    Of associations the user's own goes before the account's, which holds where the
    user's says nothing.
    """
    own: dict[str, str] = {}
    parents: dict[str, str] = {}
    found: dict[str, str] = {}
    inside, is_own = "", False
    own_blocks = {account, str(uid), user}
    for line in text.splitlines():
        head = _BLOCK.sub(
            lambda block: f" {block[2]} " if block[1] in own_blocks else "", line.lstrip()
        )
        if head.startswith("ClusterName="):
            pairs = dict(_PAIR.findall(head))
            inside = "assoc" if pairs.get("Account") == account else ""
            is_own = pairs.get("UserName", "").partition("(")[0] == user
            if not is_own and not _is_account(pairs):
                inside = ""
        elif head.startswith("QOS="):
            inside = "qos" if head[4:].partition("(")[0] == qos else ""
        elif head.endswith(("Records", "Limits")) and "=" not in head:
            continue
        if inside:
            into = found if inside == "qos" else own if is_own else parents
            for name, value in _set_limits(head).items():
                into.setdefault(name, value)
    return {"assoc": {**parents, **own}, "qos": found}


def _is_account(pairs: Mapping[str, str]) -> bool:
    return pairs.get("UserName", "").partition("(")[0] == ""


def _set_limits(line: str) -> dict[str, str]:
    """The limits of a line that are set: "N(3)" is none."""
    found = {}
    for name, value in _PAIR.findall(line):
        if not name.startswith(("Grp", "Max", "Min")):
            continue
        most = value.partition("(")[0]
        if most in _UNLIMITED:
            continue
        kept = ",".join(filter(_is_set, value.split(","))) if "TRES" in name else value
        if kept:
            found[name] = kept
    return found


def _is_set(part: str) -> bool:
    """Whether one TRES of a list has a limit: ``cpu=4(2)`` has, ``cpu=N(2)`` has not."""
    _, equals, value = part.partition("=")
    return bool(equals) and value.partition("(")[0] not in _UNLIMITED
