"""Access control: roles and their permissions, token scopes, and role data from Slurm.

:class:`Access` alone decides on permissions, from data that its caller provides; it sends no
queries. Roles are Slurm's AdminLevel and coordinators. Job records follow the
cluster's PrivateData; scripts and environments belong to their owner and the operators.

``check_scope`` limits API tokens to the actions of their scopes. A token never permits more than
its user may do: the action itself decides that. An action that declares no scope requires
``admin``. ``check_scope`` also limits service principals to their permissions: work without a
caller runs as one (``act_as``), and ``raise_rights`` gives a caller the rights of one.

:class:`ClusterRolesFiles` stores each cluster's roles in a status file: one process queries Slurm
at intervals and the processes that answer requests read the file, so no request waits for Slurm.
``make_access`` makes an :class:`Access` from the configuration and these files.
"""

import logging
import os
import pwd
import re
import time
from collections.abc import Callable
from typing import Final, Literal, get_args

import msgspec

from steward.core.config import AccessSettings, Settings
from steward.core.errors import PermissionRefused, StewardError, Unavailable
from steward.core.files import StatusWriteError, read_status, write_status
from steward.core.logs import LogLimit
from steward.core.principals import PRINCIPALS, ServicePrincipal

log = logging.getLogger(__name__)

RAISED_RIGHTS_LIMIT: Final = LogLimit()
"""Limit of log lines about raised rights: pages and monitors raise them every few seconds."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The user who sends a request, or the service principal that acts without one.

    Attributes:
        uid: Uid from the kernel, MUNGE or a token.
        user: User name that the uid resolves to now; "" for none.
        how: ``socket``, ``local`` (the process itself), ``munge``, ``session`` or ``token``;
            ``service`` for a service principal.
        by_munge: Whether MUNGE identified the user, now or when the session was opened.
        by_proxy: Whether a proxy identified the user, now or when the session was opened.
        scopes: Scopes of the token; None, for no limit, without a token.
        rank: Effective rights of an operator or administrator: ``full``; ``reads``, see as an
            operator but change as a user; ``user``, no operator rights.
        service: The service principal, which may do only what its permissions list; None for users.
    """

    uid: int
    user: str = ""
    how: str = "socket"
    by_munge: bool = False
    by_proxy: bool = False
    scopes: frozenset[str] | None = None
    rank: Literal["full", "reads", "user"] = "full"
    service: ServicePrincipal | None = None

    @property
    def signature(self) -> str:
        """Name that signs changes: the principal's or the user's, else the uid.

        A user whose name is that of a service principal signs with the uid.
        """
        if self.service is not None:
            return self.service.name
        return self.user if self.user and self.user not in PRINCIPALS else f"uid {self.uid}"


def get_process_user() -> Caller:
    """Return the user of this process."""
    uid = os.geteuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = ""
    return Caller(uid=uid, user=user, how="local")


def act_as(principal: ServicePrincipal) -> Caller:
    """Make the caller of work without a user: a service principal in this process."""
    process_user = get_process_user()
    return Caller(uid=process_user.uid, user=process_user.user, how="service", service=principal)


def raise_rights(caller: Caller, principal: ServicePrincipal, action: str) -> Caller:
    """Give a caller the rights of a service principal within one action.

    The log has a line for each caller and action, at most once an hour; the others are for debug.

    Raises:
        PermissionRefused: The caller is a service principal, which has its permissions only.
    """
    if caller.service is not None:
        caller.service.require(f"{action} as {principal.name!r}")
    subject = (caller.user or "a user without a name", caller.how, caller.uid)
    log.log(
        RAISED_RIGHTS_LIMIT.choose_level(logging.INFO, *subject, action),
        "rights raised: %s (%s, uid %d) runs %s as service principal '%s'",
        *(*subject, action, principal.name),
    )
    return act_as(principal)


class ClusterRoles(msgspec.Struct, frozen=True, kw_only=True):
    """Roles and privacy settings of one cluster, as Slurm reports them.

    Attributes:
        private_data: The cluster's PrivateData words, in lower case ("jobs", "usage" …).
        admins: Names of users whose AdminLevel in slurmdbd is Operator or Administrator.
        administrators: Those of them whose AdminLevel is Administrator.
        coordinators: Names of the coordinators of each account.
    """

    private_data: frozenset[str] = frozenset()
    admins: frozenset[str] = frozenset()
    administrators: frozenset[str] = frozenset()
    coordinators: dict[str, frozenset[str]] = msgspec.field(default_factory=dict)


class VisibleJobs(msgspec.Struct, frozen=True, kw_only=True):
    """Filter for queries: whose jobs or scripts of one cluster a user may see.

    Attributes:
        everything: Whether all are visible; the other attributes then do not matter.
        uid: Jobs of this uid are visible …
        user: … for scripts, only if submitted under this user name; "" for any name.
        accounts: Jobs charged to one of these accounts are visible too.
    """

    everything: bool = False
    uid: int | None = None
    user: str = ""
    accounts: frozenset[str] = frozenset()


