"""Pending jobs: Slurm's reason, expected start, and the limits behind them.

:class:`PendingJobs` queries one job at a time, when a person opens its page. It runs at most three
commands; none makes slurmctld search its queue for other jobs. :func:`parse_limits` reads
association and QOS limits from ``scontrol show assoc_mgr``.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Final

import msgspec

from steward.slurm.commands import CommandRunner
from steward.slurm.errors import SlurmError, UnknownJob
from steward.slurm.job_changes import read_comment
from steward.slurm.job_states import WAITING
from steward.slurm.settings import ClusterSettings
from steward.slurm.values import decode_text, parse_moment, parse_number

_SQUEUE_OPTIONS: Final = ("-a", "--local", "-h", "-t", "all")
_FORMAT: Final = "%A|%T|%S|%Y|%Q|%N|%r"
"""squeue format: raw id, state, start (perhaps expected), expected nodes, priority, nodes, reason.

The reason is last because it may contain a bar.
"""
_COMMENT_BYTES: Final = 8192
"""Bytes of a comment requested from squeue, which pads shorter ones."""
_PAIR: Final = re.compile(r"([A-Za-z][A-Za-z0-9]*)=(\S*)")
_OWNER_BLOCK: Final = re.compile(r"(\S+)=\{([^{}]*)\}")
"""The part of a QOS that belongs to one account or user (by uid)."""
_WORD: Final = re.compile(r"[\w.@+-]+")
"""Names that may be passed to scontrol: nothing it could read as a list or an option."""
_UNLIMITED: Final = frozenset({"", "N", "UNLIMITED", "(null)", "NONE", "None", "ALL"})


class PendingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one pending job: reason, expected start and nodes, priority.

    Attributes:
        reason: Slurm's reason, with any text after it.
        state: The job's state.
        expected_start: Start time that Slurm expects, or the real one; None if not given.
        expected_nodes: Expected or allocated nodes; "" if not given.
        priority: The job's priority.
    """

    reason: str
    state: str = "PENDING"
    expected_start: datetime | None = None
    expected_nodes: str = ""
    priority: int | None = None


class PendingJobs:
    """Client for queries about pending jobs of one cluster.

    Args:
        cluster: Cluster name in Steward's configuration.
        settings: Where Slurm's commands are and how to run them.
    """

    def __init__(self, cluster: str, settings: ClusterSettings) -> None:
        self._commands = CommandRunner(cluster, settings)

    def query_status(self, job_id: int) -> PendingStatus | None:
        """Return the state of a job, or None if Slurm does not know it, or no longer.

        Args:
            job_id: Raw id. For an array: its tasks without records of their own.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        try:
            out = self._commands.run("squeue", *_SQUEUE_OPTIONS, "-j", str(job_id), "-o", _FORMAT)
        except UnknownJob:
            return None
        for row in out.decode("utf-8", "backslashreplace").split("\n"):
            fields = row.split("|", 6)
            if len(fields) == 7 and fields[0] == str(job_id):
                nodes = fields[3] if fields[1] in WAITING else fields[5]
                return PendingStatus(
                    reason=fields[6].strip(),
                    state=fields[1],
                    expected_start=parse_moment(fields[2]),
                    expected_nodes="" if nodes in _UNLIMITED else nodes,
                    priority=parse_number(fields[4]),
                )
        return None

    def read_hold_reason(self, job_id: int) -> str:
        """Return the reason that Steward gave when it held a job; "" if none.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        column = f"admin_comment:{_COMMENT_BYTES}"
        try:
            out = self._commands.run("squeue", *_SQUEUE_OPTIONS, "-j", str(job_id), "-O", column)
        except UnknownJob:
            return ""
        # Array tasks with records of their own have rows and comments of their own.
        for row in out.splitlines():
            reason = read_comment(decode_text(row))
            if reason:
                return reason
        return ""

    def partition(self, name: str) -> dict[str, str]:
        """Return the fields of ``scontrol show partition`` (MaxTime, State …); {} if unknown.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        return self._show("partition", name)

    def read_reservation(self, name: str) -> dict[str, str]:
        """Return the fields of ``scontrol show reservation`` (StartTime, Nodes …); {} if unknown.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        return self._show("reservation", name)

    def read_limits(
        self, *, user: str, uid: int | None, account: str, qos: str
    ) -> dict[str, dict[str, str]]:
        """Return slurmctld's limits that are set, each as "limit(used)".

        Args:
            user: Owner of the job.
            uid: Uid of the owner.
            account: Account of the job.
            qos: QOS of the job.

        Returns:
            Limits by name (GrpTRES, MaxJobsPU …) under ``assoc`` and ``qos``; empty if the
            cluster has no slurmdbd.

        Raises:
            SlurmUnavailable: slurmctld does not answer.
        """
        names = {"users": user, "accounts": account, "qos": qos}
        filters = [f"{name}={value}" for name, value in names.items() if _WORD.fullmatch(value)]
        if not filters:
            return {}
        try:
            out = self._commands.run(
                "scontrol", "-o", "show", "assoc_mgr", *filters, "flags=assoc,qos"
            )
        except UnknownJob:
            return {}
        return parse_limits(decode_text(out), user=user, uid=uid, account=account, qos=qos)

    def _show(self, object_type: str, name: str) -> dict[str, str]:
        """Return the fields of ``scontrol show`` for one object; {} if unknown."""
        if not _WORD.fullmatch(name):
            return {}
        try:
            out = self._commands.run("scontrol", "-o", "show", object_type, name)
        except SlurmError as error:
            if "not found" in error.output or "Invalid" in error.output:
                return {}
            raise
        pairs = _PAIR.findall(decode_text(out))
        return {key: value for key, value in pairs if value not in _UNLIMITED}


