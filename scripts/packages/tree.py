"""Files of a package, laid out as on the host."""

import gzip
import os
import shutil
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from packages import completion, man
from packages.shapes import whole
from packages.wheels import ROOT, Wheels

PREFIX: Final = "opt/steward"
OWN: Final = (PREFIX, "etc/steward", "usr/src/steward-plugins")
"""Directories that are nobody's but the packages'."""
UNITS: Final = "usr/lib/systemd/system"
_PYVENV: Final = """\
home = /usr/bin
include-system-site-packages = false
version = {python}
executable = /usr/bin/python{python}
"""
# Pure packages are there once for every Python; plugins are what a site has put there.
_PTH: Final = f"/{PREFIX}/lib\n/{PREFIX}/plugins\n"


def steward(root: Path, wheel: Path, wheels: Wheels) -> None:
    """Lay out Steward itself.

    Args:
        root: The directory that stands for ``/``.
        wheel: Steward's own.
        wheels: What it needs.
    """
    prefix = root / PREFIX
    python = wheels.python
    _environment(prefix / f"python{python}", python)
    _unpack(root, wheels, "")
    _install(prefix / "lib", [wheel])
    (_site_packages(root, python) / "steward.pth").write_text(_PTH)
    launcher = _packaging("steward").decode().replace("@PYTHON@", python)
    _put(prefix / "bin/steward", launcher.encode(), 0o755)
    _link(root / "usr/bin/steward", f"/{PREFIX}/bin/steward")
    for name in ("libexec", "docs", "packs", "dashboards"):
        if (ROOT / name).is_dir():
            _copy(ROOT / name, prefix / name)
    _put(prefix / "libexec/steward/package-hooks", _packaging("package-hooks"), 0o755)
    for name in ("steward", "steward-controller", "steward-web", "steward-listen"):
        unit = f"{name}.service"
        _put(root / UNITS / unit, _packaging(f"systemd/{unit}"))
    (root / "etc/steward").mkdir(parents=True)


def part(root: Path, name: str, wheels: Wheels) -> None:
    """Lay out the driver of an optional part, and the list of its modules.

    Args:
        root: The directory that stands for ``/``.
        name: The part.
        wheels: What it needs, among others.
    """
    _unpack(root, wheels, name)
    modules = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    listed = "".join(f"/{path}\n" for path in modules)
    _put(root / PREFIX / "libexec/steward/parts" / name, listed.encode())


def documents(root: Path, version: str, epoch: int, *, zsh: str) -> None:
    """Write the man pages, and completion for three shells.

    Args:
        root: Directory that stands for ``/``.
        version: Steward's version.
        epoch: Date of the pages, in seconds since 1970.
        zsh: Directory of completion for the distribution's zsh.
    """
    for name, text in man.pages(version, epoch).items():
        section = name.rpartition(".")[2]
        _put(root / f"usr/share/man/man{section}/{name}.gz", _packed(text))
    command = whole()
    share = root / "usr/share"
    _put(share / "bash-completion/completions/steward", completion.bash(command).encode())
    _put(root / zsh / "_steward", completion.zsh(command).encode())
    _put(share / "fish/vendor_completions.d/steward.fish", completion.fish(command).encode())


def agent(root: Path) -> None:
    """Write the files of a compute node, beside the plugin: one program, and its timer."""
    source = (ROOT / "src/steward/agent/agent.py").read_bytes()
    _put(root / "usr/sbin/steward-agent", source, 0o755)
    for unit in ("steward-agent.service", "steward-agent.timer"):
        text = _packaging(f"systemd/{unit}")
        _put(root / UNITS / unit, text.replace(b"/usr/local/sbin/", b"/usr/sbin/"))
    (root / "etc/steward").mkdir(parents=True)


def plugins(root: Path, sources: Iterable[tuple[str, str]], script: str) -> None:
    """Write the sources of the files that Slurm loads, with the script that builds them.

    Args:
        root: Directory that stands for ``/``.
        sources: Names of files and their texts.
        script: Shell script that builds them.
    """
    for name, text in sources:
        _put(root / "usr/src/steward-plugins" / name, text.encode())
    _put(root / "usr/bin/steward-plugins-build", script.encode(), 0o755)


def papers(root: Path, package: str) -> None:
    """Write licence and changelog, where a distribution looks for them."""
    directory = root / "usr/share/doc" / package
    _put(directory / "copyright", (ROOT / "LICENSE").read_bytes())
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    _put(directory / "changelog.gz", _packed(changes))


def finish(root: Path, epoch: int) -> None:
    """Give every file root's usual mode and one time, so that builds are reproducible."""
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink():
                path.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
            os.utime(path, (epoch, epoch), follow_symlinks=False)
        os.chmod(folder, 0o755)  # noqa: S103 - directories of a package are everybody's to enter
        os.utime(folder, (epoch, epoch))


def _environment(directory: Path, python: str) -> None:
    """Write a virtual environment on the distribution's own interpreter, without running it."""
    (directory / f"lib/python{python}/site-packages").mkdir(parents=True)
    _put(directory / "pyvenv.cfg", _PYVENV.format(python=python).encode())
    _link(directory / f"bin/python{python}", f"/usr/bin/python{python}")
    _link(directory / "bin/python", f"python{python}")


def _site_packages(root: Path, python: str) -> Path:
    return root / PREFIX / f"python{python}/lib/python{python}/site-packages"


def _unpack(root: Path, wheels: Wheels, part: str) -> None:
    """Unpack the wheels of a part, or of Steward where it is ""."""
    of = wheels.parts[part]
    pure = [wheel for wheel in of if wheel.name.endswith("-none-any.whl")]
    _install(root / PREFIX / "lib", pure)
    _install(_site_packages(root, wheels.python), [wheel for wheel in of if wheel not in pure])


def _install(target: Path, wheels: Iterable[Path]) -> None:
    """Unpack wheels, which may be of another Python than this one; their programs are left out."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                first, _, rest = name.partition("/")
                kind, _, inner = rest.partition("/")
                if first.endswith(".data"):
                    if kind in ("purelib", "platlib") and inner:
                        _put(target / inner, archive.read(name))
                elif not name.endswith("/"):
                    _put(target / name, archive.read(name))


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(
        source,
        target,
        symlinks=True,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("__pycache__"),
    )


def _packaging(name: str) -> bytes:
    return (ROOT / "packaging" / name).read_bytes()


def _put(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode(), 9, mtime=0)
