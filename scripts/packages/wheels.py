"""Steward's own wheel and sources, and the wheels of its dependencies, from the lock files."""

import gzip
import importlib.metadata
import io
import os
import re
import shutil
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from packaging.requirements import Requirement

from packages.running import PackagingError, run

ROOT: Final = Path(__file__).parent.parent.parent
PYTHONS: Final = ("3.11", "3.12", "3.13")
"""The versions of Python that packages carry compiled modules for."""
GLIBC: Final = 28
"""Of glibc 2.N, the oldest that packages run on: that of EL 8."""
BUILT: Final = ("src/steward/web/static/vendor",)
"""What is in no repository and yet in every package."""
RUNTIME: Final = "requirements.lock"
PARTS: Final = "requirements-parts.lock"
TESTS: Final = "requirements-tests.lock"
SERVERS: Final = "requirements-servers.lock"
SITE: Final = "requirements-site.lock"
LOCKS: Final = (RUNTIME, PARTS, TESTS, SERVERS, SITE)
"""Every lock file, in the order in which they are installed."""
_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_LOCKED: Final = re.compile(r"^([a-z0-9][a-z0-9._-]*)==", re.IGNORECASE)
_BUILD: Final = (
    "import sys; from setuptools import build_meta; "
    "print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
)


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution files of Steward itself.

    Attributes:
        sdist: Its sources.
        wheel: Its wheel, built from these sources.
    """

    sdist: Path
    wheel: Path


class Wheels(msgspec.Struct, frozen=True, kw_only=True):
    """Wheels of Steward's dependencies for one version of Python.

    Attributes:
        python: The version.
        parts: Wheels that Steward itself needs, under "", and those that each optional part adds.
    """

    python: str
    parts: dict[str, tuple[Path, ...]]


def own(work: Path, out: Path, epoch: int) -> Own:
    """Build sources and wheel of Steward, reproducibly."""
    shutil.rmtree(work, ignore_errors=True)
    copy = work / "tree"
    for path in _files():
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, target)
        target.chmod(0o755 if os.access(ROOT / path, os.X_OK) else 0o644)
    env = {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONPATH": ""}
    made = work / "made"
    made.mkdir()
    words = [sys.executable, "-c", _BUILD]
    run([*words, "build_sdist", made], cwd=copy, env=env)
    (sdist,) = made.glob("*.tar.gz")
    out.mkdir(parents=True, exist_ok=True)
    _normalise(sdist, out / sdist.name, epoch)
    # Of the sources as they are given away, so that these are whole.
    with tarfile.open(out / sdist.name) as archive:
        archive.extractall(work, filter="data")
    run([*words, "build_wheel", made], cwd=work / sdist.name.removesuffix(".tar.gz"), env=env)
    (wheel,) = made.glob("*.whl")
    shutil.copyfile(wheel, out / wheel.name)
    return Own(sdist=out / sdist.name, wheel=out / wheel.name)


def fetch(work: Path, machine: str, pythons: tuple[str, ...]) -> dict[str, Wheels]:
    """Download the packages of the lock files with pip and verify their checksums, once."""
    needed = needed_by_parts()
    lock = "".join(_locked(frozenset().union(*needed.values())))
    directories = {python: work / f"{machine}-{python}" for python in pythons}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # An exception of a download is raised here.
        list(pool.map(lambda one: _fetch(one[1], lock, machine, one[0]), directories.items()))
    fetched = {}
    for python, directory in directories.items():
        wheels = {_plain(wheel.name.split("-")[0]): wheel for wheel in directory.glob("*.whl")}
        parts = {
            part: tuple(wheels[name] for name in sorted(names & wheels.keys()))
            for part, names in needed.items()
        }
        fetched[python] = Wheels(python=python, parts=parts)
    return fetched


def locked_set(lock: str) -> frozenset[str]:
    """Return the packages of a lock file: those of its purpose, without those of locks before it.

    Raises:
        PackagingError: A package is not installed here, so its dependencies are unknown.
    """
    project = _project()
    groups = project["dependency-groups"]
    parts = project["project"]["optional-dependencies"].values()
    lines = {
        RUNTIME: [*project["project"]["dependencies"], *groups["build"]],
        PARTS: [line for part in parts for line in part],
        TESTS: groups["dev"],
        SERVERS: groups["servers"],
        SITE: groups["site"],
    }
    before = [line for earlier in LOCKS[: LOCKS.index(lock)] for line in lines[earlier]]
    return frozenset(_closure(lines[lock])) - frozenset(_closure(before))


def needed_by_parts() -> dict[str, frozenset[str]]:
    """Return the packages that Steward needs, under "", and those that each optional part adds.

    Raises:
        PackagingError: A package is not installed here, so its dependencies are unknown.
    """
    project = _project()["project"]
    base = frozenset(_closure(project["dependencies"]))
    parts: dict[str, list[str]] = project["optional-dependencies"]
    return {"": base} | {part: frozenset(_closure(of)) - base for part, of in parts.items()}


def _project() -> dict[str, Any]:
    with open(ROOT / "pyproject.toml", "rb") as file:
        return tomllib.load(file)


def _closure(lines: Iterable[str]) -> Iterator[str]:
    """Yield the names of packages that requirements need, directly or not."""
    wanted = [Requirement(line) for line in lines]
    seen = set()
    while wanted:
        one = wanted.pop()
        name = _plain(one.name)
        if (name, *one.extras) in seen:
            continue
        seen.add((name, *one.extras))
        yield name
        try:
            lines = importlib.metadata.requires(one.name) or []
        except importlib.metadata.PackageNotFoundError as error:
            raise PackagingError(f"{one.name} is not in .venv: scripts/setup.sh tests") from error
        wanted += [found for found in map(Requirement, lines) if _applies(found, one.extras)]


def _applies(one: Requirement, extras: set[str]) -> bool:
    asked = extras or {""}
    return one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in asked)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each package of a lock file, with its lines."""
    name = ""
    lines: list[str] = []
    with open(ROOT / lock, encoding="utf-8") as file:
        for line in file:
            found = _LOCKED.match(line)
            if found:
                if lines:
                    yield name, lines
                name, lines = _plain(found[1]), []
            lines.append(line)
    if lines:
        yield name, lines


