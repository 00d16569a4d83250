"""Names, dependencies and contents of packages."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from packages import plugin_sources, tree
from packages.wheels import GLIBC, PYTHONS, Wheels


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """Package, for both kinds of distribution.

    Attributes:
        name: Its name.
        summary: Summary in one line.
        description: Description in a paragraph.
        compiled: Whether it is for one machine architecture only.
        python: Python version of its modules; "" for any.
        scripts: Directory of its maintainer scripts, below that of the distribution's kind.
        debian: Its dependencies on Debian.
        debian_more: Further fields of Debian's control file.
        redhat: Its requirements on EL.
    """

    name: str
    summary: str
    description: str
    compiled: bool = False
    python: str = ""
    scripts: str = ""
    debian: tuple[str, ...] = ()
    debian_more: tuple[str, ...] = ()
    redhat: tuple[str, ...] = ()


Fill = Callable[[Path, str], None]
"""Lays a package's files out: in which directory, and where zsh looks for completion."""

OF_PYTHONS: Final = {"deb": PYTHONS, "rpm": ("3.11", "3.12")}
"""The versions of Python for which each kind of distribution gets packages: those it has."""
_PARTS: Final = {
    "parquet": "closes days of the job log as Parquet, and has sacct read them (DuckDB)",
    "kafka": "archives scripts in a Kafka topic, and takes them in from one",
    "postgresql": "keeps the bank's ledger in PostgreSQL",
}


def steward_package(python: str) -> Package:
    """Return the package of Steward for one version of Python.

    An upgrade of the distribution to another Python takes the package for that Python, or waits
    while this one is held.
    """
    return Package(
        name="steward",
        summary="Keeps the books of a Slurm cluster",
        description=(
            "Archives exactly what every job ran, records what each job used, charges it to the "
            "right account before that account can be overdrawn, and acts when nodes change "
            "state. It brings all that it needs under /opt/steward but for Python itself, enables "
            "no service, and changes nothing of Slurm's. Drivers of other servers are in packages "
            "of their own."
        ),
        compiled=True,
        python=python,
        scripts="steward",
        debian=(
            f"python3 (>= {python})",
            f"python3 (<< {_later(python)})",
            f"libc6 (>= 2.{GLIBC})",
            *("libstdc++6", "passwd"),
        ),
        # No recommendation, which apt would follow: many a site's Slurm is no package of Debian's.
        debian_more=(
            "Suggests: slurm-client, munge, gcc, libslurm-dev, "
            + ", ".join(f"steward-{part}" for part in _PARTS),
        ),
        redhat=(
            f"python{python}",
            f"glibc >= 2.{GLIBC}",
            *("libstdc++", "shadow-utils", "findutils"),
        ),
    )


def part_package(part: str, python: str, version: str) -> Package:
    """Return the package of an optional part's driver, for one version of Python and of Steward."""
    of = deb_version(version, python)
    return Package(
        name=f"steward-{part}",
        summary=f"Driver for Steward: {part}",
        description=(
            f"With it, Steward {_PARTS[part]}. Steward says whether its configuration names "
            "a part that is not installed: steward config check."
        ),
        compiled=True,
        python=python,
        scripts="part",
        debian=(f"steward (= {of})",),
        # A package that held all parts had the same files.
        debian_more=(f"Breaks: steward (<< {of})", f"Replaces: steward (<< {of})"),
        redhat=(f"steward = {version}-{rpm_release(python)}",),
    )


def deb_version(version: str, python: str) -> str:
    """Return the version of a Debian package, which rises with that of Python."""
    return f"{version}+py{python}" if python else version


def rpm_release(python: str) -> str:
    """Return the release of an RPM, which rises with the version of Python."""
    return f"1.py{python}" if python else "1"


def _later(python: str) -> str:
    major, minor = python.split(".")
    return f"{major}.{int(minor) + 1}"


AGENT: Final = Package(
    name="steward-agent",
    scripts="steward-agent",
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


def contents(
    wheel: Path, fetched: Mapping[str, Wheels], version: str, epoch: int, kind: str
) -> list[tuple[Package, Fill]]:
    """Return the packages of a kind of distribution, with the function that fills each.

    Args:
        wheel: Steward's wheel.
        fetched: Wheels of its dependencies, for each version of Python.
        version: Steward's version.
        epoch: Date of man pages, in seconds since 1970.
        kind: ``deb`` or ``rpm``.
    """

    def steward(wheels: Wheels, root: Path, zsh: str) -> None:
        tree.steward(root, wheel, wheels)
        tree.documents(root, version, epoch, zsh=zsh)

    def part(wheels: Wheels, name: str, root: Path, zsh: str) -> None:
        del zsh  # it has no completion
        tree.part(root, name, wheels)

    def agent(root: Path, zsh: str) -> None:
        del zsh
        tree.agent(root)

    def plugins(root: Path, zsh: str) -> None:
        del zsh
        tree.plugins(root, plugin_sources.files(), plugin_sources.script())

    made: list[tuple[Package, Fill]] = [(PLUGINS, plugins), (AGENT, agent)]
    for python in OF_PYTHONS[kind]:
        if python in fetched:
            wheels = fetched[python]
            made.append((steward_package(python), partial(steward, wheels)))
            made += [
                (part_package(name, python, version), partial(part, wheels, name))
                for name in _PARTS
            ]
    return made
