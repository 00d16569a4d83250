"""Who asks, and what they may see: the one place that decides.

Everything is decided from data that the caller hands in; to decide, this module
asks nobody. Roles are Slurm's AdminLevel and coordinators, job records follow the
cluster's PrivateData, scripts and environments are their owner's and the
operators'.
"""

import os
import pwd
import re
import time
from collections.abc import Callable
from typing import Final, Literal, get_args

import msgspec

from steward.core.config import AccessSettings, Settings
from steward.core.errors import Refused, StewardError, Unavailable
from steward.core.files import StatusWriteError, read_status, write_status


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks.

    Attributes:
        uid: As the kernel, MUNGE or a token says.
        user: The name that the uid resolves to now; "" if to none.
        how: ``socket``, ``local`` (the process itself), ``munge``, ``session`` or ``token``.
        by_munge: Whether MUNGE says so, or said so when their session was opened.
        by_proxy: Whether a proxy's word says so, or said so when their session was opened.
        scopes: Scopes of their token; None without a token, which limits nothing.
        rank: How far the rights of an operator or administrator go, where they are one: ``full``;
            ``reads``, they see what operators see and change what users change; ``user``, they
            have none of them.
    """

    uid: int
    user: str = ""
    how: str = "socket"
    by_munge: bool = False
    by_proxy: bool = False
    scopes: frozenset[str] | None = None
    rank: Literal["full", "reads", "user"] = "full"


def this_user() -> Asker:
    """Whoever runs this process."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    return Asker(uid=uid, user=user, how="local")


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What one cluster's Slurm says about who stands where.

    Attributes:
        private_data: The cluster's PrivateData words, in lower case ("jobs", "usage" …).
        admins: Names of users whose AdminLevel in slurmdbd is Operator or Administrator.
        administrators: Those of them whose AdminLevel is Administrator.
        coordinators: For each account the names of its coordinators.
    """

    private_data: frozenset[str] = frozenset()
    admins: frozenset[str] = frozenset()
    administrators: frozenset[str] = frozenset()
    coordinators: dict[str, frozenset[str]] = msgspec.field(default_factory=dict)


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Whose jobs or scripts of one cluster somebody may see, as a filter for queries.

    Attributes:
        everything: All of them; the other attributes then do not matter.
        uid: Those of this uid …
        user: … and, for scripts, only those submitted under this name; "" for any name.
        accounts: Beside these, all that were charged to one of these accounts.
    """

    everything: bool = False
    uid: int | None = None
    user: str = ""
    accounts: frozenset[str] = frozenset()