def _locked(names: frozenset[str]) -> Iterator[str]:
    """Yield the lines of the lock files about some packages."""
    for lock in (RUNTIME, PARTS):
        for name, lines in locked(lock):
            if name in names:
                yield from lines


def _fetch(directory: Path, lock: str, machine: str, python: str) -> None:
    if _is_fetched(directory, lock):
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    try:
        _download(made, lock, machine, python)
        made.chmod(0o755)
        # Builds that share a directory find whole sets only: the first that is ready stays.
        if not _is_fetched(directory, lock):
            shutil.rmtree(directory, ignore_errors=True)
        try:
            made.rename(directory)
        except OSError:
            if not _is_fetched(directory, lock):
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _is_fetched(directory: Path, lock: str) -> bool:
    requirements = directory / "requirements.txt"
    return requirements.exists() and requirements.read_text(encoding="utf-8") == lock


def _download(directory: Path, lock: str, machine: str, python: str) -> None:
    requirements = directory / "requirements.txt"
    requirements.write_text(lock, encoding="utf-8")
    platforms = [f"manylinux_2_{minor}_{_MACHINES[machine]}" for minor in range(GLIBC, 4, -1)]
    run(
        [
            *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"),
            *("--require-hashes", "--no-deps", "--only-binary", ":all:"),
            *("--implementation", "cp", "--python-version", python),
            *(word for platform in platforms for word in ("--platform", platform)),
            *("--dest", directory, "--requirement", requirements),
        ]
    )


def _files() -> Iterator[Path]:
    """Yield every file of the repository, committed or not, and built files."""
    listed = run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            yield Path(name)
    for name in BUILT:
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                yield path.relative_to(ROOT)


def _normalise(source: Path, target: Path, epoch: int) -> None:
    """Write a tar.gz again without the owners and times of its files."""
    raw = io.BytesIO()
    with tarfile.open(source) as old, tarfile.open(fileobj=raw, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with open(target, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed:
        packed.write(raw.getvalue())