class Access:
    """Access decisions for all users and clusters.

    Args:
        settings: Section [access] of the configuration.
        own_uid: Uid that Steward runs as.
        get_roles: Returns a cluster's roles; None if Slurm was never queried or never answered:
            users then see only their own jobs.
        list_led: Returns the bank accounts that a user leads, from the user name and the accounts
            that the user coordinates; None without a bank.
    """

    def __init__(
        self,
        settings: AccessSettings,
        own_uid: int,
        get_roles: Callable[[str], ClusterRoles | None],
        list_led: Callable[[str, frozenset[str]], frozenset[str]] | None = None,
    ) -> None:
        self._settings = settings
        self._own_uid = own_uid
        self._get_roles = get_roles
        self._list_led = list_led

    def is_operator(self, asker: Caller, cluster: str) -> bool:
        """Return whether the asker may see and do everything on ``cluster``."""
        if asker.service is not None or self.is_administrator(asker, cluster):
            return True
        if not asker.user or asker.rank == "user":
            return False
        roles = self._get_roles(cluster)
        return asker.user in self._settings.operators or (
            roles is not None and asker.user in roles.admins
        )

    def is_administrator(self, asker: Caller, cluster: str) -> bool:
        """Return whether the asker may change on ``cluster`` what Slurm reserves to SlurmUser.

        These are the users whose AdminLevel is Administrator, and those that the configuration
        names; they may change nodes and partitions, operators reservations and jobs.
        """
        if asker.service is not None:
            return asker.service.role == "administrator"
        if asker.rank == "user":
            return False
        if asker.uid in (0, self._own_uid):
            return True
        if not asker.user:
            return False
        roles = self._get_roles(cluster)
        return asker.user in self._settings.administrators or (
            roles is not None and asker.user in roles.administrators
        )

    def is_local_owner(self, asker: Caller) -> bool:
        """Return whether the caller is root or Steward's own user, on this host."""
        return asker.how in ("socket", "local") and asker.uid in (0, self._own_uid)

    def can_see_nodes(self, asker: Caller, cluster: str) -> bool:
        """Return whether the asker may see nodes: only operators if PrivateData says ``nodes``."""
        return self.can_see_all(asker, cluster, "nodes")

    def can_see_all(self, asker: Caller, cluster: str, what: str) -> bool:
        """Return whether the asker may see what PrivateData hides under the word ``what``."""
        roles = self._get_roles(cluster)
        is_public = roles is not None and what not in roles.private_data
        return is_public or self.is_operator(asker, cluster)

    def list_coordinated(self, asker: Caller, cluster: str) -> frozenset[str]:
        """Return the accounts of ``cluster`` that the asker coordinates."""
        roles = self._get_roles(cluster)
        if not asker.user or roles is None:
            return frozenset()
        return frozenset(
            account for account, users in roles.coordinators.items() if asker.user in users
        )

    def list_led(self, asker: Caller, cluster: str) -> frozenset[str]:
        """Return accounts that the asker coordinates on ``cluster`` or owns, and those below."""
        own = self.list_coordinated(asker, cluster)
        if self._list_led is None or not asker.user:
            return own
        return own | self._list_led(asker.user, own)

    def get_job_scope(self, asker: Caller, cluster: str) -> VisibleJobs:
        """Return whose job records the asker may see: all, unless PrivateData says ``jobs``."""
        roles = self._get_roles(cluster)
        is_public = roles is not None and "jobs" not in roles.private_data
        if is_public or self.is_operator(asker, cluster):
            return VisibleJobs(everything=True)
        return VisibleJobs(uid=asker.uid, accounts=self.list_led(asker, cluster))

    def get_script_scope(self, asker: Caller, cluster: str) -> VisibleJobs:
        """Return whose scripts and environments the asker may read."""
        if self.is_operator(asker, cluster):
            return VisibleJobs(everything=True)
        by_account = self._settings.coordinators_read_scripts
        accounts = self.list_led(asker, cluster) if by_account else frozenset()
        # A uid that has no name now owns nothing: it may have belonged to another user.
        uid = asker.uid if asker.user else None
        return VisibleJobs(uid=uid, user=asker.user, accounts=accounts)

    def can_see_job(self, asker: Caller, cluster: str, uid: int | None, account: str) -> bool:
        """Return whether the asker may see the record of a job of this owner and account."""
        return _can_see(self.get_job_scope(asker, cluster), uid, "", account)

    def can_read_script(
        self, asker: Caller, cluster: str, *, uid: int | None, user_at_submit: str, account: str
    ) -> bool:
        """Return whether the asker may read a job's script and environment.

        Args:
            asker: The user who asks.
            cluster: Cluster of the job.
            uid: Uid of the job; None while Slurm has not confirmed one (operators only).
            user_at_submit: Name that the uid resolved to at submit, "" for none. Both uid and
                name must match, so that the new holder of a former user's uid or name is
                rejected.
            account: Account the job is charged to.
        """
        return _can_see(self.get_script_scope(asker, cluster), uid, user_at_submit, account)