class Access:
    """The decisions.

    Args:
        settings: The configuration's [access].
        own_uid: The uid that Steward runs as.
        standing: What a cluster's Slurm says of who stands where; None where it was
            never asked or never answered, which lets nobody see more than their own.
        led: Which of the bank's accounts somebody leads, by name and by the accounts that they
            coordinate; None where there is no bank.
    """

    def __init__(
        self,
        settings: AccessSettings,
        own_uid: int,
        standing: Callable[[str], Standing | None],
        led: Callable[[str, frozenset[str]], frozenset[str]] | None = None,
    ) -> None:
        self._settings = settings
        self._own_uid = own_uid
        self._standing = standing
        self._led = led

    def is_operator(self, asker: Asker, cluster: str) -> bool:
        """Whether the asker may see and do everything on ``cluster``."""
        if self.is_administrator(asker, cluster):
            return True
        if not asker.user or asker.rank == "user":
            return False
        standing = self._standing(cluster)
        return asker.user in self._settings.operators or (
            standing is not None and asker.user in standing.admins
        )

    def is_administrator(self, asker: Asker, cluster: str) -> bool:
        """Whether the asker may change on ``cluster`` what Slurm lets only its own user change.

        These are the users whose AdminLevel is Administrator, and those that the configuration
        names; nodes and partitions are theirs, while operators have reservations and jobs.
        """
        if asker.rank == "user":
            return False
        if asker.uid in (0, self._own_uid):
            return True
        if not asker.user:
            return False
        standing = self._standing(cluster)
        return asker.user in self._settings.administrators or (
            standing is not None and asker.user in standing.administrators
        )

    def may_see_nodes(self, asker: Asker, cluster: str) -> bool:
        """Whether the asker may see nodes: everyone may, unless PrivateData says ``nodes``."""
        return self.may_see_all(asker, cluster, "nodes")

    def may_see_all(self, asker: Asker, cluster: str, what: str) -> bool:
        """Whether the asker may see what PrivateData would hide under this word."""
        standing = self._standing(cluster)
        is_public = standing is not None and what not in standing.private_data
        return is_public or self.is_operator(asker, cluster)

    def coordinated(self, asker: Asker, cluster: str) -> frozenset[str]:
        """The accounts of ``cluster`` that the asker coordinates."""
        standing = self._standing(cluster)
        if not asker.user or standing is None:
            return frozenset()
        return frozenset(
            account for account, users in standing.coordinators.items() if asker.user in users
        )

    def led(self, asker: Asker, cluster: str) -> frozenset[str]:
        """The accounts that the asker coordinates on ``cluster`` or owns, and all below these."""
        coordinated = self.coordinated(asker, cluster)
        if self._led is None or not asker.user:
            return coordinated
        return coordinated | self._led(asker.user, coordinated)

    def scope(self, asker: Asker, cluster: str) -> Scope:
        """Whose job records the asker may see: everyone's, unless PrivateData says ``jobs``."""
        standing = self._standing(cluster)
        is_public = standing is not None and "jobs" not in standing.private_data
        if is_public or self.is_operator(asker, cluster):
            return Scope(everything=True)
        return Scope(uid=asker.uid, accounts=self.led(asker, cluster))

    def script_scope(self, asker: Asker, cluster: str) -> Scope:
        """Whose scripts and environments the asker may read."""
        if self.is_operator(asker, cluster):
            return Scope(everything=True)
        by_account = self._settings.coordinators_read_scripts
        accounts = self.led(asker, cluster) if by_account else frozenset()
        # A uid that resolves to no name now owns nothing: it may have been somebody else's.
        uid = asker.uid if asker.user else None
        return Scope(uid=uid, user=asker.user, accounts=accounts)

    def may_see_job(self, asker: Asker, cluster: str, uid: int | None, account: str) -> bool:
        """Whether the asker may see the record of a job of this owner and account."""
        return _covers(self.scope(asker, cluster), uid, "", account)

    def may_read_script(
        self, asker: Asker, cluster: str, *, uid: int | None, user_at_submit: str, account: str
    ) -> bool:
        """Whether the asker may read a job's script and environment.

        Args:
            asker: Who asks.
            cluster: The job's cluster.
            uid: The job's uid; None while Slurm has not confirmed one (operators only).
            user_at_submit: The name that the uid resolved to at submit, "" if to none. The
                owner of both is let in, so that who was given a former user's uid, or a
                former user's name, is not.
            account: The account the job is charged to.
        """
        return _covers(self.script_scope(asker, cluster), uid, user_at_submit, account)


def _covers(scope: Scope, uid: int | None, user: str, account: str) -> bool:
    if scope.everything:
        return True
    if uid is None:
        return False
    if scope.uid == uid and scope.user in ("", user):
        return True
    return bool(account) and account in scope.accounts


TokenScope = Literal["read", "scripts", "bank", "actions", "admin"]

SCOPES: Final[dict[TokenScope, str]] = {
    "read": "see jobs, usage, balances, nodes, events and reports",
    "scripts": "read scripts and environments, and search in them",
    "bank": "move money, and change accounts, limits and rates",
    "actions": "have something done to a cluster, or to jobs",
    "admin": "look after Steward itself",
}
"""The scopes, and what each lets a token do."""

ALL: Final[frozenset[TokenScope]] = frozenset(get_args(TokenScope))

_ROOMS: Final[dict[str, TokenScope]] = {
    **dict.fromkeys(("accounting", "bank", "events", "history", "reports", "status"), "read"),
    **dict.fromkeys(("doctor", "automation"), "read"),
    "archive": "scripts",
    **dict.fromkeys(("rules", "journal", "credentials"), "admin"),
}
"""The scope of a room's actions, but for …"""

