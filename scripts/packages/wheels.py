"""Steward's own wheel and sources, and the wheels of what it needs, from the lock file."""

import gzip
import importlib.metadata
import io
import os
import re
import shutil
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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
_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
_LOCKED: Final = re.compile(r"^([a-z0-9][a-z0-9._-]*)==", re.IGNORECASE)
_BUILD: Final = (
    "import sys; from setuptools import build_meta; "
    "print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
)


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """What is made of Steward itself.

    Attributes:
        sdist: Its sources.
        wheel: Its wheel, made of these sources.
    """

    sdist: Path
    wheel: Path


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """The wheels of what Steward needs.

    Attributes:
        pure: Those for every Python.
        compiled: Those for one each.
    """

    pure: tuple[Path, ...]
    compiled: dict[str, tuple[Path, ...]]


def own(work: Path, out: Path, epoch: int) -> Own:
    """Make sources and wheel of Steward, the same from the same files every time."""
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


def fetch(work: Path, machine: str, pythons: tuple[str, ...]) -> Fetched:
    """Have pip fetch what the lock file says, checksums and all, unless it is here already."""
    lock = "".join(_locked(set(needed())))
    compiled = {}
    pure: tuple[Path, ...] = ()
    for python in pythons:
        directory = work / f"{machine}-{python}"
        _fetch(directory, lock, machine, python)
        wheels = sorted(directory.glob("*.whl"))
        pure = tuple(wheel for wheel in wheels if wheel.name.endswith("-none-any.whl"))
        compiled[python] = tuple(wheel for wheel in wheels if wheel not in pure)
    return Fetched(pure=pure, compiled=compiled)


def needed() -> Iterator[str]:
    """Names of all that an installed Steward needs, its optional parts included.

    Raises:
        PackagingError: One of them is not installed here, so what it needs is not known.
    """
    with open(ROOT / "pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    for lines in project["optional-dependencies"].values():
        wanted += [Requirement(line) for line in lines]
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
            raise PackagingError(f"{one.name} is not in .venv: scripts/setup.sh python") from error
        wanted += [found for found in map(Requirement, lines) if _applies(found, one.extras)]


def _applies(one: Requirement, extras: set[str]) -> bool:
    asked = extras or {""}
    return one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in asked)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _locked(names: set[str]) -> Iterator[str]:
    """The lines of the lock file that are about some packages."""
    keep = False
    with open(ROOT / "requirements.lock", encoding="utf-8") as file:
        for line in file:
            found = _LOCKED.match(line)
            if found:
                keep = _plain(found[1]) in names
            if keep:
                yield line


def _fetch(directory: Path, lock: str, machine: str, python: str) -> None:
    requirements = directory / "requirements.txt"
    if requirements.exists() and requirements.read_text(encoding="utf-8") == lock:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    part = directory / "requirements.part"
    part.write_text(lock, encoding="utf-8")
    platforms = [f"manylinux_2_{minor}_{_MACHINES[machine]}" for minor in range(GLIBC, 4, -1)]
    run(
        [
            *(sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"),
            *("--require-hashes", "--no-deps", "--only-binary", ":all:"),
            *("--implementation", "cp", "--python-version", python),
            *(word for platform in platforms for word in ("--platform", platform)),
            *("--dest", directory, "--requirement", part),
        ]
    )
    part.rename(requirements)


def _files() -> Iterator[Path]:
    """Every file of the repository, committed or to be, and what was built."""
    listed = run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT)
    for name in listed.split("\0"):
        if name and (ROOT / name).is_file():
            yield Path(name)
    for name in BUILT:
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                yield path.relative_to(ROOT)


def _normalise(source: Path, target: Path, epoch: int) -> None:
    """Write a tar.gz anew with nothing in it of who made it, and when."""
    raw = io.BytesIO()
    with tarfile.open(source) as old, tarfile.open(fileobj=raw, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with open(target, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=epoch) as packed:
        packed.write(raw.getvalue())
