"""Sources of the files that Slurm loads, and a script that compiles them without Steward."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from steward.admin.plugins.build import (
    COMPILER_FLAGS,
    DEFAULT_LIBDIR,
    HEADER_DIRECTORIES,
    HOOKS,
    LIBRARY,
    SOURCES,
    build_version_script,
    list_sources,
    read_source,
)

DIRECTORY: Final = "usr/src/steward-plugins"
_LUA: Final = ("job_submit.lua", "jobcomp.lua", "steward_gate.lua", "steward_wire.lua")
_TEMPLATE: Final = Path(__file__).parent.parent.parent / "packaging" / "steward-plugins-build"


def files() -> Iterator[tuple[str, str]]:
    """Yield names and texts of the files that the host compiles or calls."""
    for name in (*list_sources(), *_LUA):
        yield name, read_source(name)
    for library in HOOKS:
        yield f"{library}.map", build_version_script(library)


def script() -> str:
    """Return the script that compiles them, as ``steward plugins build`` does."""
    compiled = [f"compile {name} {' '.join(SOURCES[name])}" for name in HOOKS]
    replaced = {
        "@DIRECTORY@": f"/{DIRECTORY}",
        "@HEADERS@": " ".join(HEADER_DIRECTORIES),
        "@LIBDIR@": DEFAULT_LIBDIR,
        "@FLAGS@": " ".join(COMPILER_FLAGS),
        "@LIBRARIES@": " ".join(HOOKS),
        "@LIBRARY@": LIBRARY,
        "@COMPILE@": "\n".join(compiled),
    }
    text = _TEMPLATE.read_text(encoding="utf-8")
    for mark, value in replaced.items():
        text = text.replace(mark, value)
    return text
