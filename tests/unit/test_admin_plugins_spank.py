"""Spool of the SPANK plugin: problems, and the printed commands that fix them."""

import os
import shlex
import shutil
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from harness.doctor import DoctorSite, site
from steward.admin.doctor import slurm_checks
from steward.admin.doctor.findings import CheckFinding
from steward.admin.plugins.build import LIBRARY, PROLOG_LIBRARY, PluginBuild, build_plugins
from steward.admin.plugins.installation import install_jobcomp, install_shim
from steward.admin.plugins.spank import (
    describe_spool_conflict,
    find_shim_faults,
    find_spool,
    find_spool_faults,
    list_daemon_directories,
    require_outside_spool,
)
from steward.cli.app import run
from steward.core.config import Settings
from steward.core.config.reader import LoadedConfig, render_config
from steward.slurm.settings import ClusterSettings

__all__ = ["site"]

HEADERS = Path("/usr/include")
NOBODY = 65534

pytestmark = [
    pytest.mark.skipif(
        not shutil.which("cc") or not (HEADERS / "slurm/spank.h").exists(),
        reason="needs a C compiler and Slurm's headers",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="the spool is root's"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PluginBuild:
    return build_plugins(str(HEADERS), str(tmp_path_factory.mktemp("lib")))


class Node:
    """Host that is controller and node, with the plugin installed as the docs say."""

    def __init__(self, site: DoctorSite, built: PluginBuild) -> None:
        self.site = site
        self.default = str(site.directory / "default" / "shim")
        self.libdir = os.path.dirname(os.path.dirname(built.path))
        self.built = built
        self.etc = site.directory / "slurm"
        self.plugstack = self.etc / "plugstack.conf"
        self.conf = Path(f"{self.plugstack}.d/steward.conf")
        self.plugstack.write_text(f"include {self.plugstack}.d/*.conf\n")
        self.spool = site.directory / "shim"
        self.lines = site.directory / "jobcomp" / "jobcomp.jsonl"
        self.lines.parent.mkdir()
        self.lines.parent.chmod(0o750)
        os.chown(self.lines.parent, NOBODY, NOBODY)
        cluster = msgspec.structs.replace(
            site.settings.cluster["c1"], jobcomp_lines=str(self.lines)
        )
        site.reopen(cluster={"c1": cluster})
        site.shown |= {"SLURM_VERSION": str(built.version), "SlurmUser": f"nobody({NOBODY})"}
        site.stage.answer("squeue --version", f"slurm-wlm {built.version}\n")
        self.config = site.directory / "steward.toml"
        self.config.write_text(render_config(LoadedConfig(site.settings)))
        self.install(self.spool)

    def install(self, spool: Path | str, *, prolog: bool = False) -> None:
        install_shim(
            self.built,
            libdir=self.libdir,
            plugstack=str(self.plugstack),
            spool=str(spool),
            with_prolog=prolog,
        )

    def look(self) -> list[CheckFinding]:
        return list(slurm_checks.check_spank_plugin(self.site.ground()))

    def faults(self) -> list[CheckFinding]:
        return [found for found in self.look() if found.status != "ok"]

    def mend(self) -> None:
        """Run the commands that the doctor prints, once for each problem."""
        for line in dict.fromkeys(line for found in self.faults() for line in found.fix):
            file, _, words = line.partition(": ")
            if line.startswith("steward "):
                assert run([*shlex.split(line)[1:], "--config", str(self.config)]) == 0, line
            elif file.startswith("/"):
                self.edit(Path(file), words)
            else:
                subprocess.run(shlex.split(line), check=True, timeout=60)

    def edit(self, file: Path, words: str) -> None:
        kept = [line for line in file.read_text().splitlines() if LIBRARY not in line]
        added = [] if words.startswith("remove the line") else [words]
        file.write_text("".join(f"{line}\n" for line in [*kept, *added]))


@pytest.fixture
def node(site: DoctorSite, built: PluginBuild, monkeypatch: pytest.MonkeyPatch) -> Node:
    # No test makes the spool of the host that it runs on.
    monkeypatch.setattr(
        "steward.admin.plugins.spank.DEFAULT_SPOOL", str(site.directory / "default" / "shim")
    )
    monkeypatch.setenv("PATH", f"{site.directory}/slurm:{os.environ['PATH']}")
    monkeypatch.delenv("STEWARD_CONFIG", raising=False)
    return Node(site, built)


def to_others(node: Node) -> None:
    os.chown(node.spool, NOBODY, NOBODY)


def closed(mode: int) -> Callable[[Node], None]:
    return lambda node: node.spool.chmod(mode)


def both(node: Node) -> None:
    to_others(node)
    node.spool.chmod(0o777)


def missing(node: Node) -> None:
    node.spool.rmdir()


def a_file(node: Node) -> None:
    node.spool.rmdir()
    node.spool.touch()


def a_link(node: Node) -> None:
    node.spool.rename(node.spool.with_name("real"))
    node.spool.symlink_to(node.spool.with_name("real"))


def no_spool(node: Node) -> None:
    node.conf.write_text(node.conf.read_text().replace(f" spool={node.spool}", ""))


def required(node: Node) -> None:
    node.conf.write_text(node.conf.read_text().replace("optional", "required"))


def another_build(node: Node) -> None:
    node.conf.write_text(node.conf.read_text().replace(str(node.built.version), "1.1.1"))


def not_included(node: Node) -> None:
    node.plugstack.write_text("# the site's\n")


def files_to_others(node: Node) -> None:
    to_others(node)
    (node.spool / "box.lock").touch()
    os.chown(node.spool / "box.lock", NOBODY, NOBODY)


def relative(node: Node) -> None:
    node.conf.write_text(node.conf.read_text().replace(f"spool={node.spool}", "spool=shim"))


def a_link_to_a_file(node: Node) -> None:
    node.spool.rmdir()
    node.spool.with_name("file").touch()
    node.spool.symlink_to(node.spool.with_name("file"))


def a_link_to_itself(node: Node) -> None:
    node.spool.rmdir()
    node.spool.symlink_to(node.spool)


def a_file_and_an_old_one(node: Node) -> None:
    a_file(node)
    node.spool.with_name("shim.old").mkdir()


@pytest.mark.parametrize(
    "harm",
    [
        *(to_others, closed(0o777), closed(0o1777), closed(0o770), closed(0o755), both),
        *(closed(0), closed(0o300), closed(0o500), closed(0o600), files_to_others),
        *(missing, a_file, a_link, no_spool, required, another_build, not_included),
        *(relative, a_link_to_a_file, a_link_to_itself, a_file_and_an_old_one),
    ],
)
def test_the_commands_of_the_doctor_mend_the_spool(
    node: Node, harm: Callable[[Node], None]
) -> None:
    assert [found.status for found in node.look()] == ["ok"]
    harm(node)
    assert all(found.status == "wrong" and found.fix for found in node.look())
    node.mend()
    assert node.faults() == []
    spool = Path(find_spool(str(node.plugstack)))
    assert spool.is_absolute()
    assert (spool.stat().st_uid, spool.stat().st_mode & 0o7777) == (0, 0o700)
    assert all(file.stat().st_uid == 0 for file in spool.iterdir())


def test_what_was_chosen_at_the_installation_is_kept(node: Node) -> None:
    node.install(node.spool, prolog=True)
    another_build(node)
    node.mend()
    assert node.conf.read_text().count(f"spool={node.spool}") == 2
    assert PROLOG_LIBRARY in node.conf.read_text()


def test_a_line_that_names_jobcomps_directory_is_to_be_changed(node: Node) -> None:
    """If the directory belonged to root, slurmctld could not write lines to it."""
    node.install(node.lines.parent)
    found = node.faults()[0]
    told = "jobcomp, which is the directory of [cluster.c1] jobcomp_lines: in "
    assert told in found.finding
    assert not any("chown" in line for line in found.fix)
    node.mend()
    assert node.faults() == []
    assert str(node.lines.parent) not in node.conf.read_text()
    assert node.lines.parent.stat().st_uid == NOBODY


def test_a_line_of_plugstack_conf_itself_is_to_be_changed(node: Node) -> None:
    node.conf.unlink()
    old = f"optional {node.built.path} spool="
    node.plugstack.write_text(f"{old}{node.lines.parent}\n")
    (found,) = node.faults()
    new = node.default
    assert found.fix == (
        f"{node.plugstack}: {old}{new}",
        f"install -d -o root -g root -m 0700 {new}",
    )
    node.mend()
    assert node.faults() == []
    assert node.plugstack.read_text() == f"{old}{new}\n"


@pytest.mark.parametrize("library", ["1.1.1", "gone"])
def test_remedies_of_a_line_agree_with_each_other(node: Node, library: str) -> None:
    """After an upgrade an old line names another build, and the directory of job lines."""
    node.conf.unlink()
    old = node.built.path.replace(str(node.built.version), library)
    node.plugstack.write_text(f"required {old} spool={node.lines.parent}/\n")
    found = node.faults()
    assert len(found) > 1
    assert {one.fix for one in found} == {
        (
            f"{node.plugstack}: optional {node.built.path} spool={node.default}",
            f"install -d -o root -g root -m 0700 {node.default}",
        )
    }
    node.mend()
    assert node.faults() == []
    assert node.lines.parent.stat().st_uid == NOBODY


def test_the_last_of_two_spools_is_looked_at_as_the_plugin_takes_it(node: Node) -> None:
    text = node.conf.read_text()
    gone = f"{node.spool}-gone"
    node.conf.write_text(text.replace(str(node.spool), f"{node.spool} spool={gone}"))
    assert gone in node.faults()[0].finding
    node.mend()
    assert node.faults() == []


def test_files_that_an_included_file_includes_are_read(node: Node) -> None:
    inner = node.etc / "more" / "shim.conf"
    inner.parent.mkdir()
    node.conf.rename(inner)
    (Path(f"{node.plugstack}.d") / "site.conf").write_text(f"include {inner}\n")
    assert node.faults() == []
    assert find_spool(str(node.plugstack)) == str(node.spool)
    inner.write_text(inner.read_text() + f"include {inner}\n")
    assert node.faults() == []


def test_a_directory_with_files_of_others_is_no_spool(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    other = node.site.directory / "StateSaveLocation"
    other.mkdir()
    (other / "box.log").touch()
    (other / "job_state").touch()
    os.chown(other, NOBODY, NOBODY)
    home = node.site.directory / "home"
    home.mkdir()
    (home / ".bashrc").touch()
    os.chown(home, NOBODY, NOBODY)
    assert refused(node, "/tmp"), "a parent of the site's directory, or the directory of others"
    capsys.readouterr()
    for spool in ("/etc", other, home):
        assert refused(node, spool)
        assert "which the plugin did not write" in capsys.readouterr().err
    node.conf.write_text(node.conf.read_text().replace(f"{node.spool}", f"{other}"))
    assert "job_state, which the plugin did not write" in node.faults()[0].finding
    node.mend()
    assert node.faults() == []
    assert other.stat().st_uid == NOBODY
    node.conf.write_text(node.conf.read_text().replace(f"{node.default}", f"{home}"))
    node.mend()
    assert node.faults() == []
    assert home.stat().st_uid == NOBODY


@pytest.mark.parametrize("owner", [0, NOBODY])
def test_a_directory_that_is_not_roots_alone_is_no_new_spool(
    node: Node, owner: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other programs could no longer use /var/log/munge, /srv or /var/mail."""
    other = node.site.directory / "srv"
    other.mkdir(mode=0o755)
    os.chown(other, owner, owner)
    assert refused(node, other)
    assert f"a directory of uid {owner} with mode 0755" in capsys.readouterr().err
    os.chown(other, 0, 0)
    other.chmod(0o700)
    assert not refused(node, other)


def test_the_log_of_another_program_is_no_line_of_the_plugin(node: Node) -> None:
    other = node.site.directory / "munge"
    other.mkdir()
    (other / "munged.log").touch()
    os.chown(other, NOBODY, NOBODY)
    node.conf.write_text(node.conf.read_text().replace(f"{node.spool}", f"{other}"))
    assert "munged.log, which the plugin did not write" in node.faults()[0].finding
    node.mend()
    assert node.faults() == []
    assert other.stat().st_uid == NOBODY


def test_a_file_of_root_in_a_spool_of_roots_alone_changes_nothing(node: Node) -> None:
    (node.spool / "lost+found").mkdir()
    (node.spool / "README").touch()
    assert node.faults() == []


def test_lines_that_another_user_may_have_written_are_put_aside(node: Node) -> None:
    node.spool.chmod(0o1777)
    forged = node.spool / "box.log"
    forged.touch()
    os.chown(forged, NOBODY, NOBODY)
    node.mend()
    assert node.faults() == []
    assert list(node.spool.iterdir()) == []
    assert node.spool.with_name("shim.old").joinpath("box.log").exists()


@pytest.mark.parametrize("target", ["file", "self", "shared"])
def test_a_default_spool_that_is_a_link_is_replaced(node: Node, target: str) -> None:
    default = Path(node.default)
    default.parent.mkdir()
    shared = node.site.directory / "scratch"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "data").mkdir()
    os.chown(shared / "data", NOBODY, NOBODY)
    places = {"file": node.config, "self": default, "shared": shared}
    default.symlink_to(places[target])
    node.conf.write_text(node.conf.read_text().replace(str(node.spool), node.default))
    for found in node.faults():
        assert not any(str(shared) in line or "chown" in line for line in found.fix)
    assert (shared / "data").stat().st_uid == NOBODY
    assert any("/var/lib/steward-shim" in line for found in node.faults() for line in found.fix)


def test_a_healthy_spool_is_none_of_the_daemons_faults(node: Node) -> None:
    """The daemon runs as SlurmUser, who cannot read the spool."""
    for above in node.spool.parents:
        above.chmod(above.stat().st_mode | 0o711) if above.stat().st_uid == 0 else None
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setresuid(NOBODY, NOBODY, NOBODY)
            code = bool(list(find_spool_faults(str(node.spool))))
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_files_that_the_agent_removes_meanwhile_disturb_nothing(node: Node) -> None:
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            (node.spool / "box.log.1").touch()
            (node.spool / "box.log.1").unlink()

    agent = threading.Thread(target=remove)
    agent.start()
    try:
        for _ in range(500):
            assert list(find_spool_faults(str(node.spool))) == []
    finally:
        stop.set()
        agent.join()


def test_job_lines_may_be_written_if_the_spool_has_another_file(node: Node) -> None:
    (node.spool / "README").touch()
    node.spool.chmod(0o755)
    require_outside_spool(str(node.lines), str(node.spool))


def test_the_printed_command_names_slurms_version_if_slurm_is_in_no_path(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    required(node)
    monkeypatch.setenv("PATH", "/nowhere")
    shim = find_shim_faults(node.built.version, libdir=node.libdir, plugstack=str(node.plugstack))
    assert any(f"--slurm {node.built.version}" in line for fault in shim for line in fault.fix)


def test_install_tells_that_the_agent_reads_the_default_spool(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not refused(node, node.site.directory / "own")
    assert "systemctl edit steward-agent.service" in capsys.readouterr().out


def test_a_spool_that_two_libraries_share_is_one_fault(node: Node) -> None:
    node.install(node.spool, prolog=True)
    assert node.faults() == []
    a_link(node)
    assert len([found for found in node.faults() if "symbolic link" in found.finding]) == 1


def test_an_old_line_beside_ours_is_to_be_removed(node: Node) -> None:
    text = node.plugstack.read_text()
    node.plugstack.write_text(f"{text}optional {node.built.path} spool={node.lines.parent}\n")
    (found,) = node.faults()
    assert "name the SPANK plugin's own spool" in found.finding
    node.mend()
    assert node.faults() == []
    assert node.plugstack.read_text() == text


def test_the_default_directories_are_known_without_a_configuration(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.conf.write_text(node.conf.read_text().replace(str(node.spool), "/var/spool/steward"))
    words = ["--libdir", node.libdir, "--plugstack", str(node.plugstack)]
    assert run(["plugins", "check", *words]) == 1
    told = capsys.readouterr().out
    assert "spool=/var/spool/steward, which is the directory of jobcomp's lines" in told
    assert f"--spool {node.default}" in told


def refused(node: Node, spool: Path | str) -> bool:
    words = ["--libdir", node.libdir, "--plugstack", str(node.plugstack)]
    words += ["--config", str(node.config), "--spool", str(spool)]
    before = node.conf.read_text()
    code = run(["plugins", "install", *words])
    assert code in (0, 2)
    assert (node.conf.read_text() == before) == (code == 2)
    return code == 2


def test_install_refuses_directories_of_the_daemon_and_of_jobcomp(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    root = node.site.directory
    taken: dict[Path | str, str] = {
        "/var/spool/steward": "the directory of jobcomp's lines",
        node.lines.parent: "the directory of [cluster.c1] jobcomp_lines",
        root / "state": "the directory of",
        root / "state" / "shim": f"in {root}/state, the directory of",
        root / "archive": "the directory of [archive.sink.files] path",
        root: "a parent of",
    }
    for spool, why in taken.items():
        assert refused(node, spool)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"steward: cannot use {spool} as the SPANK plugin's spool: it is ")
        assert why in line
        assert line.endswith(f": give --spool {node.default}")
    (root / "link").symlink_to(node.lines.parent)
    assert refused(node, root / "link")
    assert not refused(node, root / "other" / "shim")


def test_every_directory_of_the_configuration_is_known() -> None:
    settings = Settings(
        state_dir="/a",
        run_dir="/b",
        cluster={"one": ClusterSettings(spool="/f", jobcomp_lines="/g/lines")},
    )
    found = list_daemon_directories(settings)
    assert {"/a", "/b", "/f", "/g", "/var/spool/steward"} <= set(found)
    assert found["/g"] == "[cluster.one] jobcomp_lines"
    assert describe_spool_conflict("/var/spool/steward-shim", found) == ""


def test_install_tells_how_to_close_a_spool_that_was_there(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    both(node)
    words = ["--libdir", node.libdir, "--plugstack", str(node.plugstack)]
    words += ["--config", str(node.config), "--spool", str(node.spool)]
    assert run(["plugins", "install", *words]) == 0
    told = capsys.readouterr().out.splitlines()
    for line in told:
        if line.startswith("Now run: "):
            subprocess.run(shlex.split(line.removeprefix("Now run: ")), check=True, timeout=60)
    assert node.faults() == []


def test_jobs_lines_are_not_written_into_the_spool(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["plugins", "install", "--plugstack", str(node.plugstack), "--libdir", node.libdir]
    words += ["--jobcomp", str(node.etc)]
    for lines in (f"{node.spool}/jobcomp.jsonl", f"{node.default}/jobcomp.jsonl"):
        assert run([*words, "--lines", lines]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"cannot write job lines to {lines}: " in line
        assert line.endswith("give --lines /var/spool/steward/jobcomp.jsonl")
    assert not (node.etc / "jobcomp.lua").exists()
    assert run([*words, "--lines", str(node.lines)]) == 0


@pytest.mark.parametrize(
    "harm", ["root's", "root's file", "missing", "open", "no script", "link", "directory"]
)
def test_the_commands_of_the_doctor_mend_jobcomps_directory(node: Node, harm: str) -> None:
    """An earlier doctor suggested to give the directory to root; that is undone too."""
    libdir = str(node.site.directory / "lib")
    install_jobcomp(str(node.etc), libdir=libdir, lines_path=str(node.lines))
    os.utime(node.etc / "jobcomp.lua", (0, 0))
    node.site.shown |= {"JobCompType": "jobcomp/lua"}
    directory = node.lines.parent
    secret = node.site.directory / "of_root_alone"
    # SlurmUser must reach it.
    for above in directory.parents:
        above.chmod(above.stat().st_mode | 0o711) if above.stat().st_uid == 0 else None
    assert [found.status for found in slurm_checks.check_jobcomp_plugin(node.site.ground())] == [
        "ok"
    ]
    if harm == "root's":
        os.chown(directory, 0, 0)
    elif harm == "root's file":
        node.lines.touch(0o600)
    elif harm == "missing":
        directory.rmdir()
    elif harm == "open":
        directory.chmod(0o755)
    elif harm == "link":
        secret.touch(0o600)
        node.lines.symlink_to(secret)
    elif harm == "directory":
        node.lines.mkdir()
    else:
        (Path(libdir) / "jobcomp.lua").unlink()
    found = [
        one for one in slurm_checks.check_jobcomp_plugin(node.site.ground()) if one.status != "ok"
    ]
    assert found
    for line in (line for one in found for line in one.fix if "systemctl" not in line):
        words = shlex.split(line)
        if words[0] == "steward":
            assert run([*words[1:], "--libdir", libdir]) == 0
        else:
            subprocess.run(words, check=True, timeout=60)
    os.utime(node.etc / "jobcomp.lua", (0, 0))
    assert [one.status for one in slurm_checks.check_jobcomp_plugin(node.site.ground())] == ["ok"]
    if harm == "link":
        status = secret.stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o600)
