"""Builds, installation and checks of the files that Slurm loads."""

import os
import re
import shutil
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path

import pytest

from steward.admin.plugins import installation, spank
from steward.admin.plugins.build import (
    HOOKS,
    LIBRARY,
    NODE_LIBRARIES,
    PROLOG_LIBRARY,
    SUBMIT_LIBRARY,
    PluginBuild,
    SlurmVersion,
    build_plugins,
    find_build,
)
from steward.admin.plugins.errors import BuildFailed, HeadersMissing, PluginInstallError
from steward.admin.plugins.installation import install_jobcomp, install_shim
from steward.admin.plugins.jobcomp import check_jobcomp
from steward.admin.plugins.spank import check_library, check_shim
from steward.cli.app import run

HEADERS = Path("/usr/include")

needs_compiler = pytest.mark.skipif(
    not shutil.which("cc") or not (HEADERS / "slurm/spank.h").exists(),
    reason="needs a C compiler and Slurm's headers",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PluginBuild:
    return build_plugins(str(HEADERS), str(tmp_path_factory.mktemp("lib")))


@pytest.fixture
def libdir(built: PluginBuild) -> str:
    return os.path.dirname(os.path.dirname(built.path))


@pytest.fixture
def plugstack(tmp_path: Path) -> Path:
    path = tmp_path / "etc" / "plugstack.conf"
    path.parent.mkdir()
    path.write_text(f"# the site's\ninclude {path}.d/*.conf\n")
    return path


@pytest.mark.parametrize("text", ["22.05", "22.05.8", "24.11.5", "26.05.10"])
def test_versions_are_written_as_slurm_writes_them(text: str) -> None:
    assert str(SlurmVersion.parse(text)) == text


@pytest.mark.parametrize("text", ["", "22", "22.5", "22.05.x", "22.05.8/..", "v22.05"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(PluginInstallError, match="invalid Slurm version"):
        SlurmVersion.parse(text)


def test_a_plugin_serves_every_patch_level_and_no_other_version() -> None:
    version = SlurmVersion.from_number(0x180B05)
    assert str(version) == "24.11.5"
    assert version.is_loadable_by(SlurmVersion(24, 11, 9))
    assert not version.is_loadable_by(SlurmVersion(24, 5, 5))


@needs_compiler
def test_builds_lie_side_by_side_and_the_nearest_is_taken(
    built: PluginBuild, tmp_path: Path
) -> None:
    for name in ("22.05.2", "22.05.8", "24.11.5", "notes", "23.02.1.old"):
        (tmp_path / name).mkdir()
        shutil.copy(built.path, tmp_path / name)
    found = {
        wanted: getattr(find_build(str(tmp_path), SlurmVersion.parse(wanted)), "path", "")
        for wanted in ("22.05.2", "22.05.5", "22.05", "24.11", "23.02.1", "26.05")
    }
    assert {wanted: Path(path).parent.name for wanted, path in found.items()} == {
        "22.05.2": "22.05.2",
        "22.05.5": "22.05.8",
        "22.05": "22.05.8",
        "24.11": "24.11.5",
        "23.02.1": "",
        "26.05": "",
    }


@needs_compiler
def test_a_build_says_what_it_is(built: PluginBuild) -> None:
    assert Path(built.path).parent.name == str(built.version)
    seen = spank.inspect_library(built.path)
    assert SlurmVersion.from_number(seen.version) == built.version
    assert (seen.type, seen.missing) == ("spank", [])
    assert check_library(built.path, built.version) == []
    assert set(os.listdir(os.path.dirname(built.path))) == set(HOOKS)


@needs_compiler
def test_a_library_under_the_name_of_another_is_a_fault(built: PluginBuild, tmp_path: Path) -> None:
    path = shutil.copy(built.path, tmp_path / SUBMIT_LIBRARY)
    wrong_type, *_ = check_library(str(path), built.version)
    assert wrong_type == f"{path} is not a plugin of type job_submit/steward but of 'spank'"


@needs_compiler
@pytest.mark.parametrize("library", HOOKS)
def test_only_the_hooks_are_seen_from_outside(built: PluginBuild, library: str) -> None:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", Path(built.path).with_name(library)],
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split()[2] for line in listed.stdout.splitlines()}
    own = {"plugin_name", "plugin_type", "plugin_version"}
    if library in NODE_LIBRARIES:
        own.add("spank_plugin_version")
    assert names == {*own, *HOOKS[library]}


@needs_compiler
def test_a_library_for_another_version_is_told_of(built: PluginBuild) -> None:
    (line,) = check_library(built.path, SlurmVersion(33, 11))
    assert f"was built for Slurm {built.version}, not for 33.11" in line


@needs_compiler
def test_what_is_no_plugin_is_told_of(tmp_path: Path) -> None:
    version = SlurmVersion(22, 5, 8)
    (missing,) = check_library(str(tmp_path / "none.so"), version)
    assert "cannot load " in missing
    (tmp_path / "text.so").write_text("hello")
    (garbage,) = check_library(str(tmp_path / "text.so"), version)
    assert "cannot load " in garbage
    crashing = tmp_path / "crashing.c"
    crashing.write_text(
        "#include <stdlib.h>\n__attribute__((constructor)) static void f(void) { abort(); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "crashing.so", crashing], check=True)
    (crashed,) = check_library(str(tmp_path / "crashing.so"), version)
    assert crashed.endswith(": signal 6")


def test_without_headers_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(HeadersMissing, match=r"install Slurm's development package"):
        build_plugins(str(tmp_path), str(tmp_path))
    (tmp_path / "slurm").mkdir()
    (tmp_path / "slurm" / "slurm_version.h").write_text("nothing\n")
    with pytest.raises(HeadersMissing, match="SLURM_VERSION_NUMBER"):
        build_plugins(str(tmp_path), str(tmp_path))


@needs_compiler
def test_a_compiler_that_fails_leaves_the_last_build(built: PluginBuild, tmp_path: Path) -> None:
    target = tmp_path / str(built.version)
    target.mkdir()
    shutil.copy(built.path, target)
    before = (target / LIBRARY).read_bytes()
    with pytest.raises(BuildFailed, match="C compiler /nowhere/cc not found"):
        build_plugins(str(HEADERS), str(tmp_path), compiler="/nowhere/cc")
    with pytest.raises(BuildFailed, match="failed to compile"):
        build_plugins(str(HEADERS), str(tmp_path), compiler="false")
    assert [path.name for path in target.iterdir()] == [LIBRARY]
    assert (target / LIBRARY).read_bytes() == before


@needs_compiler
def test_what_is_installed_passes_the_check(
    built: PluginBuild, plugstack: Path, tmp_path: Path
) -> None:
    there, spool = str(tmp_path / "lib"), tmp_path / "spool" / "shim"
    before = plugstack.read_text()
    done = install_shim(built, libdir=there, plugstack=str(plugstack), spool=str(spool))
    assert done.remaining == ()
    assert plugstack.read_text() == before
    conf = Path(f"{plugstack}.d/steward.conf")
    library = Path(there) / str(built.version) / LIBRARY
    assert conf.read_text().splitlines()[-1] == f"optional {library} spool={spool}"
    assert spool.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        assert check_shim(built.version, libdir=there, plugstack=str(plugstack)) == []
    again = install_shim(
        find_build(there, built.version) or built,
        libdir=there,
        plugstack=str(plugstack),
        spool=str(spool),
    )
    assert again == done
    assert not list(tmp_path.rglob(".*"))
    install_shim(built, libdir=there, plugstack=str(plugstack), spool=str(spool), with_prolog=True)
    assert conf.read_text().splitlines()[-2:] == [
        f"optional {library} spool={spool}",
        f"optional {library.with_name(PROLOG_LIBRARY)} spool={spool}",
    ]
    if os.geteuid() == 0:
        assert check_shim(built.version, libdir=there, plugstack=str(plugstack)) == []


@needs_compiler
def test_what_is_left_to_do_is_said(built: PluginBuild, libdir: str, tmp_path: Path) -> None:
    plugstack = tmp_path / "plugstack.conf"
    done = install_shim(
        built, libdir=libdir, plugstack=str(plugstack), spool=str(tmp_path / "spool")
    )
    assert done.remaining == (f"add to {plugstack}: include {plugstack}.d/*.conf",)
    assert not plugstack.exists()
    (line,) = check_shim(built.version, libdir=libdir, plugstack=str(plugstack))
    assert "does not include" in line


@needs_compiler
def test_each_thing_that_is_wrong_is_a_line(
    built: PluginBuild, libdir: str, plugstack: Path, tmp_path: Path
) -> None:
    def wrong() -> list[str]:
        return check_shim(built.version, libdir=libdir, plugstack=str(plugstack))

    assert [line.partition(": ")[0] for line in wrong()] == [
        f"{plugstack}.d/steward.conf is missing"
    ]
    spool = tmp_path / "spool"
    install_shim(built, libdir=libdir, plugstack=str(plugstack), spool=str(spool))
    conf = Path(f"{plugstack}.d/steward.conf")
    good = conf.read_text()
    spool.chmod(0o777)
    assert any("writable by everybody" in line for line in wrong())
    spool.rmdir()
    assert any("No such file" in line for line in wrong())
    (tmp_path / "real").mkdir()
    spool.symlink_to(tmp_path / "real")
    assert any("symbolic link" in line for line in wrong())
    conf.write_text(good.replace("optional", "required"))
    assert any("use 'optional'" in line for line in wrong())
    conf.write_text(good.replace(LIBRARY, "other.so"))
    assert any("which does not exist" in line for line in wrong())
    assert "no build for Slurm 33.11" in " ".join(
        check_shim(SlurmVersion(33, 11), libdir=libdir, plugstack=str(plugstack))
    )


@pytest.mark.parametrize("spool", ["relative", "/a b", "/a#b", "/a\nb", '/a"b', ""])
def test_a_path_that_would_break_its_line_is_refused(
    spool: str, plugstack: Path, tmp_path: Path
) -> None:
    there = PluginBuild(path=str(tmp_path / "x.so"), version=SlurmVersion(22, 5, 8))
    with pytest.raises(PluginInstallError, match="absolute path of plain characters"):
        install_shim(there, libdir=str(tmp_path), plugstack=str(plugstack), spool=spool)
    assert not Path(f"{plugstack}.d").exists()


def test_jobcomp_is_called_from_a_file_of_two_lines(tmp_path: Path) -> None:
    etc, lines = tmp_path / "etc", tmp_path / "var" / "jobcomp.jsonl"
    etc.mkdir()
    done = install_jobcomp(str(etc), libdir=str(tmp_path / "lib"), lines_path=str(lines))
    assert done.written_paths == (str(tmp_path / "lib/jobcomp.lua"), str(etc / "jobcomp.lua"))
    assert any("writable by SlurmUser" in sentence for sentence in done.remaining)
    assert "jobcomp/none" in check_jobcomp({"JobCompType": ""}, str(etc))[0]
    assert install_jobcomp(str(etc), libdir=str(tmp_path / "lib"), lines_path=str(lines)) == done
    lua = shutil.which("lua5.1")
    if lua:
        asked = f"io.write(dofile('{etc}/jobcomp.lua').file)"
        said = subprocess.run([lua, "-e", asked], capture_output=True, text=True, check=True)
        assert said.stdout == str(lines)


def test_a_sites_own_jobcomp_is_left_alone(tmp_path: Path) -> None:
    site = tmp_path / "jobcomp.lua"
    site.write_text("function slurm_jobcomp_log_record(job)\nend\n")
    before = site.read_text()
    with pytest.raises(PluginInstallError, match=re.escape("steward.log_record(job)")):
        install_jobcomp(
            str(tmp_path), libdir=str(tmp_path / "lib"), lines_path=str(tmp_path / "lines")
        )
    assert site.read_text() == before
    (said,) = check_jobcomp({"JobCompType": "jobcomp/lua"}, str(tmp_path))
    assert "does not call" in said


def test_what_keeps_slurmctld_from_writing_is_said(tmp_path: Path) -> None:
    etc, lib, lines = tmp_path / "etc", tmp_path / "lib", tmp_path / "var" / "jobcomp.jsonl"
    etc.mkdir()
    shown = {"JobCompType": "jobcomp/lua", "SlurmUser": f"me({os.getuid()})"}

    def wrong(**more: str) -> str:
        return "; ".join(check_jobcomp({**shown, **more}, str(etc)))

    assert "jobcomp.lua: No such file" in wrong()
    install_jobcomp(str(etc), libdir=str(lib), lines_path=str(lines))
    assert f"{lines.parent} does not exist" in wrong()
    lines.parent.mkdir()
    lines.parent.chmod(0o755)
    assert f"{lines.parent} is readable by everybody" in wrong()
    with pytest.raises(PluginInstallError, match="readable by everybody"):
        install_jobcomp(str(etc), libdir=str(lib), lines_path=str(lines))
    lines.parent.chmod(0o750)
    assert wrong() == ""
    (lib / "jobcomp.lua").unlink()
    assert f"calls {lib}/jobcomp.lua, which does not exist" in wrong()
    # Installed again without the option, it would write to another file.
    assert f"steward plugins install --jobcomp {etc} --lines {lines}" in wrong()


def test_a_slurmctld_that_began_without_the_script_is_to_be_restarted(tmp_path: Path) -> None:
    lines = tmp_path / "jobcomp.jsonl"

    def install() -> None:
        install_jobcomp(str(tmp_path), libdir=str(tmp_path / "lib"), lines_path=str(lines))

    def wrong() -> list[str]:
        shown = {"JobCompType": "jobcomp/lua", "BOOT_TIME": "2026-11-21T08:00:00"}
        return check_jobcomp(shown, str(tmp_path))

    install()
    began = datetime.fromisoformat("2026-11-21T08:00:00").timestamp()
    os.utime(tmp_path / "jobcomp.lua", (began + 60, began + 60))
    assert "no line since: restart it: systemctl restart slurmctld" in "".join(wrong())
    lines.write_text("{}\n")
    assert wrong() == []
    lines.unlink()
    os.utime(tmp_path / "jobcomp.lua", (began - 60, began - 60))
    install()  # the same again makes it no newer
    assert wrong() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for others")
def test_a_directory_that_slurmuser_cannot_write_is_said(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        lines = f"{name}/var/jobcomp.jsonl"
        os.mkdir(os.path.dirname(lines), 0o750)
        install_jobcomp(str(tmp_path), libdir=str(tmp_path / "lib"), lines_path=lines)
        shown = {"JobCompType": "jobcomp/lua", "SlurmUser": "nobody(65534)"}
        (said,) = check_jobcomp(shown, str(tmp_path))
        assert f"SlurmUser nobody cannot write {os.path.dirname(lines)}" in said
        os.chown(os.path.dirname(lines), 65534, 65534)
        assert check_jobcomp(shown, str(tmp_path)) == []


@needs_compiler
def test_the_commands(tmp_path: Path, plugstack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--libdir", str(tmp_path / "lib")]
    stack = ["--plugstack", str(plugstack)]
    assert run(["plugins", "build", *where]) == 0
    told = capsys.readouterr().out
    version = told.splitlines()[0].split()[-1].rstrip(".")
    assert f"plugins install --slurm {version} --libdir {tmp_path}/lib\n" in told
    assert run(["plugins", "install", *where, *stack, "--slurm", "33.11"]) == 1
    assert "no build for Slurm 33.11" in capsys.readouterr().err
    spool = str(tmp_path / "spool")
    assert run(["plugins", "install", *where, *stack, "--slurm", version, "--spool", spool]) == 0
    assert spool in capsys.readouterr().out
    prolog = ["--spool", spool, "--prolog"]
    assert run(["plugins", "install", *where, *stack, "--slurm", version, *prolog]) == 0
    assert "Now restart slurmd" in capsys.readouterr().out
    assert run(["plugins", "check", *where, "--slurm", version]) == 0
    assert run(["plugins", "check", *where, "--slurm", "33.11"]) == 1
    assert "33.11" in capsys.readouterr().out
    assert run(["plugins", "build", "--headers", "/a", "--slurm-prefix", "/b"]) == 2


def test_a_node_without_slurm_conf_has_what_slurmctld_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, sent = tmp_path / "etc/plugstack.conf", tmp_path / "run/plugstack.conf"
    conf = Path(f"{own}.d/steward.conf")
    conf.parent.mkdir(parents=True)
    conf.touch()
    sent.parent.mkdir()
    monkeypatch.setattr(installation, "DEFAULT_PLUGSTACK", str(own))
    monkeypatch.setattr(installation, "FETCHED_PLUGSTACK", str(sent))
    assert not installation.has_include(str(own), str(conf))
    sent.write_text(f"include {own}.d/*.conf\n")
    assert installation.has_include(str(own), str(conf))
    own.touch()
    assert not installation.has_include(str(own), str(conf))


def test_an_include_counts_by_whichever_name_of_its_directory(tmp_path: Path) -> None:
    stack = tmp_path / "etc/plugstack.conf"
    conf = Path(f"{stack}.d/steward.conf")
    conf.parent.mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "etc")
    # Also before the file exists: the lines to add are printed first.
    for line, counts in (
        (f"include {stack}.d/*.conf", True),
        ("include plugstack.conf.d/*.conf", True),
        (f"include {tmp_path}/link/plugstack.conf.d/*.conf", True),
        (f"include {tmp_path}/*/plugstack.conf.d/steward.conf", True),
        (f"include {stack}.d/site-*.conf", False),
        (f"include {tmp_path}/other/plugstack.conf.d/*.conf", False),
    ):
        stack.write_text(f"{line}\n")
        assert installation.has_include(str(stack), str(conf)) is counts, line
