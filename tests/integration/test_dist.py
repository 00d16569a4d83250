"""Packages that `make dist` builds: installed without a network, run, and removed."""

import hashlib
import os
import re
import struct
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from bare_roots import Bare, read_index
from booted_hosts import follow_page
from install_page import blocks

from packages.wheels import PARTS as PARTS_LOCK
from packages.wheels import PYTHONS, RUNTIME
from steward.sandbox.slurm_install import get_cache_directory

ROOT = Path(__file__).parent.parent.parent
PARTS = ("kafka", "parquet", "postgresql")
LIBDIR = "/usr/local/lib/steward"
PLUGSTACK = "/etc/slurm/plugstack.conf.d/steward.conf"
SLURM_CONF = "ClusterName=box\nSlurmctldHost=localhost\nNodeName=n1\nPartitionName=p Nodes=n1"
SLURM_DEVEL = """
Name: slurm-devel
Version: 22.05.9
Release: 1
Summary: stands for the package of that name
License: none
BuildArch: noarch
%description
%files
"""
SCRIPT = b"#!/bin/sh\n#SBATCH --time=5\nhostname\n"
CONFIG = """
[cluster.box]
slurm = false
spool = "/srv/spool"

[archive.sink.files]
path = "/srv/archive"

[web]
listen = "127.0.0.1:8290"
"""
# A daemon is started as a unit would, and takes up the one job of a spool.
SERVE = """
mkdir -p /etc/steward /run/steward
cp /packages/steward.toml /etc/steward/
mkdir -p /srv/spool/hash.1/job.1
cp /packages/environment /packages/script /srv/spool/hash.1/job.1/
steward config check
steward serve --config /etc/steward/steward.toml >/var/log/steward 2>&1 &
daemon=$!
tries=0
until [ -n "$(find /srv/archive -name '1*.sh')" ]; do
    tries=$((tries + 1))
    if [ $tries -gt 300 ]; then
        cat /var/log/steward
        exit 1
    fi
    sleep 0.2
done
setpriv --reuid steward-web --regid steward-web --clear-groups steward web >/var/log/web 2>&1 &
pages=$!
for path in healthz static/vendor/htmx.min.js; do
    tries=0
    until $(echo /usr/bin/python3.1?) -c "
import sys, urllib.request
print(sys.argv[1], urllib.request.urlopen(sys.argv[1]).status)" http://127.0.0.1:8290/$path; do
        tries=$((tries + 1))
        if [ $tries -gt 100 ]; then
            tail /var/log/web /var/log/asked
            exit 1
        fi
        sleep 0.2
    done
done 2>>/var/log/asked
steward archive list --parsable2 --noheader --format jobid,state
kill $pages $daemon
wait $pages $daemon
"""

# The state of the units when all of docs/install.md is done, on a host that is controller and node.
BOOTED = r"""
su ada -c 'steward archive list -n -P -o jobid,state'
systemctl reload steward
for unit in steward steward-web steward-listen; do
    pid=$(systemctl show --property=MainPID --value $unit)
    grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/$pid/status | sed "s/^/$unit /"
done
# A stop of the daemon stops the listener, and the daemon's start starts it again.
systemctl stop steward
echo "steward stopped, steward-listen $(systemctl is-active steward-listen || :)"
systemctl start steward
until_true 'systemctl is-active steward-listen'
systemctl is-active steward-web
# One that is disabled stays down.
systemctl disable --now steward-listen
dpkg -i /packages/steward_*+py3.11_amd64.deb
systemctl restart steward
echo "steward-listen disabled, $(systemctl is-active steward-listen || :)"
systemctl enable --now steward-listen
until_true 'systemctl is-active steward-listen'
# As an earlier version enabled it: an upgrade adds the link.
rm /etc/systemd/system/steward.service.wants/steward-listen.service
systemctl daemon-reload
dpkg -i /packages/steward_*+py3.11_amd64.deb
systemctl stop steward
systemctl start steward
until_true 'systemctl is-active steward-listen'
# The agent has no capability either, and reads the spool of a host that is the controller, too.
systemctl show --property=Result steward-agent
until_true 'test -z "$(systemctl --no-legend --failed)"'
"""

pytestmark = [pytest.mark.wide, pytest.mark.timeout(1500)]


