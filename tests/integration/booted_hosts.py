"""Bare Debian system that systemd boots in a container, and docs/install.md followed on it."""

import contextlib
import fcntl
import os
import shlex
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest
from bare_roots import ENVIRONMENT, Bare
from install_page import HOST, blocks, exit_code

_BOOT_S: Final = 180
_RUN_S: Final = 600
# systemd-nspawn of a second view of the system boots it; the test's host needs none.
_ENTER: Final = """
mkdir -p "$2/tools.upper" "$2/tools.work" "$2/tools"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
mount -t overlay overlay -o "lowerdir=$1,upperdir=$2/tools.upper,workdir=$2/tools.work" "$2/tools"
mkdir -p "$2/tools/machine" "$2/tools/packages"
mount --bind "$2/root" "$2/tools/machine"
mount --bind "$3" "$2/tools/packages"
mount -t proc proc "$2/tools/proc"
mount --rbind /dev "$2/tools/dev"
mount --rbind /sys "$2/tools/sys"
mount -t tmpfs tmpfs "$2/tools/run"
exec chroot "$2/tools" systemd-nspawn --quiet --directory=/machine --machine=box --register=no \
    --keep-unit --private-network --resolv-conf=off --timezone=off --bind-ro=/packages --boot
"""
_UNIT: Final = """
[Unit]
After=basic.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c '/followed >/followed.log 2>&1; echo $? >/followed.code; systemctl poweroff'
"""

_CLUSTER: Final = r"""
until_true() {
    tries=0
    until eval "$1"; do
        tries=$((tries + 1))
        if [ $tries -gt 600 ]; then
            echo "never: $1"
            journalctl --no-pager -o cat | tail -n 60
            exit 1
        fi
        sleep 0.2
    done
}
# Slurm looks up a name by an address outside 127.0.0.0/8.
hostname box
ip link set lo up
ip address add 10.99.0.1/32 dev lo
printf '127.0.0.1 localhost\n10.99.0.1 box steward.example.org\n' >/etc/hosts
useradd --create-home ada
install -d -o slurm /var/lib/slurm /var/lib/slurm/ctld /var/log/slurm
install -d /var/lib/slurm/slurmd
cat >/etc/slurm/slurm.conf <<END
ClusterName=box
SlurmctldHost=box
SlurmUser=slurm
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
StateSaveLocation=/var/lib/slurm/ctld
SlurmdSpoolDir=/var/lib/slurm/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
NodeName=box CPUs=2 RealMemory=100
PartitionName=main Nodes=box Default=YES
END
systemctl restart munge slurmctld slurmd
"""
_IDLE: Final = "until_true 'sinfo --noheader --format %t | grep -q idle'\n"
_JOB: Final = f"""
{_IDLE}
su ada -c "cd && sbatch --account=physics --time=5 --wrap 'srun sleep 2'"
until_true 'steward sacct -n -P -X -j 1 -o state | grep -q COMPLETED'
until_true 'systemctl start steward-agent && steward sacct -n -P -j 1 -o jobid | grep -q 1.0'
until_true 'steward bank explain 1 >/dev/null 2>&1'
"""
_DOCTOR: Final = "steward doctor\n"


def follow_page(bare: Bare, looks: str) -> str:
    """Boot a system with a cluster of one host, and type the blocks of docs/install.md on it.

    Args:
        bare: The system; its ``/packages`` has the packages.
        looks: Script for sh that runs before Steward is removed.
    """
    *steps, removal = [
        (place, text)
        for place, _, text in blocks()
        if place and not place.startswith("not followed")
    ]
    assert removal[0] == "at the end"
    script = [_CLUSTER, _IDLE, *(_typed(*step) for step in steps), _IDLE, looks]
    return _boot(
        bare, "\n".join([*script, "sed -i /lua$/d /etc/slurm/slurm.conf", _typed(*removal)])
    )


def _typed(place: str, text: str) -> str:
    """Convert a block to the lines for sh that a reader would type."""
    where, *rest = place.split(", ")
    if where == "in slurm.conf":
        return f"cat >>/etc/slurm/slurm.conf <<'CONF'\n{text}CONF"
    if where == "in plugstack.conf":
        return f"cat >>/etc/slurm/plugstack.conf <<'CONF'\n{text}CONF"
    assert where in (*HOST, "at the end"), where
    # This host has no slurmdbd: the account is made as the page says for such a site.
    text = text.replace("bank import sacctmgr", "bank account create physics")
    code = exit_code(place)
    waits = code == 0 and text.endswith(_DOCTOR)
    typed = f"cd /packages\n{text.removesuffix(_DOCTOR) if waits else text}"
    lines = [_JOB] if "after a job" in rest else []
    lines.append(f"code=0; sh -euxc {shlex.quote(typed)} || code=$?; test $code = {code}")
    if waits:
        lines.append(f"until_true '{_DOCTOR.strip()} >/doctor'; cat /doctor")
    return "\n".join(lines)


def _boot(bare: Bare, script: str) -> str:
    """Boot a system, run a script for sh on it, and return the script's output."""
    units = "/etc/systemd/system"
    wanted = f"{units}/multi-user.target.wants"
    bare.sh(f"mkdir -p {wanted} && ln -s ../followed.service {wanted}/")
    bare.path(f"{units}/followed.service").write_text(_UNIT)
    path = bare.path("/followed")
    path.write_text(f"#!/bin/sh\ntouch /booted\nset -eux\n{script}")
    path.chmod(0o755)
    log, code = bare.path("/followed.log"), bare.path("/followed.code")
    # Two at a time would share systemd-nspawn's control groups.
    with (
        open(f"{bare.mounts[0]}.booted", "w") as lock,
        open(bare.path("/boot.log"), "wb") as console,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            [
                *("unshare", "--mount", "--pid", "--fork", "--kill-child"),
                *("sh", "-ec", _ENTER, "sh", *bare.mounts),
            ],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        )
        try:
            until = time.monotonic() + _BOOT_S
            while process.poll() is None and not bare.path("/booted").exists():
                if time.monotonic() > until:
                    break
                time.sleep(0.2)
            if not bare.path("/booted").exists():
                pytest.skip(f"no systemd boots here: {_end_of(bare.path('/boot.log'))}")
            process.wait(_RUN_S)
        finally:
            process.kill()
            process.wait()
            _remove_cgroups()
    printed = log.read_text(errors="replace")
    assert code.exists(), printed + _end_of(bare.path("/boot.log"))
    assert code.read_text() == "0\n", printed
    return printed


def _remove_cgroups() -> None:
    """Remove the empty control groups that systemd-nspawn leaves behind."""
    for top in (Path("/sys/fs/cgroup") / name for name in ("", "systemd", "unified")):
        for name in ("payload", "supervisor"):
            for folder, _, _ in os.walk(top / name, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)


def _end_of(path: Path) -> str:
    return shlex.quote(path.read_text(errors="replace")[-2000:])
