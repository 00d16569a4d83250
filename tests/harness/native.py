"""Native parts as programs: the SPANK plugin in a slurmstepd, slurmctld's plugin in a slurmctld."""

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from steward.admin.plugins import building
from steward.admin.plugins.building import LIBRARY, SOURCES, SUBMIT_LIBRARY
from steward.bank.estimate.bounds import LONGEST, LONGEST_TEXTS

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
    """A harness of tests/native and the native parts that it runs, as one program."""
    words = [CC, "-std=gnu11", "-g", "-Wall", "-Wextra", "-Werror", *flags, f"-I{NATIVE}"]
    files = [str(TESTS / "native" / f"{target.name}.c"), *(str(NATIVE / one) for one in sources)]
    words += ["-rdynamic", "-pthread", "-o", str(target), *files]
    subprocess.run(words, check=True, timeout=100)
    return target


def compile_harness(directory: Path, *flags: str) -> Path:
    """The SPANK plugin in a slurmstepd."""
    wraps = ("-Wl,--wrap=open", "-Wl,--wrap=fopen")
    return compile_program(directory / "harness", SOURCES[LIBRARY], *flags, *wraps)


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
    """Give a slurmstepd orders; returns what it says."""

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
    found = data.splitlines(keepends=True)
    assert all(len(line) <= 4096 for line in found)
    return [json.loads(line) for line in found if line.strip()]


VECTORS = json.loads((TESTS / "unit" / "gate_vectors.json").read_text())
SENT_TEXTS = {
    name: longest
    for name, longest in LONGEST_TEXTS.items()
    if name not in ("reservation", "features")
} | {"admin_comment": LONGEST}
"""Texts that a question has, with how much of each is sent at the most, in bytes."""
TEXTS = ("say", "admin_comment", "qos", "partition", "account")


def raw(text: Any) -> bytes:
    """A text of the vectors: itself, or bytes that are no UTF-8."""
    return bytes.fromhex(text["hex"]) if isinstance(text, dict) else str(text).encode()


def compile_gate(directory: Path, *flags: str) -> Path:
    """slurmctld's plugin in a slurmctld."""
    flags = (*flags, f"-I{HEADERS}", *building.defines(HEADERS))
    # The harness holds the first of them.
    return compile_program(directory / "gate_harness", SOURCES[SUBMIT_LIBRARY][1:], *flags)


def run_gate(program: Path, orders: Iterable[str]) -> list[str]:
    """Give it orders; returns the lines that it says."""
    done = subprocess.run(
        [program],
        input="".join(f"{order}\n" for order in orders).encode(),
        capture_output=True,
        timeout=200,
        check=False,
    )
    said = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, said[-3000:]
    assert said == ""
    # Of bytes: a text would be cut at U+0085 and U+2028, too, which stand in lines as they are.
    return [line.decode("utf-8", "replace") for line in done.stdout.splitlines()]


def hexed(data: bytes) -> str:
    return data.hex() or "-"


def setting(job: dict[str, Any]) -> list[str]:
    """The orders that describe a job, from the fields of a vector."""
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
    """What the harness says of an answer that it read."""
    if line == "none":
        return None
    ok, *texts = line.split()
    found: dict[str, Any] = {"ok": ok == "1"}
    for name, text in zip(TEXTS, texts, strict=True):
        if text != "-":
            found[name] = bytes.fromhex(text)
    return found


def expected(answer: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a vector says should be read."""
    if answer is None:
        return None
    return {name: raw(text) if name in TEXTS else text for name, text in answer.items()}


def spoilt_answers(seed: int, count: int) -> list[bytes]:
    """Answers of the vectors, with bytes taken out and put in."""
    chance = random.Random(seed)
    good = [raw(one.get("text", one)) for one in VECTORS["responses"]]
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
