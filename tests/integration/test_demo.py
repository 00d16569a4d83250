"""The demo, started as a person would, and failures of its checks."""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_code_blocks import code
from job_submission import PATIENCE, wait_until

import write_docs
from steward.core.drivers import DRIVERS
from steward.demo import DemoError, DemoSite, checks
from steward.demo.jobs import PASSWORD
from steward.sandbox import Sandbox

STEWARD = os.path.join(os.path.dirname(sys.executable), "steward")
pytestmark = pytest.mark.timeout(PATIENCE * 180)


@pytest.fixture
def directory() -> Iterator[Path]:
    """Make a directory for a sandbox: pytest's paths are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="steward-") as top:
        yield Path(top) / "demo"


def demo(directory: Path, *options: str, slurm: str) -> "subprocess.Popen[str]":
    words = [STEWARD, "demo", "--dir", str(directory), *options]
    if slurm:
        words += ["--slurm", slurm]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def processes_of(directory: Path) -> list[str]:
    """Return command lines of processes with a directory in their arguments or environment."""
    wanted, found = os.fsencode(directory), []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or entry.name == str(os.getpid()):
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            if wanted in words + (entry / "environ").read_bytes():
                found.append(words.replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or belongs to another user
    return found


@pytest.mark.matrix
def test_the_demo_ends_by_itself_and_leaves_nothing(
    directory: Path, slurm_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look takes what Steward runs with, and no driver of an optional part.
    blocked = directory.parent / "blocked"
    blocked.mkdir()
    lines = [f"sys.modules[{driver.module!r}] = None\n" for driver in DRIVERS]
    (blocked / "sitecustomize.py").write_text("".join(["import sys\n", *lines]))
    monkeypatch.setenv("PYTHONPATH", str(blocked))
    process = demo(directory, slurm=slurm_version)
    try:
        output, _ = process.communicate(timeout=PATIENCE * 150)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    assert "FAILED " not in output.replace("FAILED   ", "")  # a job's state stands in a column
    assert output.count("   ok  ") >= 8
    assert "[redacted by steward]" in output
    assert not directory.exists()
    assert processes_of(directory) == []


@pytest.mark.long
def test_a_kept_demo_goes_on_and_ends_when_told(directory: Path, slurm_version: str) -> None:
    process = demo(directory, "--keep", slurm=slurm_version)
    try:
        output, _ = process.communicate(timeout=PATIENCE * 150)
        assert process.returncode == 0, output
        sandbox = Sandbox.load(str(directory))
        assert sandbox.is_up()
        user = next(iter(sandbox.users))
        asked = sandbox.run(
            ["steward", "archive", "list", "--parsable2"],
            user=user,
            env={"STEWARD_SOCKET": f"{directory}/steward/steward.sock"},
        )
        assert "|relax|" in asked.stdout
        # Every command that it ends with is one that can be typed as it stands.
        _, _, typed = output.partition("== Next steps")
        commands = re.findall(r"(?m)^  (\S*steward .* --config .*)$", typed)
        assert len(commands) >= 3
        for command in commands:
            words = shlex.split(command)
            done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, (command, done.stderr)
        follow_get_started(directory)
    finally:
        subprocess.run([STEWARD, "sandbox", "down", "--dir", str(directory)], check=True)
    assert processes_of(directory) == []
    assert not directory.exists()


def follow_get_started(directory: Path) -> None:
    """Type the page's commands in the terminals that it opens, in a kept demo."""
    up, ada, operator, down = code("get-started.md", "sh")
    assert (up, down) == ("make demo KEEP=1\n", ".venv/bin/steward sandbox down\n")
    terminals = {"ada": ada, "operator": operator}

    def type_command(who: str, command: str) -> tuple[int, str]:
        opened, *typed = terminals[who].splitlines()
        words = shlex.split(opened.replace("/tmp/steward-sandbox-0", str(directory)))
        words[:3] = [STEWARD, "sandbox", "run", "--dir", str(directory)]
        lines = "\n".join([*typed, command])

        def run() -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                words, input=lines, capture_output=True, text=True, timeout=60, check=False
            )

        done = run()
        # Charges and reports arrive seconds after a job's end.
        deadline_s = time.monotonic() + PATIENCE * 30
        while done.returncode and command.startswith("steward") and time.monotonic() < deadline_s:
            time.sleep(1)
            done = run()
        return done.returncode, done.stdout + done.stderr

    page = Path(write_docs.__file__).parents[1] / "docs" / "get-started.md"
    text = page.read_text(encoding="utf-8")
    written = write_docs.refreshed(text, type_command)
    assert "Job 13 of ada was charged" in written
    assert "sbatch: error: Steward: insufficient funds: this job may cost up to" in written


