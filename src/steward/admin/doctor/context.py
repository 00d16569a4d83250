"""What the checks stand on: the settings, who asks, and what each cluster's Slurm shows.

Slurm is asked once, before the checks are run, and all of them read what it said.
"""

import os
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeVar

import msgspec

from steward.admin.doctor.findings import Finding, skipped
from steward.admin.plugins.jobcomp import slurm_user
from steward.core.access import Asker
from steward.core.actions import Registry
from steward.core.config import Settings
from steward.slurm import Slurm, SlurmError
from steward.slurm.settings import ClusterSettings

_MOST_PATIENCE_S: Final = 20.0

T = TypeVar("T")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a cluster's Slurm says of itself.

    Attributes:
        name: The cluster's name in the configuration.
        settings: How its commands are found.
        version: Of its commands; None where they cannot be run.
        no_version: Why not.
        shown: What ``scontrol show config`` shows; empty where slurmctld does not answer.
        no_answer: Why not; "" where it did.
    """

    name: str
    settings: ClusterSettings
    version: tuple[int, int, int] | None = None
    no_version: str = ""
    shown: Mapping[str, str] = {}
    no_answer: str = ""

    @property
    def slurm(self) -> Slurm:
        """Its Slurm, to be asked more."""
        return Slurm(self.name, self.settings)

    @property
    def etc(self) -> str:
        """Where its slurm.conf is."""
        path = self.settings.slurm_conf or self.shown.get("SLURM_CONF", "")
        return os.path.dirname(path) if path else "/etc/slurm"

    @property
    def slurm_user(self) -> tuple[str, int]:
        """SlurmUser's name and uid; root's where that is not shown."""
        return slurm_user(self.shown) or ("root", 0)


class Ground(msgspec.Struct, frozen=True, kw_only=True):
    """What a check may look at.

    Attributes:
        settings: The whole configuration.
        fresh: Makes what the other rooms can be asked for.
        asker: In whose name.
        clusters: The clusters whose Slurm is asked from here.
        own_uid: As whom Steward runs: the owner of its state directory; None before it has one.
        uid: As whom the checks are run.
    """

    settings: Settings
    fresh: Callable[[], Registry]
    asker: Asker
    clusters: tuple[Asked, ...] = ()
    own_uid: int | None = None
    uid: int = 0

    @property
    def is_root(self) -> bool:
        """Whether everything may be looked at."""
        return self.uid == 0

    @property
    def own_name(self) -> str:
        """The name of whom Steward runs as."""
        return user_name(self.uid if self.own_uid is None else self.own_uid)

    def ask(self, action: str, **request: Any) -> Any:
        """What another room's action answers.

        Raises:
            StewardError: It refuses, or cannot.
        """
        registry = self.fresh()
        return registry.call(action, self.asker, registry.decode(action, request))


OfCluster = Callable[[Ground, Asked], Iterable[Finding]]
"""A check of one cluster whose slurmctld answers."""


def each_cluster(looked_at: str, check: OfCluster) -> Callable[[Ground], Iterator[Finding]]:
    """A check of every cluster; of one whose slurmctld does not answer it says that.

    Args:
        looked_at: What it would look at.
        check: What to do with each of the others.
    """

    def run(ground: Ground) -> Iterator[Finding]:
        if not ground.clusters:
            yield skipped(looked_at, "no cluster's Slurm is asked from here")
        for one in ground.clusters:
            if one.no_answer:
                yield skipped(looked_at, "slurmctld does not answer", of=one.name)
                continue
            for finding in check(ground, one):
                yield msgspec.structs.replace(finding, of=finding.of or one.name)

    return run


def ground_of(
    settings: Settings, fresh: Callable[[], Registry], asker: Asker, *, asks_slurm: bool = True
) -> Ground:
    """The ground of a configuration; Slurm is asked now.

    Args:
        settings: The whole configuration.
        fresh: Makes what the other rooms can be asked for.
        asker: In whose name.
        asks_slurm: Whether a check wants to know what Slurm shows.
    """
    here = [(name, of) for name, of in settings.cluster.items() if of.asks_slurm and not of.remote]
    try:
        own_uid: int | None = os.stat(settings.state_dir).st_uid
    except OSError:
        own_uid = None
    return Ground(
        settings=settings,
        fresh=fresh,
        asker=asker,
        clusters=tuple(_asked(name, of) for name, of in here) if asks_slurm else (),
        own_uid=own_uid,
        uid=os.geteuid(),
    )


def _asked(name: str, of: ClusterSettings) -> Asked:
    """What a cluster's Slurm says now, waited for no longer than people do."""
    patient = min(of.command_timeout_s, _MOST_PATIENCE_S)
    hasty = msgspec.structs.replace(of, command_timeout_s=patient)
    slurm = Slurm(name, hasty)
    version, no_version = _tried(slurm.version)
    shown, no_answer = _tried(slurm.config)
    return Asked(
        name=name,
        settings=hasty,
        version=version,
        no_version=no_version,
        shown=shown or {},
        no_answer=no_answer,
    )


def _tried(ask: Callable[[], T]) -> tuple[T | None, str]:
    try:
        return ask(), ""
    except SlurmError as error:
        return None, str(error)


def user_name(uid: int) -> str:
    """A user's name; the uid in digits where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