_OTHERS: Final[dict[str, TokenScope]] = {
    **dict.fromkeys(("archive.list", "archive.sinks", "rules.check"), "read"),
    **dict.fromkeys(
        (f"archive.{verb}" for verb in ("verify", "reindex", "purge", "resend")), "admin"
    ),
    **dict.fromkeys((f"accounting.{verb}" for verb in ("dump", "expire", "plugins")), "admin"),
    **dict.fromkeys(
        (
            f"bank.{verb}"
            for verb in (
                *("deposit", "withdraw", "transfer", "refund", "adjust", "allow"),
                *("account_create", "account_change", "user_create", "user_change"),
                *("allocation_create", "allocation_change", "rate_create", "enforce"),
                *("reconcile", "backfill", "import", "notices_retry"),
            )
        ),
        "bank",
    ),
    "automation.run": "actions",
    "credentials.me": "read",
}
"""… these."""

READS: Final[frozenset[TokenScope]] = frozenset({"read", "scripts"})
"""The scopes of actions that change nothing."""

ALWAYS: Final = frozenset({"credentials.me"})
"""What every token lets through, whatever it was made for: whose it is."""


class NotInScope(Refused):
    """A token that was not made for this."""


def scope_of(action: str) -> TokenScope:
    """The scope that an action takes, by its name."""
    return _OTHERS.get(action) or _ROOMS.get(action.partition(".")[0], "admin")


def check_scope(asker: Asker, action: str) -> None:
    """Refuse an action that the asker's token was not made for.

    Raises:
        NotInScope: The token has another scope.
    """
    if asker.scopes is None or action in ALWAYS:
        return
    scope = scope_of(action)
    if scope not in asker.scopes:
        raise NotInScope(
            f"this token may not do {action}: it takes the scope '{scope}', "
            f"and has {' and '.join(sorted(asker.scopes)) or 'none'}",
            action,
        )


def is_known(action: str) -> bool:
    """Whether somebody has thought about the scope of this action."""
    return action in _OTHERS or action.partition(".")[0] in _ROOMS


OLDEST_S = 86400.0
"""Seconds after which a standing is not believed any more."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StandingsUnavailable(Unavailable):
    """The standings cannot be written now."""


class Standings:
    """The standings of all clusters, one file each.

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir

    def put(self, cluster: str, standing: Standing) -> None:
        """Keep what a cluster's Slurm says now.

        Raises:
            StandingsUnavailable: It cannot be written.
        """
        try:
            write_status(self._path(cluster), standing)
        except StatusWriteError as error:
            raise StandingsUnavailable(str(error), error.offender) from error

    def get(self, cluster: str) -> Standing | None:
        """What a cluster's Slurm last said; None if that is unknown or too long ago."""
        try:
            found = read_status(self._path(cluster), Standing)
        except StewardError:
            return None  # no cluster of ours: nothing is granted
        # Not asked yet: nothing is known, and nothing is granted.
        return found[0] if found and time.time() - found[1] < OLDEST_S else None

    def version(self, cluster: str) -> tuple[int, int]:
        """Tell one file of a cluster's standing from the next, without reading it.

        Returns:
            Its inode and modification time in ns, both 0 where there is none.
        """
        try:
            of = os.stat(self._path(cluster))
        except OSError:
            return 0, 0
        return of.st_ino, of.st_mtime_ns

    def _path(self, cluster: str) -> str:
        if _SAFE_NAME.fullmatch(cluster) is None:
            raise StewardError(f"{cluster!r} is not a cluster's name", cluster)
        return os.path.join(self._state_dir, f"standing-{cluster}.json")


def access_of(
    settings: Settings, led: Callable[[str, frozenset[str]], frozenset[str]] | None = None
) -> Access:
    """Who may see what, by the configuration and by what Slurm last said.

    Args:
        settings: The configuration.
        led: Which of the bank's accounts somebody leads, as :class:`Access` takes it.
    """
    try:
        own_uid = os.stat(settings.state_dir).st_uid
    except OSError:
        # Nothing is there to be seen yet, by anyone.
        own_uid = os.geteuid()
    return Access(settings.access, own_uid, Standings(settings.state_dir).get, led)