def test_ctrl_c_ends_all_of_it(directory: Path, slurm_version: str) -> None:
    process = demo(directory, slurm=slurm_version)
    socket = directory / "steward" / "steward.sock"
    wait_until(lambda: socket.exists() or process.poll() is not None)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE * 60)
    assert process.returncode == 130, output
    assert processes_of(directory) == []
    assert not directory.exists()


@pytest.fixture(scope="module")
def site(slurm_version: str) -> Iterator[DemoSite]:
    with write_docs.open_site(slurm_version=slurm_version) as site:
        yield site


def shape(text: str) -> list[str]:
    """Return a page without the parts that differ by place and time.

    Jobs submitted in the same second may be listed in any order. This Slurm shows requested
    resources only for a pending job, which not every poll meets. Bars, the line of a job's times,
    and units of short times depend on the host's speed.
    """
    text = re.sub(r"(?m)^Requested  .*\n", "", text)
    text = re.sub(r"(?m)^( *From) .*$", r"\1 HOST", text)
    text = re.sub(r"(?m)^  \|.*\|\n  [-=] .*\n", "", text)
    text = re.sub(r"\[[#-]+\]", "BAR", text)
    text = re.sub(r"\b(?=[a-f]*[0-9])[0-9a-f]{11,64}\b|[0-9]+(\.[0-9]+)?", "#", text)
    text = re.sub(r"# (ms|us)\b", "# s", text)
    return sorted(" ".join(line.split()) for line in text.splitlines())


@pytest.mark.parametrize("page", write_docs.pages(), ids=lambda page: page.name)
def test_output_in_the_docs_is_what_comes_out(site: DemoSite, page: Path) -> None:
    if len(site.users) < 2 or not site.sandbox.plan.slurm_version.startswith("22.05"):
        pytest.skip("the pages show what root sees with Debian 12's Slurm")
    site.wait_for_jobs()
    text = page.read_text(encoding="utf-8")
    assert shape(write_docs.refreshed(text, write_docs.running_in(site))) == shape(text)


def failing(site: DemoSite) -> set[str]:
    """Return the first words of the checks that fail."""
    found = set()
    for promise, find_out in checks.list_checks(site, site.wait_for_jobs()):
        try:
            find_out()
        except DemoError:
            found.add(" ".join(promise.split()[:2]))
    return found


@pytest.mark.long
def test_each_spoilt_thing_is_found(site: DemoSite) -> None:
    assert failing(site) == set()

    path = Path(checks.get_script_path(site, site.get_job("relax")))
    good = path.read_bytes()
    path.write_bytes(good.replace(b"step", b"stop"))
    assert failing(site) == {"every archived", "every checksum"}
    path.write_bytes(good)

    leak = Path(site.state_dir) / "leak"
    leak.write_bytes(b"x" * 100_000 + PASSWORD.encode())
    assert failing(site) == {"no file"}
    leak.unlink()

    with open(site.log_path, "a", encoding="utf-8") as log:
        log.write('2026-01-01T00:00:00.000Z error steward msg="invented"\n')
    assert failing(site) == {"the daemon"}


def test_a_daemon_that_cannot_start_is_reported_with_its_words(
    slurm_version: str,
) -> None:
    with DemoSite.up(slurm_version=slurm_version) as site:
        os.mkdir(os.path.dirname(site.state_dir))
        Path(site.state_dir).write_text("in the way")
        with pytest.raises(DemoError, match="state_dir"):
            site.start_daemon()