def parse_limits(
    text: str, *, user: str, uid: int | None, account: str, qos: str
) -> dict[str, dict[str, str]]:
    """Parse the limits in ``scontrol show assoc_mgr``.

    The user's own association takes precedence; the account's applies where it sets no limit.
    """
    user_limits: dict[str, str] = {}
    account_limits: dict[str, str] = {}
    qos_limits: dict[str, str] = {}
    section, is_own = "", False
    own_blocks = {account, str(uid), user}
    for line in text.splitlines():
        fields = _OWNER_BLOCK.sub(
            lambda block: f" {block[2]} " if block[1] in own_blocks else "", line.lstrip()
        )
        if fields.startswith("ClusterName="):
            pairs = dict(_PAIR.findall(fields))
            section = "assoc" if pairs.get("Account") == account else ""
            is_own = pairs.get("UserName", "").partition("(")[0] == user
            if not is_own and not _is_account(pairs):
                section = ""
        elif fields.startswith("QOS="):
            section = "qos" if fields[4:].partition("(")[0] == qos else ""
        elif fields.endswith(("Records", "Limits")) and "=" not in fields:
            continue
        if section:
            limits = qos_limits if section == "qos" else user_limits if is_own else account_limits
            for name, value in _read_limits(fields).items():
                limits.setdefault(name, value)
    return {"assoc": {**account_limits, **user_limits}, "qos": qos_limits}


def _is_account(pairs: Mapping[str, str]) -> bool:
    """Return True if an association is an account's own, without a user."""
    return pairs.get("UserName", "").partition("(")[0] == ""


def _read_limits(line: str) -> dict[str, str]:
    """Return the limits of a line that are set: "N(3)" is not."""
    limits = {}
    for name, value in _PAIR.findall(line):
        if not name.startswith(("Grp", "Max", "Min")):
            continue
        limit = value.partition("(")[0]
        if limit in _UNLIMITED:
            continue
        text = ",".join(filter(_is_set, value.split(","))) if "TRES" in name else value
        if text:
            limits[name] = text
    return limits


def _is_set(part: str) -> bool:
    """Return True if one TRES of a list has a limit: ``cpu=4(2)`` has, ``cpu=N(2)`` has not."""
    _, equals, value = part.partition("=")
    return bool(equals) and value.partition("(")[0] not in _UNLIMITED