def _can_see(scope: VisibleJobs, uid: int | None, user: str, account: str) -> bool:
    """Return whether a scope includes a job or script of this owner and account."""
    if scope.everything:
        return True
    if uid is None:
        return False
    if scope.uid == uid and scope.user in ("", user):
        return True
    return bool(account) and account in scope.accounts


TokenScope = Literal["read", "scripts", "bank", "actions", "admin"]
Scope = Literal["read", "scripts", "bank", "actions", "admin", "any"]
"""Scope that an action requires; every token permits actions of scope ``any``."""

SCOPES: Final[dict[TokenScope, str]] = {
    "read": "see jobs, usage, balances, nodes, events and reports",
    "scripts": "read scripts and environments, and search in them",
    "bank": "deposit and transfer service units, and change accounts, limits and rates",
    "actions": "run actions that change a cluster or jobs",
    "admin": "administer Steward",
}
"""Token scopes, and what each permits."""

ALL_SCOPES: Final[frozenset[TokenScope]] = frozenset(get_args(TokenScope))

READ_SCOPES: Final[frozenset[TokenScope]] = frozenset({"read", "scripts"})
"""Scopes whose actions change nothing."""


class ScopeRefused(PermissionRefused):
    """A token lacks the scope of an action."""


def check_scope(asker: Caller, action: str, scope: Scope) -> None:
    """Reject an action that the caller's token or service principal does not permit.

    Args:
        asker: The caller.
        action: Name of the action, for the message.
        scope: Scope that the action requires.

    Raises:
        ScopeRefused: The token lacks the scope.
        PermissionRefused: The action is not among the principal's permissions.
    """
    if asker.service is not None:
        asker.service.require(action)
    if asker.scopes is None or scope == "any" or scope in asker.scopes:
        return
    raise ScopeRefused(
        f"permission denied: {action} requires the scope '{scope}', but this token has "
        f"{' and '.join(sorted(asker.scopes)) or 'none'}: create a token with that scope",
        action,
    )


MAX_ROLES_AGE_S = 86400.0
"""Age, in seconds, above which stored roles are ignored."""

_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ClusterRolesUnavailable(Unavailable):
    """The status file of a cluster's roles cannot be written now."""


class ClusterRolesFiles:
    """Stored roles of all clusters, one status file each (``roles-CLUSTER.json``).

    Args:
        state_dir: Steward's state directory.
    """

    def __init__(self, state_dir: str) -> None:
        self._state_dir = state_dir

    def put(self, cluster: str, roles: ClusterRoles) -> None:
        """Write a cluster's present roles.

        Raises:
            ClusterRolesUnavailable: It cannot be written.
        """
        try:
            write_status(self._path(cluster), roles)
        except StatusWriteError as error:
            raise ClusterRolesUnavailable(str(error), error.offender) from error

    def get(self, cluster: str) -> ClusterRoles | None:
        """Read a cluster's last reported roles; None if absent or too old."""
        try:
            stored = read_status(self._path(cluster), ClusterRoles)
        except StewardError:
            return None  # not the name of a cluster: nothing is granted
        # Without a recent file no role is known: users then see only their own jobs.
        return stored[0] if stored and time.time() - stored[1] < MAX_ROLES_AGE_S else None

    def get_version(self, cluster: str) -> tuple[int, int]:
        """Identify the present file of a cluster's roles, without reading it.

        Returns:
            Its inode and modification time in ns, both 0 if there is none.
        """
        try:
            info = os.stat(self._path(cluster))
        except OSError:
            return 0, 0
        return info.st_ino, info.st_mtime_ns

    def _path(self, cluster: str) -> str:
        if _SAFE_NAME.fullmatch(cluster) is None:
            raise StewardError(
                f"invalid cluster name {cluster!r}: use up to 64 letters, digits, '_' and '-'",
                cluster,
            )
        return os.path.join(self._state_dir, f"roles-{cluster}.json")


def make_access(
    settings: Settings, list_led: Callable[[str, frozenset[str]], frozenset[str]] | None = None
) -> Access:
    """Make the access decisions of a configuration, with the stored roles.

    Args:
        settings: The configuration.
        list_led: Bank accounts that a user leads, as :class:`Access` takes it.
    """
    try:
        own_uid = os.stat(settings.state_dir).st_uid
    except OSError:
        # Without a state directory there is nothing to see yet, for anyone.
        own_uid = os.geteuid()
    return Access(settings.access, own_uid, ClusterRolesFiles(settings.state_dir).get, list_led)


def list_web_uids(settings: Settings) -> frozenset[int]:
    """Return the uids that ``steward web`` may run as: [web] user, if [web] is configured."""
    if not settings.web.listen:
        return frozenset()
    try:
        return frozenset({pwd.getpwnam(settings.web.user).pw_uid})
    except KeyError:
        return frozenset()
