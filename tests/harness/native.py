"""Native plugins in test programs: the SPANK plugin, and slurmctld's job_submit plugin."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from steward.admin.plugins import build
from steward.admin.plugins.build import LIBRARY, SOURCES, SUBMIT_LIBRARY
from steward.bank.estimate.request_limits import LONGEST_TEXT, LONGEST_TEXTS

TESTS = Path(__file__).parents[1]
NATIVE = Path(str(resources.files("steward.native")))
CC = shutil.which("cc") or ""
HEADERS = "/usr/include"

needs_compiler = pytest.mark.skipif(
    not CC or not all(Path(HEADERS, "slurm", name).exists() for name in ("slurm.h", "spank.h")),
    reason="needs a C compiler and Slurm's headers",
)

Run = Callable[..., str]


def compile_program(target: Path, sources: Iterable[str], *flags: str) -> Path:
    """Compile a harness of tests/native with the native sources that it runs."""
    words = [CC, "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", *flags, f"-I{NATIVE}"]
    files = [str(TESTS / "native" / f"{target.name}.c"), *(str(NATIVE / name) for name in sources)]
    words += ["-rdynamic", "-pthread", "-o", str(target), *files]
    subprocess.run(words, check=True, timeout=100)
    return target


def compile_harness(directory: Path, *flags: str) -> Path:
    """Compile the SPANK plugin with a harness that plays slurmstepd."""
    wraps = ("-Wl,--wrap=open", "-Wl,--wrap=fopen")
    return compile_program(directory / "spank_harness", SOURCES[LIBRARY], *flags, *wraps)


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_harness(
        tmp_path_factory.mktemp("asan"),
        *("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    )


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_harness(tmp_path_factory.mktemp("plain"), "-O2")


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    directory = tmp_path / "spool"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture
def run(sanitized: Path, spool: Path) -> Run:
    """Function that runs the SPANK harness with orders and returns its output."""

    def call(*orders: str, program: str = "", title: str = "slurmstepd: [5.0]") -> str:
        lines = [f"node {b'n1'.hex()}", "item job 5", "item uid 1001", "item gid 1002", *orders]
        text = "".join(line.replace("SPOOL", f"spool={spool}") + "\n" for line in lines)
        result = subprocess.run(
            [title],
            executable=program or str(sanitized),
            input=text,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr == ""
        return result.stdout

    return call


def lines_of(spool: Path, node: str = "n1") -> list[dict[str, Any]]:
    data = (spool / f"{node}.log").read_bytes()
    assert data.endswith(b"\n")
    lines = data.splitlines(keepends=True)
    assert all(len(line) <= 4096 for line in lines)
    return [json.loads(line) for line in lines if line.strip()]


VECTORS = json.loads((TESTS / "unit" / "gate_vectors.json").read_text())
SENT_TEXTS = {
    name: longest
    for name, longest in LONGEST_TEXTS.items()
    if name not in ("reservation", "features")
} | {"admin_comment": LONGEST_TEXT}
"""Text fields of a request, each with its maximum length in bytes."""
TEXTS = ("say", "admin_comment", "qos", "partition", "account")


def raw(text: Any) -> bytes:
    """Return the bytes of a text of the vectors, which may be invalid UTF-8."""
    return bytes.fromhex(text["hex"]) if isinstance(text, dict) else str(text).encode()


def compile_gate(directory: Path, *flags: str) -> Path:
    """Compile the job_submit plugin with a harness that plays slurmctld."""
    flags = (*flags, f"-I{HEADERS}", *build.list_header_flags(HEADERS))
    # The harness includes the first source.
    return compile_program(directory / "gate_harness", SOURCES[SUBMIT_LIBRARY][1:], *flags)


def run_gate(program: Path, orders: Iterable[str]) -> list[str]:
    """Run the job_submit harness with orders; return its output lines."""
    done = subprocess.run(
        [program],
        input="".join(f"{order}\n" for order in orders).encode(),
        capture_output=True,
        timeout=200,
        check=False,
    )
    errors = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, errors[-3000:]
    assert errors == ""
    # Split bytes: str.splitlines would also split at U+0085 and U+2028.
    return [line.decode("utf-8", "replace") for line in done.stdout.splitlines()]


def hexed(data: bytes) -> str:
    return data.hex() or "-"


def setting(job: dict[str, Any]) -> list[str]:
    """Return the orders that set the job of a vector."""
    orders = ["new"]
    for field, value in job.items():
        if field == "min_mem_per_node":
            orders.append(f"set pn_min_memory {value}")
        elif field == "min_mem_per_cpu":
            orders.append(f"set pn_min_memory {value | 1 << 63}")
        elif isinstance(value, int):
            orders.append(f"set {field} {value}")
        else:
            orders.append(f"set {field} {hexed(raw(value))}")
    return orders


def answer_of(line: str) -> dict[str, Any] | None:
    """Parse the harness's line about a reply; None if it rejected the reply."""
    if line == "none":
        return None
    ok, *texts = line.split()
    reply: dict[str, Any] = {"ok": ok == "1"}
    for name, text in zip(TEXTS, texts, strict=True):
        if text != "-":
            reply[name] = bytes.fromhex(text)
    return reply


def expected(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the reply that a vector expects, in the form of :func:`answer_of`."""
    if answer is None:
        return None
    return {name: raw(text) if name in TEXTS else text for name, text in answer.items()}


def spoilt_answers(seed: int, count: int) -> list[bytes]:
    """Return replies of the vectors with random bytes removed and inserted."""
    chance = random.Random(seed)
    good = [raw(vector.get("text", vector)) for vector in VECTORS["responses"]]
    put = (b'"', b"\\", b"\\u", b"{", b"[", b",", b":", b"1", b"\n", b"\xff", b"true")
    spoilt = []
    for _ in range(count):
        data = bytearray(chance.choice(good))
        for _ in range(chance.randint(0, 6)):
            at = chance.randint(0, len(data))
            if chance.random() < 0.5:
                data[at : at + chance.randint(0, 3)] = b""
            else:
                data[at:at] = chance.choice(put)
        spoilt.append(bytes(data))
    return spoilt
