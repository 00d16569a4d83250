"""A sandbox keeps its users while a program replaces the host's /etc/passwd."""

import ctypes
import os
import select
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from steward.sandbox import layout, namespaces
from steward.sandbox.init_process import EtcFiles

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root takes mount namespaces here")
WAIT_MS = 60_000


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def private() -> None:
    namespaces.unshare(namespaces.CLONE_NEWNS)
    namespaces.mount("none", "/", flags=namespaces.MS_REC | namespaces.MS_PRIVATE)


def wait_for(pipe: tuple[int, int]) -> None:
    assert select.select([pipe[0]], [], [], WAIT_MS / 1000)[0]
    os.read(pipe[0], 1)


def test_users_stay_when_the_machine_replaces_its_file(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.mkdir()
    machine = tmp_path / "etc"
    machine.mkdir()
    for name in ("passwd", "group", "hosts"):
        shutil.copy(f"/etc/{name}", machine / name)
        (ours / name).write_text(f"{name} of the sandbox\n")
    up, replaced = os.pipe(), os.pipe()

    def inside() -> None:
        private()
        etc = EtcFiles(str(ours))
        etc.bind_below("")
        poll = select.poll()
        poll.register(etc.changes, select.POLLPRI)
        while poll.poll(0):
            pass  # of what was bound just now
        os.write(up[1], b".")
        wait_for(replaced)
        assert poll.poll(WAIT_MS), "nothing told of the mount that went away"
        assert etc.restore_binds()
        for name in ("passwd", "group", "hosts"):
            assert Path("/etc", name).read_text() == f"{name} of the sandbox\n"

    def outside() -> None:
        # The machine of this test: nobody else's /etc is touched.
        private()
        namespaces.mount(str(machine), "/etc", flags=namespaces.MS_BIND)
        sandbox = forked(inside)
        wait_for(up)
        fresh = Path("/etc/passwd+")
        shutil.copy("/etc/passwd", fresh)
        fresh.rename("/etc/passwd")
        os.write(replaced[1], b".")
        assert ended(sandbox) == 0
        assert "of the sandbox" not in Path("/etc/passwd").read_text()

    assert ended(forked(outside)) == 0


def test_a_file_that_is_away_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    (tmp_path / "root/etc").mkdir(parents=True)
    for name in ("passwd", "group", "hosts"):
        (tmp_path / "ours" / name).write_text("ours\n")
        (tmp_path / "root/etc" / name).write_text("theirs\n")

    def inside() -> None:
        private()
        etc = EtcFiles(str(tmp_path / "ours"))
        etc.bind_below(str(tmp_path / "root"))
        passwd = tmp_path / "root/etc/passwd"
        assert ctypes.CDLL(None).umount(os.fsencode(passwd)) == 0
        passwd.unlink()
        assert not etc.restore_binds()
        passwd.write_text("theirs again\n")
        assert etc.restore_binds()
        assert passwd.read_text() == "ours\n"

    assert ended(forked(inside)) == 0


def test_another_etc_that_is_mounted_in_the_sandbox_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    for etc in ("root/etc", "other"):
        (tmp_path / etc).mkdir(parents=True)
        (tmp_path / etc / "passwd").write_text(f"of {etc}\n")
    (tmp_path / "ours" / "passwd").write_text("ours\n")

    def inside() -> None:
        private()
        etc = EtcFiles(str(tmp_path / "ours"))
        etc.bind_below(str(tmp_path / "root"))
        place = tmp_path / "root/etc"
        assert (place / "passwd").read_text() == "ours\n"
        namespaces.mount(str(tmp_path / "other"), str(place), flags=namespaces.MS_BIND)
        assert etc.restore_binds()
        assert (place / "passwd").read_text() == "of other\n"

    assert ended(forked(inside)) == 0


def test_a_directory_where_a_sandbox_is_up_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "sandbox"
    monkeypatch.setattr(layout, "get_default_directory", lambda: str(usual))
    assert layout.find_free_directory() == str(usual)
    for name in (usual, tmp_path / "sandbox-2"):
        (name / "keeper").mkdir(parents=True)
    first = layout.lock_directory(str(usual))
    assert first is not None
    assert layout.find_free_directory() == f"{usual}-2"
    second = layout.lock_directory(f"{usual}-2")
    assert second is not None
    assert layout.find_free_directory() == f"{usual}-3"
    os.close(first)
    assert layout.find_free_directory() == str(usual)
    os.close(second)
