"""Golden outputs of every command, on a site with fixed data.

``tests/golden/commands`` has the command lines, ``tests/golden/GROUP.txt`` the output of a group.
After an intended change ``STEWARD_GOLDEN=write`` writes those files again: read the result of
``git diff``.
"""

import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, Self

import golden_events
import golden_runner
import pytest
from golden_cluster import GID, UIDS, GoldenSite, own_host

import steward

pytestmark = [
    pytest.mark.wide,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="users of its own take root"),
]

GOLDEN: Final = Path(__file__).parents[1] / "golden"
WRITES: Final = os.environ.get("STEWARD_GOLDEN") == "write"
BEFORE: Final = "setup"
"""Group that runs before there are events."""
AS_USER: Final = "user"
"""Group that ada runs, through the daemon."""
ON_TERMINAL: Final = "terminal"
"""Group whose output goes to a terminal."""
HELP: Final = "help"
"""Group of every command's --help."""
OF_THE_MACHINE: Final = {
    "accounting plugins": "processes of plugins, and since when they run",
    "archive consume": "a Kafka broker",
    "archive sinks": "ages, rates and sizes",
    "backup": "sizes, and a name that is made of the time",
    "controller": "runs until it is ended",
    "demo": "a cluster of its own",
    "init": "what Slurm says on this host",
    "journal forget": "a consumer that the configuration has no more",
    "journal list": "numbers of events, which hang on who appended first",
    "journal status": "numbers of events, and since when consumers run",
    "listen": "runs until it is ended",
    "login": "an address",
    "metrics": "figures of processes and disks",
    "plugins build": "a C compiler, and Slurm's headers",
    "plugins check": "Slurm on this host",
    "plugins install": "Slurm on this host",
    "restore": "sizes, and no daemon may run",
    "sandbox run": "a cluster of its own",
    "sandbox status": "a cluster of its own",
    "sandbox up": "a cluster of its own",
    "serve": "runs until it is ended",
    "status": "processes, disks and sizes",
    "web": "runs until it is ended",
}
"""Commands of which only help and failures are stored, with their other inputs or outputs."""
TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)?")
NUMBER: Final = re.compile(r"(?<![\d.])1(?:\d{9}|\d{15})\b")
"""Time in seconds, or in microseconds, since the epoch."""
VARIABLE: Final = [
    (re.compile(r"\b\d{4}d(?: \d\dh)?\b"), "<--age-->"),
    (re.compile(r"\b\d{6,}%"), "<--age->%"),
    (re.compile(r"\bstt_[A-Za-z0-9_-]{43}"), "<secret>"),
    (re.compile(r'"position":\d+'), '"position":<position>'),
    (re.compile(r'"attempts":\d+,"next_at"'), '"attempts":<attempts>,"next_at"'),
    (re.compile(r"\bit took \d+\.\d s"), "it took <time>"),
    (re.compile(r'"differences":\[\],"since":"[^"]+"'), '"differences":[],"since":"<yesterday>"'),
]
"""Values that grow with time, are random, or depend on an order."""
CONTROLS: Final = {
    number: chr(0x2400 + number) for number in range(32) if chr(number) not in "\t\n"
}
"""Control characters and their pictures."""


def groups() -> dict[str, list[str]]:
    """Return the command lines of ``commands`` by their group."""
    found: dict[str, list[str]] = {}
    group: list[str] = []
    for line in (GOLDEN / "commands").read_text().splitlines():
        if line.startswith("["):
            group = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            group.append(line)
    return found


