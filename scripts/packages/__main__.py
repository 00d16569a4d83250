"""``python -m packages``: builds all distribution files of Steward in a directory.

SOURCE_DATE_EPOCH is the time of every file; without it that of the last commit is.
"""

import argparse
import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypedDict

from packages import deb, rpm, stackstorm
from packages.package import Fill, Package, contents
from packages.running import PackagingError, run
from packages.wheels import PYTHONS, ROOT, fetch, own
from steward import __version__

_KINDS: Final = {"deb": deb.build, "rpm": rpm.build}
_OURS: Final = (
    "steward*.deb",
    "steward*.rpm",
    "slurm_steward-*",
    "stackstorm-pack-*",
    "SHA256SUMS",
)


class Told(TypedDict):
    """Inputs of every kind of package."""

    version: str
    machine: str
    epoch: int
    level: int


def main() -> int:
    """Build what the command line requests; return the exit code."""
    parser = argparse.ArgumentParser(prog="packages", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where packages go")
    parser.add_argument("--work", type=Path, default=ROOT / "build/packages", help="scratch")
    parser.add_argument("--wheels", type=Path, help="fetched wheels (default: in --work)")
    parser.add_argument("--level", type=int, default=10, help="zstd level of packages (default 10)")
    parser.add_argument("--machine", choices=("amd64", "arm64"), default="amd64")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="for these alone")
    parser.add_argument("--only", action="append", choices=("wheel", *_KINDS), help="these alone")
    asked = parser.parse_args()
    # Whoever makes a package, its files are everybody's to read.
    os.umask(0o022)
    try:
        _make(asked, asked.only or ["wheel", *_KINDS])
    except PackagingError as error:
        print(f"packages: {error}", file=sys.stderr)
        return 1
    return 0


def _make(asked: argparse.Namespace, kinds: list[str]) -> None:
    epoch = _epoch()
    out: Path = asked.out.resolve()
    work: Path = asked.work.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _OURS:
        for old in out.glob(pattern):
            old.unlink()
    made = own(work / "own", out, epoch)
    pack = stackstorm.build(made.wheel, out, version=__version__, epoch=epoch)
    _say(made.sdist, made.wheel, pack)
    if kinds != ["wheel"]:
        wheels = (asked.wheels or work / "wheels").resolve()
        fetched = fetch(wheels, asked.machine, tuple(asked.python or PYTHONS))
        told: Told = {
            "version": __version__,
            "machine": asked.machine,
            "epoch": epoch,
            "level": asked.level,
        }

        def build(one: tuple[str, Package, Fill]) -> None:
            kind, package, fill = one
            directory = work / kind / f"{package.name}{package.python}"
            _say(_KINDS[kind](package, fill, directory, out, **told))

        every = [
            (kind, *one)
            for kind in kinds
            if kind in _KINDS
            for one in contents(made.wheel, fetched, __version__, epoch, kind)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            # The largest first; an exception of a build is raised here.
            list(pool.map(build, sorted(every, key=lambda one: one[1].name != "steward")))
    _write_sums(out)


def _epoch() -> int:
    told = os.environ.get("SOURCE_DATE_EPOCH")
    return int(told or run(["git", "log", "-1", "--format=%ct"], cwd=ROOT))


def _say(*paths: Path) -> None:
    for path in paths:
        print(f"{path}  {path.stat().st_size / 2**20:.1f} MB", flush=True)


def _write_sums(out: Path) -> None:
    """Write SHA256SUMS, for ``sha256sum --check``."""
    lines = []
    for path in sorted(path for pattern in _OURS for path in out.glob(pattern)):
        with open(path, "rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    (out / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(main())
