"""What the packages are called, need and hold."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from packages import plugin_sources, tree
from packages.wheels import GLIBC, PYTHONS, Fetched


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """A package, for both kinds of distribution.

    Attributes:
        name: Its name.
        summary: One line.
        description: A paragraph.
        compiled: Whether it is for one kind of machine only.
        debian: What it depends on there.
        debian_more: Further fields of Debian's control file.
        redhat: What it requires there.
    """

    name: str
    summary: str
    description: str
    compiled: bool = False
    debian: tuple[str, ...] = ()
    debian_more: tuple[str, ...] = ()
    redhat: tuple[str, ...] = ()


Fill = Callable[[Path, str], None]
"""Lays a package's files out: in which directory, and where zsh looks for completion."""

STEWARD: Final = Package(
    name="steward",
    summary="Keeps the books of a Slurm cluster",
    description=(
        "Archives exactly what every job ran, records what each job used, charges it to the "
        "right account before that account can be overdrawn, and acts when nodes change state. "
        "It brings all that it needs under /opt/steward but for Python itself, enables no "
        "service, and changes nothing of Slurm's."
    ),
    compiled=True,
    debian=(
        " | ".join(f"python{python}" for python in PYTHONS),
        f"libc6 (>= 2.{GLIBC})",
        *("libstdc++6", "passwd"),
    ),
    # No recommendation, which apt would follow: many a site's Slurm is no package of Debian's.
    debian_more=("Suggests: slurm-client, munge, gcc, libslurm-dev",),
    redhat=(
        f"({' or '.join(f'python{python}' for python in PYTHONS)})",
        f"glibc >= 2.{GLIBC}",
        *("libstdc++", "shadow-utils", "findutils"),
    ),
)
AGENT: Final = Package(
    name="steward-agent",
    summary="Sends what happened on a compute node to Steward",
    description=(
        "One file, run once a minute by a timer, which sends what Steward's SPANK plugin has "
        "written down. For compute nodes; it enables no service."
    ),
    debian=("python3 (>= 3.9)",),
    debian_more=("Suggests: munge",),
    redhat=("python3 >= 3.9",),
)
PLUGINS: Final = Package(
    name="steward-plugins-src",
    summary="Sources of what Slurm loads of Steward",
    description=(
        "The SPANK plugin, the job_submit plugin and the Lua modules, with steward-plugins-build, "
        "which compiles them against the Slurm of a host without Steward."
    ),
    debian_more=("Recommends: gcc | c-compiler, libc6-dev", "Suggests: libslurm-dev"),
)


def contents(wheel: Path, fetched: Fetched, version: str, epoch: int) -> dict[str, Fill]:
    """How each package is filled.

    Args:
        wheel: Steward's own.
        fetched: What it needs.
        version: Of Steward.
        epoch: The time that pages of the manual are dated by.
    """

    def steward(root: Path, zsh: str) -> None:
        tree.steward(root, wheel, fetched)
        tree.documents(root, version, epoch, zsh=zsh)

    def agent(root: Path, zsh: str) -> None:
        del zsh  # it has no completion
        tree.agent(root)

    def plugins(root: Path, zsh: str) -> None:
        del zsh
        tree.plugins(root, plugin_sources.files(), plugin_sources.script())

    return {STEWARD.name: steward, AGENT.name: agent, PLUGINS.name: plugins}
