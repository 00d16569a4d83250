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
from steward.core.access import Caller
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.slurm import Slurm, SlurmError
from steward.slurm.cluster import ClusterQueries
from steward.slurm.settings import ClusterSettings

PATIENCE_S: Final = 20.0
"""Longest wait for each command of Slurm, in seconds."""

T = TypeVar("T")


class ClusterReport(msgspec.Struct, frozen=True, kw_only=True):
    """Version and configuration of one cluster, as its Slurm reported them.

    Attributes:
        name: Name of the cluster in the configuration.
        settings: Settings of the cluster.
        timeout_s: Time-out of its commands, in seconds.
        version: Version of Slurm's commands; None if they cannot be run.
        version_error: The error then.
        config: Output of ``scontrol show config``; empty if slurmctld does not answer.
        config_error: The error then; "" if it answered.
    """

    name: str
    settings: ClusterSettings
    timeout_s: float = PATIENCE_S
    version: tuple[int, int, int] | None = None
    version_error: str = ""
    config: Mapping[str, str] = {}
    config_error: str = ""

    @property
    def slurm(self) -> Slurm:
        """Client of the cluster's Slurm, for more queries."""
        return Slurm(self.name, self.settings, self.timeout_s)

    @property
    def queries(self) -> ClusterQueries:
        """Client of its nodes, partitions and daemons."""
        return ClusterQueries(self.name, self.settings, self.timeout_s)

    @property
    def conf_dir(self) -> str:
        """Directory of slurm.conf."""
        path = self.settings.slurm_conf or self.config.get("SLURM_CONF", "")
        return os.path.dirname(path) if path else "/etc/slurm"

    @property
    def slurm_user(self) -> tuple[str, int]:
        """Name and uid of SlurmUser; root's if unknown."""
        return parse_slurm_user(self.config) or ("root", 0)


class CheckContext(msgspec.Struct, frozen=True, kw_only=True):
    """Context that every check receives.

    Attributes:
        settings: The whole configuration.
        make_registry: Makes an unused registry of other packages' actions.
        caller: User in whose name the checks run.
        clusters: Clusters whose Slurm is queried from here.
        steward_uid: Steward's uid, the owner of its state directory; None before there is one.
        uid: Effective uid of the checks.
    """

    settings: Settings
    make_registry: Callable[[], Registry]
    caller: Caller
    clusters: tuple[ClusterReport, ...] = ()
    steward_uid: int | None = None
    uid: int = 0

    @property
    def is_root(self) -> bool:
        """Whether the checks run as root and may read everything."""
        return self.uid == 0

    @property
    def steward_user(self) -> str:
        """Name of the user that Steward runs as."""
        return get_user_name(self.uid if self.steward_uid is None else self.steward_uid)

    def call_action(self, action: str, **request: Any) -> Any:
        """Call another package's action and return its answer.

        Raises:
            StewardError: It refuses, or cannot.
        """
        registry = self.make_registry()
        return registry.call(action, self.caller, registry.decode(action, request))


ClusterCheck = Callable[[CheckContext, ClusterReport], Iterable[CheckFinding]]
"""A check of one cluster whose slurmctld answers."""


def make_cluster_check(
    checked: str, check: ClusterCheck
) -> Callable[[CheckContext], Iterator[CheckFinding]]:
    """Make a check of every cluster; clusters whose slurmctld does not answer are skipped.

    Args:
        checked: Path, setting or command that the check reads, for findings of skipped clusters.
        check: Check of one cluster.
    """

    def run(context: CheckContext) -> Iterator[CheckFinding]:
        if not context.clusters:
            yield make_skipped(checked, "no cluster is queried from this host")
        for report in context.clusters:
            if report.config_error:
                yield make_skipped(checked, "slurmctld does not answer", name=report.name)
                continue
            for finding in check(context, report):
                yield msgspec.structs.replace(finding, object=finding.object or report.name)

    return run


def make_check_context(
    settings: Settings,
    make_registry: Callable[[], Registry],
    caller: Caller,
    *,
    asks_slurm: bool = True,
    timeout_s: float = PATIENCE_S,
) -> CheckContext:
    """Make the context of the checks; query Slurm now.

    Args:
        settings: The whole configuration.
        make_registry: Makes an unused registry of other packages' actions.
        caller: User in whose name the checks run.
        asks_slurm: Whether any check needs Slurm.
        timeout_s: Time-out of Slurm's commands, in seconds.
    """
    queried = [
        (name, cluster_settings)
        for name, cluster_settings in settings.cluster.items()
        if cluster_settings.asks_slurm and not cluster_settings.remote
    ]
    try:
        steward_uid: int | None = os.stat(settings.state_dir).st_uid
    except OSError:
        steward_uid = None
    return CheckContext(
        settings=settings,
        make_registry=make_registry,
        caller=caller,
        clusters=tuple(
            _query_cluster(name, cluster_settings, timeout_s) for name, cluster_settings in queried
        )
        if asks_slurm
        else (),
        steward_uid=steward_uid,
        uid=os.geteuid(),
    )


def _query_cluster(name: str, settings: ClusterSettings, timeout_s: float) -> ClusterReport:
    """Query a cluster's Slurm, with a time-out short enough for a waiting person."""
    slurm = Slurm(name, settings, timeout_s)
    version, version_error = _try_query(slurm.version)
    config, config_error = _try_query(slurm.config)
    return ClusterReport(
        name=name,
        settings=settings,
        timeout_s=timeout_s,
        version=version,
        version_error=version_error,
        config=config or {},
        config_error=config_error,
    )


def _try_query(query: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return query(), ""
    except SlurmError as error:
        return None, str(error)


def get_user_name(uid: int) -> str:
    """Return a user's name; the uid in digits if it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