class Runner:
    """Runs command lines on a site.

    Args:
        site: The site; relative paths in command lines are below its files.
    """

    def __init__(self, site: GoldenSite) -> None:
        self._site = site
        self._began = datetime.now(UTC)
        environment = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(site.directory),
            "COLUMNS": "100",
            "LINES": "500",
            "TERM": "xterm-256color",
            "PAGER": "cat",
            "PYTHONUTF8": "1",
        }
        self._process = subprocess.Popen(
            [*own_host(site.files), sys.executable, golden_runner.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=site.files,
            env=environment,
        )

    def __enter__(self) -> Self:
        self._site.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def run_group(self, group: str, lines: Iterable[str]) -> str:
        """Run the lines of a group, each after all effects of the one before."""
        printed = ""
        for line in lines:
            printed += self._run(line, group)
            self._site.settle()
        return printed

    def _run(self, line: str, group: str) -> str:
        """Run a command line; return it with its exit code and output."""
        directory = self._site.directory
        as_user = group == AS_USER
        command, _, stdin = line.partition(" < ")
        streams = {name: str(directory / name) for name in ("stdout", "stderr")}
        place = {"STEWARD_CONFIG": str(directory / "steward.toml")}
        code = self._ask(
            words=shlex.split(command.replace("{site}", str(directory))),
            terminal=group == ON_TERMINAL,
            uid=UIDS["ada"] if as_user else 0,
            gid=GID,
            environment={"STEWARD_SOCKET": self._site.settings.socket} if as_user else place,
            stdin=stdin or os.devnull,
            **streams,
        )
        parts = [f"$ {line}\n[exit {code}]\n"]
        for name, path in streams.items():
            text = Path(path).read_bytes().decode(errors="backslashreplace")
            Path(path).write_bytes(b"")
            if text:
                parts.append(f"[{name}]\n{_ended(self._normal(text))}")
        return "".join([*parts, "\n"])

    def _ask(self, **request: object) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return stdout.readline().strip()

    def _normal(self, text: str) -> str:
        """Return output without the parts that differ in each run."""
        text = text.replace("\r\n", "\n").translate(CONTROLS)
        text = text.replace(str(self._site.directory), "<site>")
        text = text.replace(str(Path(steward.__file__).parent), "<steward>")
        text = text.replace(steward.__version__, "<version>")
        text = TIME.sub(lambda match: self._time(match[0], _moment(match[0])), text)
        text = NUMBER.sub(lambda match: self._time(match[0], _moment_of(match[0])), text)
        for hold, job_id in self._site.holds().items():
            text = text.replace(hold, f"<hold of {job_id}>")
        for pattern, instead in VARIABLE:
            text = pattern.sub(instead, text)
        if text.startswith(("{", "[")):
            # A row of JSON is a separate line.
            text = text.replace("[{", "[\n{").replace("},{", "},\n{")
        return text

    def _time(self, text: str, when: datetime) -> str:
        """Return a placeholder for a time; in tables the width stays."""
        if not self._began - timedelta(minutes=5) < when < self._began + timedelta(days=100):
            return text
        name = "now" if when < self._began + timedelta(minutes=30) else "soon"
        return f"<{name:-^17}>" if len(text) == 19 else f"<{name}>"


def _moment(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)


def _moment_of(number: str) -> datetime:
    return datetime.fromtimestamp(int(number) / (1e6 if len(number) == 16 else 1), UTC)


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n(no newline)\n"


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Return the present output of every group."""
    helps = [" ".join(("steward", *words, "--help")) for words, _ in golden_runner.command_line()]
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="steward-golden-", dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        site = GoldenSite(Path(directory))
        with site.daemon, Runner(site) as runner:
            for group, lines in {**groups(), HELP: helps}.items():
                found[group] = runner.run_group(group, lines)
                if group == BEFORE:
                    golden_events.feed(site)
        site.ledger.close()
    return found


@pytest.mark.parametrize("group", [*groups(), HELP])
def test_commands_print_what_they_printed(group: str, printed: dict[str, str]) -> None:
    path = GOLDEN / f"{group}.txt"
    if WRITES:
        path.write_text(printed[group])
    before = path.read_text().splitlines(keepends=True)
    now = printed[group].splitlines(keepends=True)
    difference = "".join(difflib.unified_diff(before, now, path.name, "now"))
    if difference:
        pytest.fail(difference, pytrace=False)


def test_every_command_is_run() -> None:
    lines = [line for group in groups().values() for line in group]
    assert _called(lines) == _leaves()


def test_of_every_command_that_is_not_the_machines_success_is_kept() -> None:
    kept = "".join((GOLDEN / f"{group}.txt").read_text() for group in groups())
    well = _called(re.findall(r"^\$ (.*)\n\[exit 0\]$", kept, re.MULTILINE))
    assert _leaves() - well == set(OF_THE_MACHINE)


def test_nothing_is_kept_of_what_is_not_run() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*groups(), HELP}


def _leaves() -> set[str]:
    """Return every command, without groups."""
    found = golden_runner.command_line()
    return {" ".join(words) for words, command in found if not hasattr(command, "list_commands")}


def _called(lines: Iterable[str]) -> set[str]:
    """Return the commands that command lines call."""
    words = [shlex.split(line)[1:] for line in lines]
    starts = {" ".join(line[:count]) for line in words for count in range(1, 4)}
    return starts & _leaves()
