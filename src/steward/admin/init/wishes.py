"""What a site wants of Steward, and what its Slurm says: a configuration is made of the two."""

import os
import pwd
from collections.abc import Mapping
from typing import Final

import msgspec

from steward.admin.init.errors import SetupError
from steward.admin.plugins.installing import DEFAULT_LINES
from steward.admin.plugins.telling import slurm_user
from steward.core.config import Settings
from steward.slurm import Slurm, SlurmError
from steward.slurm.settings import ClusterSettings

DEFAULT_OUT: Final = "/etc/steward"
DEFAULT_ARCHIVE: Final = "/srv/steward/archive"
DEFAULT_STATE: Final = Settings().state_dir
_PATIENCE_S: Final = 20.0


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says of itself.

    Attributes:
        shown: What ``scontrol show config`` shows; empty where slurmctld does not answer.
        slurm_conf: The path that was named for slurm.conf; "" where it is found by itself.
        slurm_bin: The directory that was named for its commands; "" likewise.
    """

    shown: Mapping[str, str] = {}
    slurm_conf: str = ""
    slurm_bin: str = ""

    @property
    def cluster(self) -> str:
        """ClusterName; "" where it is not shown."""
        return self.shown.get("ClusterName", "")

    @property
    def slurm_user(self) -> str:
        """SlurmUser's name."""
        found = slurm_user(self.shown)
        return found[0] if found else "slurm"

    @property
    def etc(self) -> str:
        """The directory of slurm.conf."""
        path = self.slurm_conf or self.shown.get("SLURM_CONF", "")
        return os.path.dirname(path) if path else "/etc/slurm"

    @property
    def plugstack(self) -> str:
        """Path of plugstack.conf."""
        return self.shown.get("PlugStackConfig", "") or f"{self.etc}/plugstack.conf"

    @property
    def jobcomp(self) -> str:
        """JobCompType; "" where the place is free."""
        kind = self.shown.get("JobCompType", "")
        return "" if kind == "jobcomp/none" else kind


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a site wants of Steward.

    Attributes:
        cluster: What the cluster is called.
        user: Who Steward runs as.
        archive_dir: Where scripts are archived.
        state_dir: Where journal and databases live.
        out: Directory of the configuration.
        jobcomp_lines: File that slurmctld tells of ended jobs in; "" for none.
        nodes: Address at which nodes report what jobs used; "" for none.
        listener: User that listens there; "" where the daemon does it itself.
        bank: Whether there is a bank.
        sensor: Whether nodes are watched.
        web: Address of the pages; "" for none.
        web_url: URL of the pages in users' browsers; "" if it is not known yet.
    """

    cluster: str
    user: str
    archive_dir: str = DEFAULT_ARCHIVE
    state_dir: str = DEFAULT_STATE
    out: str = DEFAULT_OUT
    jobcomp_lines: str = DEFAULT_LINES
    nodes: str = ""
    listener: str = ""
    bank: bool = False
    sensor: bool = False
    web: str = ""
    web_url: str = ""

    @property
    def path(self) -> str:
        """The configuration's file."""
        return os.path.join(self.out, "steward.toml")

    @property
    def account(self) -> pwd.struct_passwd:
        """The user that Steward runs as.

        Raises:
            SetupError: There is none of that name.
        """
        try:
            return pwd.getpwnam(self.user)
        except KeyError as error:
            raise SetupError(
                f"there is no user {self.user!r}: name SlurmUser by --user", self.user
            ) from error


def is_user(name: str) -> bool:
    """Look up a user, as a package makes it."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def site_of(slurm_conf: str = "", slurm_bin: str = "") -> Site:
    """What Slurm says of itself here; little where slurmctld does not answer.

    Args:
        slurm_conf: Path of slurm.conf, where it is not found by itself.
        slurm_bin: Directory of Slurm's commands, likewise.

    Raises:
        SetupError: slurmctld does not answer.
    """
    settings = ClusterSettings(
        slurm_conf=slurm_conf, slurm_bin=slurm_bin, command_timeout_s=_PATIENCE_S
    )
    try:
        shown = Slurm("here", settings).config()
    except SlurmError as error:
        raise SetupError(
            f"slurmctld does not answer: run this on its host while it runs ({error})", error
        ) from error
    return Site(shown=shown, slurm_conf=slurm_conf, slurm_bin=slurm_bin)
