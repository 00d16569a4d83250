"""Debian packages, by dpkg-deb."""

import os
import shutil
import textwrap
from pathlib import Path
from typing import Final

from packages import tree
from packages.package import Fill, Package, deb_version
from packages.running import run
from packages.wheels import ROOT

ZSH: Final = "usr/share/zsh/vendor-completions"
_SCRIPTS: Final = ("postinst", "prerm", "postrm", "triggers")


def build(
    package: Package,
    fill: Fill,
    work: Path,
    out: Path,
    *,
    version: str,
    machine: str,
    epoch: int,
    level: int,
) -> Path:
    """Build a package; return its file.

    Args:
        package: The package.
        fill: Writes its content.
        work: Working directory, which is emptied first.
        out: Directory of the file.
        version: Steward's version.
        machine: ``amd64`` or ``arm64``.
        epoch: Time of every file in it.
        level: Compression level of zstd.
    """
    shutil.rmtree(work, ignore_errors=True)
    fill(work, ZSH)
    tree.papers(work, package.name)
    architecture = machine if package.compiled else "all"
    version = deb_version(version, package.python)
    control = work / "DEBIAN"
    control.mkdir()
    files = {path.lstat().st_ino: path.lstat().st_size for path in work.rglob("*")}
    (control / "control").write_text(
        _control(package, version, architecture, sum(files.values()) // 1024)
    )
    for name in _SCRIPTS:
        source = ROOT / "packaging" / "deb" / (package.scripts or package.name) / name
        if source.exists():
            shutil.copyfile(source, control / name)
            (control / name).chmod(0o644 if name == "triggers" else 0o755)
    tree.finish(work, epoch)
    target = out / f"{package.name}_{version}_{architecture}.deb"
    run(
        ["dpkg-deb", "--root-owner-group", "-Zzstd", f"-z{level}", "--build", work, target],
        env={"SOURCE_DATE_EPOCH": str(epoch)},
    )
    shutil.rmtree(work)
    os.chmod(target, 0o644)
    return target


def _control(package: Package, version: str, architecture: str, kib: int) -> str:
    lines = [
        f"Package: {package.name}",
        f"Version: {version}",
        f"Architecture: {architecture}",
        "Maintainer: The Steward developers",
        f"Installed-Size: {kib}",
        *((f"Depends: {', '.join(package.debian)}",) if package.debian else ()),
        *package.debian_more,
        "Section: admin",
        "Priority: optional",
        f"Description: {package.summary}",
        *textwrap.wrap(package.description, 76, initial_indent=" ", subsequent_indent=" "),
    ]
    return "\n".join(lines) + "\n"
