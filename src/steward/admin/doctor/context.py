"""Context of health checks: settings, caller, and the configuration that each Slurm shows.

``make_check_context`` queries every cluster's Slurm once, before the checks run; all of them read
the result (:class:`ClusterReport`). ``make_cluster_check`` turns a check of one cluster into a
check of all.
"""

import os
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from steward.admin.doctor.findings import CheckFinding, make_skipped
from steward.admin.plugins.jobcomp import parse_slurm_user
from steward.core.access import Asker
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.slurm import Slurm, SlurmError
from steward.slurm.settings import ClusterSettings

_MOST_PATIENCE_S: Final = 20.0
"""Longest wait for each command of Slurm, in seconds."""

T = TypeVar("T")


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Version and configuration of one cluster, as its Slurm reported them.

    Attributes:
        name: Name of the cluster in the configuration.
        settings: Settings of the cluster.
        version: Version of Slurm's commands; None if they cannot be run.
        no_version: The error then.
        shown: Output of ``scontrol show config``; empty if slurmctld does not answer.
        no_answer: The error then; "" if it answered.
    """

    name: str
    settings: ClusterSettings
    version: tuple[int, int, int] | None = None
    no_version: str = ""
    shown: Mapping[str, str] = {}
    no_answer: str = ""

    @property
    def slurm(self) -> Slurm:
        """Client of the cluster's Slurm, for more queries."""
        return Slurm(self.name, self.settings)

    @property
    def etc(self) -> str:
        """Directory of slurm.conf."""
        path = self.settings.slurm_conf or self.shown.get("SLURM_CONF", "")
        return os.path.dirname(path) if path else "/etc/slurm"

    @property
    def slurm_user(self) -> tuple[str, int]:
        """Name and uid of SlurmUser; root's if unknown."""
        return parse_slurm_user(self.shown) or ("root", 0)


class CheckContext(msgspec.Struct, frozen=True, kw_only=True):
    """Context that every check receives.

    Attributes:
        settings: The whole configuration.
        fresh: Makes an unused registry of other packages' actions.
        asker: User in whose name the checks run.
        clusters: Clusters whose Slurm is queried from here.
        own_uid: Steward's uid, the owner of its state directory; None before there is one.
        uid: Effective uid of the checks.
    """

    settings: Settings
    fresh: Callable[[], Registry]
    asker: Asker
    clusters: tuple[ClusterReport, ...] = ()
    own_uid: int | None = None
    uid: int = 0

    @property
    def is_root(self) -> bool:
        """Whether the checks run as root and may read everything."""
        return self.uid == 0

    @property
    def own_name(self) -> str:
        """Name of the user that Steward runs as."""
        return get_user_name(self.uid if self.own_uid is None else self.own_uid)

    def ask(self, action: str, **request: Any) -> Any:
        """Call another package's action and return its answer.

        Raises:
            StewardError: It refuses, or cannot.
        """
        registry = self.fresh()
        return registry.call(action, self.asker, registry.decode(action, request))


ClusterCheck = Callable[[CheckContext, ClusterReport], Iterable[CheckFinding]]
"""A check of one cluster whose slurmctld answers."""


def make_cluster_check(
    looked_at: str, check: ClusterCheck
) -> Callable[[CheckContext], Iterator[CheckFinding]]:
    """Make a check of every cluster; clusters whose slurmctld does not answer are skipped.

    Args:
        looked_at: What the check looks at, for skipped clusters.
        check: Check of one cluster.
    """

    def run(ground: CheckContext) -> Iterator[CheckFinding]:
        if not ground.clusters:
            yield make_skipped(looked_at, "no cluster's Slurm is asked from here")
        for one in ground.clusters:
            if one.no_answer:
                yield make_skipped(looked_at, "slurmctld does not answer", of=one.name)
                continue
            for finding in check(ground, one):
                yield msgspec.structs.replace(finding, of=finding.of or one.name)

    return run


def make_check_context(
    settings: Settings, fresh: Callable[[], Registry], asker: Asker, *, asks_slurm: bool = True
) -> CheckContext:
    """Make the context of the checks; query Slurm now.

    Args:
        settings: The whole configuration.
        fresh: Makes an unused registry of other packages' actions.
        asker: User in whose name the checks run.
        asks_slurm: Whether any check needs Slurm.
    """
    here = [(name, of) for name, of in settings.cluster.items() if of.asks_slurm and not of.remote]
    try:
        own_uid: int | None = os.stat(settings.state_dir).st_uid
    except OSError:
        own_uid = None
    return CheckContext(
        settings=settings,
        fresh=fresh,
        asker=asker,
        clusters=tuple(_query_cluster(name, of) for name, of in here) if asks_slurm else (),
        own_uid=own_uid,
        uid=os.geteuid(),
    )


def _query_cluster(name: str, of: ClusterSettings) -> ClusterReport:
    """Query a cluster's Slurm, with a time-out short enough for a waiting person."""
    patient = min(of.command_timeout_s, _MOST_PATIENCE_S)
    hasty = msgspec.structs.replace(of, command_timeout_s=patient)
    slurm = Slurm(name, hasty)
    version, no_version = _try_query(slurm.version)
    shown, no_answer = _try_query(slurm.config)
    return ClusterReport(
        name=name,
        settings=hasty,
        version=version,
        no_version=no_version,
        shown=shown or {},
        no_answer=no_answer,
    )


def _try_query(ask: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return ask(), ""
    except SlurmError as error:
        return None, str(error)


def get_user_name(uid: int) -> str:
    """Return a user's name; the uid in digits if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
