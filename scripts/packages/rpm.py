"""Packages for EL 8 and 9, by rpmbuild wherever that runs."""

import os
import shutil
import textwrap
from pathlib import Path
from typing import Final

from packages import tree
from packages.package import Fill, Package, rpm_release
from packages.running import run
from packages.wheels import ROOT

ZSH: Final = "usr/share/zsh/site-functions"
_MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
# What rpm would do with files by itself is left out: they are whole, and for every EL.
_MACROS: Final = """\
%global debug_package %{nil}
%global __os_install_post %{nil}
%global _build_id_links none
%global use_source_date_epoch_as_buildtime 1
%global clamp_mtime_to_source_date_epoch 1
%global _buildhost localhost
"""


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
    """Build a package; return its file. The arguments are those of a Debian package."""
    shutil.rmtree(work, ignore_errors=True)
    root = work / "root"
    fill(root, ZSH)
    tree.papers(root, package.name)
    tree.finish(root, epoch)
    architecture = _MACHINES[machine] if package.compiled else "noarch"
    spec = work / f"{package.name}.spec"
    spec.write_text(_spec(package, version, root))
    run(
        [
            *("rpmbuild", "-bb", "--target", f"{architecture}-linux", "--quiet"),
            *("--define", f"_topdir {work}/top", "--define", f"_dbpath {work}/db"),
            *("--define", f"_rpmdir {work}/made"),
            *(
                "--define",
                f"_binary_payload w{level}.zstdio",
                "--buildroot",
                work / "buildroot",
                spec,
            ),
        ],
        env={"SOURCE_DATE_EPOCH": str(epoch)},
    )
    (made,) = (work / "made").rglob("*.rpm")
    target = out / f"{package.name}-{version}-{rpm_release(package.python)}.{architecture}.rpm"
    shutil.copyfile(made, target)
    shutil.rmtree(work)
    os.chmod(target, 0o644)
    return target


def _spec(package: Package, version: str, root: Path) -> str:
    scripts = ROOT / "packaging" / "rpm" / f"{package.scripts or package.name}.scripts"
    lines = [
        _MACROS,
        f"Name: {package.name}",
        f"Version: {version}",
        f"Release: {rpm_release(package.python)}",
        f"Summary: {package.summary}",
        "License: MIT",
        *(("BuildArch: noarch",) if not package.compiled else ()),
        # The modules under /opt are nobody else's, and need nothing but what is said here.
        "AutoReqProv: no",
        *(f"Requires: {one}" for one in package.redhat),
        "",
        "%description",
        *textwrap.wrap(package.description, 76),
        "",
        "%install",
        "mkdir -p %{buildroot}",
        f"cp -a {root}/. %{{buildroot}}/",
        "",
        scripts.read_text(encoding="utf-8") if scripts.exists() else "",
        "%files",
        "%defattr(-,root,root,-)",
        *_files(root),
    ]
    return "\n".join(lines) + "\n"


def _files(root: Path) -> list[str]:
    """Return the files that the package owns, without directories of the distribution."""
    found = []
    for folder, directories, names in os.walk(root):
        relative = os.path.relpath(folder, root)
        for name in sorted(directories):
            path = f"/{name}" if relative == "." else f"/{relative}/{name}"
            if path in ("/opt/steward", "/etc/steward", "/usr/src/steward-plugins"):
                found.append(path)
        directories[:] = [
            name
            for name in sorted(directories)
            if os.path.normpath(f"{relative}/{name}") not in tree.OWN
        ]
        for name in sorted(names):
            path = f"/{relative}/{name}"
            found.append(f"{path}*" if "/usr/share/man/" in path else path)
    return [f'"{path}"' if " " in path else path for path in found]
