import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from steward.core.files import find_network_type


class Mounts:
    """A scripted list of mounts, and a record of the symbolic links that were read."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._lines = ["27 1 254:0 / / rw,relatime - ext4 /dev/vda rw"]
        self.touched: list[str] = []
        really = os.readlink

        def readlink(name: str) -> str:
            self.touched.append(name)
            return really(name)

        monkeypatch.setattr(os, "readlink", readlink)
        self._write()

    def add(self, point: str, type_: str, optional: str = "shared:7 master:1 ") -> None:
        self._lines.append(f"40 27 0:50 / {point} rw,relatime {optional}- {type_} server:/x rw")
        self._write()

    def kind(self, path: str) -> str:
        return find_network_type(path, mounts=str(self._path))

    def _write(self) -> None:
        self._path.write_text("\n".join(self._lines) + "\n")


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mounts:
    return Mounts(tmp_path / "mountinfo", monkeypatch)


@pytest.mark.parametrize(
    ("type_", "kind"),
    [
        ("nfs", "NFS"),
        ("nfs4", "NFS"),
        ("lustre", "Lustre"),
        ("fuse.sshfs", "FUSE"),
        ("autofs", "autofs"),
        ("xfs", ""),
        ("fuseblk", ""),
        ("nfsd", ""),
    ],
)
def test_a_mount_tells_by_its_type(mounts: Mounts, type_: str, kind: str) -> None:
    mounts.add("/archive", type_)
    assert mounts.kind("/archive/.incoming") == kind


def test_what_lies_on_a_network_file_system_is_never_touched(mounts: Mounts) -> None:
    mounts.add("/srv/archive", "nfs4", optional="")
    assert mounts.kind("/srv/archive") == "NFS"
    assert mounts.kind("/srv/archive/a/../b//.incoming") == "NFS"
    assert set(mounts.touched) <= {"/srv"}


def test_the_longest_mount_point_decides(mounts: Mounts) -> None:
    mounts.add("/data", "nfs")
    mounts.add("/data/local", "xfs")
    assert mounts.kind("/data/locally") == "NFS"
    assert mounts.kind("/data") == "NFS"
    assert mounts.kind("/database") == ""


def test_of_two_mounts_at_one_point_the_later_is_on_top(mounts: Mounts) -> None:
    mounts.add("/data", "autofs")
    mounts.add("/data", "ext4")
    assert mounts.kind("/data/x") == ""


def test_a_link_is_followed_to_the_mount_and_no_further(mounts: Mounts, tmp_path: Path) -> None:
    mounts.add(f"{tmp_path}/far", "nfs")
    (tmp_path / "far").mkdir()
    os.symlink(tmp_path, tmp_path / "far" / "back")
    os.symlink("sub/../far", tmp_path / "link")
    (tmp_path / "sub").mkdir()
    assert mounts.kind(f"{tmp_path}/link/back/x") == "NFS"
    assert not [name for name in mounts.touched if name.startswith(f"{tmp_path}/far")]


def test_links_that_go_round_end(mounts: Mounts, tmp_path: Path) -> None:
    os.symlink("b", tmp_path / "a")
    os.symlink("a", tmp_path / "b")
    assert mounts.kind(f"{tmp_path}/a/x") == ""


def test_a_mount_point_may_hold_blanks(mounts: Mounts) -> None:
    mounts.add(r"/my\040archive\134x", "nfs")
    assert mounts.kind("/my archive\\x/y") == "NFS"


def test_the_kernels_own_list_is_understood(tmp_path: Path) -> None:
    assert find_network_type("/proc/self") == ""
    assert find_network_type(str(tmp_path / "is" / "not" / "there")) == ""


_MOUNT_AND_UNMOUNT = """
import os, subprocess, sys
from steward.core import files

def show():
    print(files.find_network_type(path + "/archive") or "local", flush=True)

path = sys.argv[1]
files._NETWORK_TYPES["ramfs"] = "network"
show()
subprocess.run(["mount", "-t", "ramfs", "none", path], check=True)
child = os.fork()
if not child:
    show()
    os._exit(0)
os.waitpid(child, 0)
show()
subprocess.run(["umount", path], check=True)
show()
"""


def test_a_later_mount_is_seen_by_a_process_and_its_child(tmp_path: Path) -> None:
    shown = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--mount"),
            *(sys.executable, "-c", _MOUNT_AND_UNMOUNT, str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert shown.stdout.split() == ["local", "network", "network", "local"]


def test_threads_may_ask_at_the_same_time(tmp_path: Path) -> None:
    until = time.monotonic() + 0.2

    def ask_often(_number: int) -> set[str]:
        kinds = set()
        while time.monotonic() < until:
            kinds.add(find_network_type(str(tmp_path)))
        return kinds

    with ThreadPoolExecutor(4) as threads:
        assert set().union(*threads.map(ask_often, range(4))) == {find_network_type(str(tmp_path))}