def make(out: Path, *words: str, umask: int = 0o022) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "packages", "--out", out, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "scripts", "SOURCE_DATE_EPOCH": "1790000000"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of fetched wheels; runs with the same lock files share root's."""
    if os.geteuid() != 0:
        return tmp_path_factory.mktemp("wheels")
    locks = b"".join((ROOT / lock).read_bytes() for lock in (RUNTIME, PARTS_LOCK))
    return Path(get_cache_directory()) / f"wheels-{hashlib.sha256(locks).hexdigest()[:16]}"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> Path:
    """Build all packages; return them with a configuration and a job's files for a daemon."""
    out = tmp_path_factory.mktemp("dist")
    work = tmp_path_factory.mktemp("work")
    # Compressed little: a test reads them once.
    make(out, "--work", str(work), "--wheels", str(wheels), "--level", "1")
    (out / "steward.toml").write_text(CONFIG)
    (out / "environment").write_bytes(struct.pack("=I", 1) + b"USER=ada\0")
    (out / "script").write_bytes(SCRIPT + b"\0")
    return out


@pytest.fixture(scope="module")
def version(dist: Path) -> str:
    (wheel,) = dist.glob("*.whl")
    return wheel.name.split("-")[1]


@pytest.fixture(scope="module")
def unpacked(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of the Debian packages, of all Python versions."""
    directory = tmp_path_factory.mktemp("unpacked")
    packages = sorted(dist.glob("steward*+py*_amd64.deb"))
    assert len(packages) == len(PYTHONS) * (1 + len(PARTS))
    for package in packages:
        subprocess.run(["dpkg-deb", "-x", package, directory], check=True, timeout=300)
    return directory


@pytest.fixture
def bare(
    request: pytest.FixtureRequest, dist: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bare:
    suite = getattr(request, "param", "bookworm")
    return Bare(suite, tmp_path_factory.mktemp(suite), dist)


def kept(bare: Bare) -> list[Path]:
    return [path for path in bare.path("/srv/archive").rglob("1*.sh") if path.is_file()]


def compiled(bare: Bare) -> Path:
    """Return the first of Steward's modules, as the interpreter there compiled it."""
    tag = bare.sh("cd /usr/bin && echo python3.1?").strip().replace("python", "").replace(".", "")
    return bare.path(f"/opt/steward/lib/steward/__pycache__/__init__.cpython-{tag}.pyc")


def looked_at(bare: Bare, version: str) -> None:
    """Run the installed program, whichever package installed it."""
    for user in ("steward-web", "steward-listen"):
        assert bare.sh(f"getent passwd {user}").strip().endswith(":/usr/sbin/nologin")
    # Neither the working directory nor its environment may provide modules.
    bare.sh("mkdir -p /tmp/steward && echo 1/0 >/tmp/steward/__init__.py")
    assert bare.sh("cd /tmp && PYTHONPATH=/tmp steward --version") == f"steward {version}\n"
    assert compiled(bare).exists()
    assert bare.sh("/opt/steward/libexec/steward/bin/sacct --usage").startswith("Usage: ")
    printed = bare.sh(SERVE)
    assert "/etc/steward/steward.toml is valid" in printed
    assert "/healthz 200\n" in printed
    assert "/htmx.min.js 200\n" in printed
    assert printed.splitlines()[-1].startswith("1|")
    assert [path.read_bytes() for path in kept(bare)] == [SCRIPT]


def looked_at_removed(bare: Bare, printed: str) -> None:
    """Check that the program is removed, and that its data remain and are mentioned."""
    assert "left as it is: /etc/steward" in printed
    assert "left as it is: /var/lib/steward" in printed
    assert not bare.path("/opt/steward").exists()
    assert not bare.path("/usr/bin/steward").exists()
    assert bare.path("/etc/steward/steward.toml").exists()
    assert bare.path("/var/lib/steward/journal.db").exists()
    assert len(kept(bare)) == 1


@pytest.mark.parametrize("bare", ["bookworm", "trixie"], indirect=True)
def test_the_debian_package(bare: Bare, version: str) -> None:
    python = bare.sh("cd /usr/bin && echo python3.1?").strip().removeprefix("python")
    other = "3.12"
    printed = bare.sh(f"dpkg -i /packages/steward_*+py{other}_amd64.deb", code=1)
    assert "steward depends on python3 (" in printed
    bare.sh("dpkg -P --force-all steward")
    printed = bare.sh(f"dpkg -i /packages/steward_*+py{python}_amd64.deb")
    assert "to begin: steward init" in printed
    looked_at(bare, version)
    # The same once more is an upgrade.
    printed = bare.sh(
        "touch /opt/steward/lib/steward/__pycache__/old.pyc; "
        f"dpkg -i /packages/steward_*+py{python}_amd64.deb"
    )
    assert "steward init" not in printed
    assert compiled(bare).exists()
    assert not compiled(bare).with_name("old.pyc").exists()
    printed = bare.sh("dpkg -P steward")
    looked_at_removed(bare, printed)
    assert "/var/lib/steward is left" in printed


def single_package(dist: Path, version: str, work: Path) -> None:
    """Build a package with every part in one, as Steward had before."""
    root = work / "single"
    (package,) = dist.glob("steward_*+py3.11_amd64.deb")
    subprocess.run(["dpkg-deb", "-R", package, root], check=True, timeout=300)
    for part in PARTS:
        (package,) = dist.glob(f"steward-{part}_*+py3.11_amd64.deb")
        subprocess.run(["dpkg-deb", "-x", package, root], check=True, timeout=300)
    control = root / "DEBIAN/control"
    control.write_text(control.read_text().replace(f"{version}+py3.11", version))
    build: list[str | Path] = ["dpkg-deb", "-Znone", "--root-owner-group", "--build", root]
    subprocess.run([*build, dist / "single.deb"], check=True, timeout=300)


def test_an_upgrade_tells_which_parts_to_install(
    bare: Bare, dist: Path, version: str, tmp_path: Path
) -> None:
    single_package(dist, version, tmp_path)
    bare.sh("dpkg -i /packages/single.deb")
    sink = '[archive.sink.k]\nkind = "kafka"\n[archive.sink.k.broker]\nservers = ["k1:1"]\n'
    bare.path("/etc/steward/steward.toml").write_text(f"{CONFIG}\n{sink}")
    assert "is not installed" not in bare.sh("steward config check")

    printed = bare.sh("dpkg -i /packages/steward_*+py3.11_amd64.deb")
    lines = [line for line in printed.splitlines() if "is not installed: run " in line]
    assert [line.partition(" is not")[0] for line in lines] == [
        "steward: the Python package confluent-kafka",
        "steward: the Python package duckdb",
    ]
    assert "is valid, with 2 warnings" in bare.sh("steward config check")
    for line in lines:
        command = line.partition("installed: run ")[2]
        bare.sh(f"cd /packages && {command.replace('install', 'install -y')}")
    assert "is not installed" not in bare.sh("steward config check")
    modules = bare.path("/opt/steward/python3.11/lib/python3.11/site-packages/confluent_kafka")
    assert list(modules.glob("__pycache__/*.pyc"))
    bare.sh("dpkg -r steward-kafka")
    assert not modules.exists()
    assert "confluent-kafka is not installed" in bare.sh("steward config check")
    assert "steward-parquet depends on steward" in bare.sh("dpkg -r steward", code=1)
    bare.sh("dpkg -P steward steward-parquet")
    assert not bare.path("/opt/steward").exists()


def test_an_upgrade_of_the_distribution_waits_for_steward(bare: Bare) -> None:
    """apt plans it from Debian 13's real index."""
    bare.sh("dpkg -i /packages/steward_*+py3.11_*.deb /packages/steward-parquet_*+py3.11_*.deb")
    names = bare.sh("dpkg-query -Wf '${Package}\\n'").split()
    bare.path("/srv/debian").mkdir(parents=True)
    bare.path("/srv/debian/Packages").write_text(read_index("trixie", names))
    bare.sh("echo 'deb [trusted=yes] file:/srv/debian ./' >/etc/apt/sources.list")
    bare.sh("rm -r /var/lib/apt/lists && apt-get update")

    upgrade = "not followed: typed at an upgrade of the distribution"
    hold, together = [text for place, _, text in blocks() if place == upgrade]
    bare.sh(hold)
    waiting = bare.sh("apt-get --simulate dist-upgrade")
    assert "Inst libc6 " in waiting, "the rest is upgraded"
    assert not re.search(r"(?m)^(Inst|Remv) (python3|steward\S*) ", waiting)
    simulated = together.replace("apt-get", "apt-get --simulate")
    printed = bare.sh(f"cd /packages\n{simulated}")
    assert re.search(r"(?m)^Inst python3 \[3\.11\S* \(3\.13", printed)
    for name in ("steward", "steward-parquet"):
        assert re.search(rf"(?m)^Inst {name} \[\S+py3\.11\] \(\S+py3\.13 ", printed)


def test_the_rpm(bare: Bare, version: str) -> None:
    printed = bare.sh("rpm -i --nodeps /packages/steward-0*.py3.11.x86_64.rpm")
    assert "to begin: steward init" in printed
    looked_at(bare, version)
    bare.sh("touch /opt/steward/lib/steward/__pycache__/old.pyc")
    bare.sh("rpm -U --force --nodeps /packages/steward-0*.py3.11.x86_64.rpm")
    assert compiled(bare).exists()
    assert not compiled(bare).with_name("old.pyc").exists()
    # Slurm's packages are EL's own: a package of the same name shows that there was an upgrade.
    bare.sh(f"mkdir -p {LIBDIR} /tmp/made && echo '{SLURM_DEVEL}' >/tmp/slurm.spec")
    bare.sh("rpmbuild -bb --quiet --define '_rpmdir /tmp/made' /tmp/slurm.spec")
    bare.sh("rpm -i --nodeps /tmp/made/noarch/slurm-devel-*.rpm")
    assert list(bare.path(LIBDIR).glob("22.05.*/job_submit_steward.so"))
    part = "/packages/steward-parquet-0*.py3.11.x86_64.rpm"
    assert f"steward = {version}-1.py3.11\n" in bare.sh(f"rpm -qpR {part}")
    bare.sh(f"rpm -i --nodeps {part}")
    assert "is not installed" not in bare.sh("steward config check")
    bare.sh("rpm -e steward-parquet")
    assert "duckdb is not installed" in bare.sh("steward config check")
    looked_at_removed(bare, bare.sh("rpm -e steward"))


def test_a_sites_own_plugin_is_found_and_left(bare: Bare) -> None:
    # The result of "pip install --target" for docs/plugins.md's package, without pip and network.
    info = bare.path("/opt/steward/plugins/site_jobacct-1.0.dist-info")
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-jobacct\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[steward.jobacct]\ncsv = site_jobacct:CsvPlugin\n")
    bare.sh("rpm -i --nodeps --noscripts /packages/steward-0*.py3.11.x86_64.rpm")
    wanted = f'{CONFIG}\n[accounting]\ntype = "jobacct/log,jobacct/csv"\n'
    bare.path("/etc/steward/steward.toml").write_text(wanted)
    assert "jobacct/csv" in bare.sh("steward config check")
    bare.sh("rpm -e --noscripts steward")
    assert (info / "METADATA").exists()


def test_what_slurm_loads(bare: Bare) -> None:
    """They are compiled without Steward, and again by Steward when Slurm is upgraded."""
    bare.sh("dpkg -i /packages/steward-plugins-src_*_all.deb")
    printed = bare.sh("steward-plugins-build --libdir /srv/sources")
    assert re.search(r"/srv/sources/22\.05\.\d+/spank_steward.so is for Slurm 22\.05\.", printed)
    bare.sh("dpkg -i /packages/steward_*+py3.11_amd64.deb")
    upgrade = "dpkg -i /var/cache/apt/archives/libslurm-dev_*.deb"
    bare.sh(upgrade)
    assert not bare.path(LIBDIR).exists()  # sites without plugins are unaffected

    # As a version that is gone left it.
    bare.sh(f"mkdir -p {LIBDIR} {os.path.dirname(PLUGSTACK)}")
    bare.sh(f"echo '{SLURM_CONF}' >/etc/slurm/slurm.conf")
    bare.sh(f"echo optional {LIBDIR}/21.08.8/spank_steward.so spool=/var/spool/x >{PLUGSTACK}")
    printed = bare.sh(upgrade)
    assert "does not fit what it loads of Steward any more" in printed
    assert "21.08.8/spank_steward.so, which does not exist" in printed
    libraries = sorted(bare.path(LIBDIR).rglob("*.so"))
    assert len(libraries) == 3
    for library in libraries:
        path = library.relative_to(bare.path(LIBDIR))
        shown = "nm -D --defined-only %s | sed 's/^[0-9a-f]* //' | sort"
        ours = bare.sh(shown % f"{LIBDIR}/{path}")
        assert "plugin_name" in ours
        assert ours == bare.sh(shown % f"/srv/sources/{path}")

    printed = bare.sh("dpkg -r steward")
    assert f"left as it is: {LIBDIR}" in printed
    assert f"Slurm still loads what {PLUGSTACK} names" in printed
    bare.sh("dpkg -r --force-depends libslurm-dev")
    assert "install libslurm-dev" in bare.sh("steward-plugins-build", code=1)


def test_the_agent(bare: Bare) -> None:
    bare.sh("dpkg -i --force-depends /packages/steward-agent_*_all.deb")
    assert "usage" in bare.sh("python3.11 -I -S /usr/sbin/steward-agent --help").lower()
    assert not bare.path("/opt/steward").exists()
    bare.sh("dpkg -P steward-agent")
    assert not bare.path("/usr/sbin/steward-agent").exists()


def test_the_wheel(dist: Path, wheels: Path, version: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    (wheel,) = dist.glob("*.whl")
    python = "{}.{}".format(*sys.version_info)
    pip: list[str | Path] = [
        tmp_path / "venv/bin/python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
    ]
    pip += ["--find-links", wheels / f"amd64-{python}", f"{wheel}[kafka]"]
    subprocess.run(pip, check=True, timeout=600)
    steward = tmp_path / "venv/bin/steward"
    done = subprocess.run(
        [steward, "--version"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == f"steward {version}\n"
    (tmp_path / "steward.toml").write_text(CONFIG)
    check: list[str | Path] = [steward, "config", "check", "--config", tmp_path / "steward.toml"]
    assert b"is valid" in subprocess.run(check, capture_output=True, timeout=60, check=False).stdout


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    sums = []
    for umask in (0o022, 0o077):
        out = tmp_path / str(umask)
        make(out, "--only", "wheel", "--work", str(tmp_path / f"work{umask}"), umask=umask)
        sums.append((out / "SHA256SUMS").read_text())
        kinds = sorted(line.rpartition(".")[2] for line in sums[-1].splitlines())
        assert kinds == ["gz", "tar", "whl"], "the wheel, the sources and StackStorm's pack"
    assert sums[0] == sums[1]


def test_sums_are_those_of_the_files(dist: Path) -> None:
    lines = [line.split() for line in (dist / "SHA256SUMS").read_text().splitlines()]
    assert {name for _, name in lines} >= {path.name for path in dist.glob("steward*.*")} - {
        "steward.toml"
    }
    for digest, name in lines:
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest


def test_nothing_needs_a_later_library_than_el_8_has(unpacked: Path) -> None:
    most = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11)}
    modules = [path for path in unpacked.rglob("*.so*") if path.is_file()]
    assert len(modules) > 100
    for module in modules:
        shown = subprocess.run(
            ["objdump", "-p", module], capture_output=True, text=True, check=True, timeout=60
        ).stdout
        for name, number in re.findall(r" (GLIBC|GLIBCXX|CXXABI)_([0-9.]+)\n", shown):
            assert tuple(map(int, number.split("."))) <= most[name], module


def test_units_are_right_and_closed(unpacked: Path, tmp_path: Path) -> None:
    units = sorted((unpacked / "usr/lib/systemd/system").glob("*.service"))
    names = {"steward", "steward-controller", "steward-web", "steward-listen"}
    assert {unit.stem for unit in units} == names
    units.append(ROOT / "packaging/systemd/steward-agent.service")
    for unit in units:
        here = tmp_path / unit.name
        # The program is where the package puts it, which is not on this machine.
        programs = re.compile(r"(?m)^(Exec(?:Start|Reload))=\S+")
        here.write_text(programs.sub(r"\1=/bin/true", unit.read_text()))
        verify: list[str | Path] = [
            "systemd-analyze",
            "verify",
            "--man=no",
            "--recursive-errors=no",
            here,
        ]
        done = subprocess.run(verify, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        security: list[str | Path] = [
            "systemd-analyze",
            "security",
            "--offline=true",
            "--threshold=25",
            here,
        ]
        done = subprocess.run(security, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_the_install_page_on_a_booted_host(bare: Bare) -> None:
    """systemd itself runs the units, with all their restrictions."""
    printed = follow_page(bare, BOOTED)
    assert "1|COMPLETED\n" in printed
    for unit in ("steward", "steward-web", "steward-listen"):
        assert f"{unit} CapEff:\t0000000000000000\n" in printed
        assert f"{unit} NoNewPrivs:\t1\n" in printed
        assert f"{unit} Seccomp:\t2\n" in printed
    assert "steward stopped, steward-listen inactive\n" in printed
    assert "steward-listen disabled, inactive\n" in printed
    assert "Result=success\n" in printed
    assert not bare.path("/opt/steward").exists()
    assert list(bare.path("/srv/steward/archive").rglob("1*.sh"))


def test_the_manual_is_found(unpacked: Path) -> None:
    manual = unpacked / "usr/share/man"
    for page in ("1 steward", "1 steward-archive", "1 steward-sacct", "5 steward.toml"):
        section, name = page.split()
        found = subprocess.run(
            ["man", "-M", manual, "-w", section, name], capture_output=True, timeout=60, check=False
        )
        assert found.returncode == 0, page


def test_bash_finds_the_completion(unpacked: Path) -> None:
    path = unpacked / "usr/share/bash-completion/completions/steward"
    asked = f"source {path}; COMP_WORDS=(steward archi); COMP_CWORD=1; _steward; echo $COMPREPLY"
    done = subprocess.run(
        ["bash", "--norc", "-c", asked], capture_output=True, timeout=60, check=False
    )
    assert done.stdout == b"archive\n"
