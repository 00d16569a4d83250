"""Installation of the submit plugin, and its check before slurmctld loads it."""

import os
import shutil
from pathlib import Path

import pytest

from harness.native import needs_compiler
from steward.admin.plugins import job_submit, spank
from steward.admin.plugins.build import (
    SUBMIT_LIBRARY,
    PluginBuild,
    SlurmVersion,
    build_plugins,
    find_build,
)
from steward.admin.plugins.errors import PluginInstallError
from steward.admin.plugins.job_submit import (
    LUA_FILES,
    check_submit,
    install_submit,
    install_submit_lua,
)
from steward.admin.plugins.spank import check_library
from steward.cli.app import run

HEADERS = "/usr/include"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> PluginBuild:
    return build_plugins(HEADERS, str(tmp_path_factory.mktemp("lib")))


def directory_of(built: PluginBuild) -> str:
    return os.path.dirname(built.path)


def shown(plugins: str, *directories: str) -> dict[str, str]:
    return {"JobSubmitPlugins": plugins, "PluginDir": ":".join(["/usr/lib/slurm", *directories])}


@needs_compiler
def test_a_build_says_what_it_is(built: PluginBuild) -> None:
    path = os.path.join(directory_of(built), SUBMIT_LIBRARY)
    seen = spank.inspect_library(path)
    assert (seen.type, seen.missing) == ("job_submit/steward", [])
    assert SlurmVersion.from_number(seen.version) == built.version
    assert check_library(path, built.version, is_exact=True) == []
    other = SlurmVersion(built.version.major, built.version.minor, built.version.micro + 1)
    assert check_library(path, other) == []
    (wrong,) = check_library(path, other, is_exact=True)
    assert f"was built for Slurm {built.version}, not for {other}" in wrong


@needs_compiler
def test_only_a_build_of_the_same_patch_level_is_taken(built: PluginBuild) -> None:
    libdir = os.path.dirname(directory_of(built))
    version = built.version
    later = SlurmVersion(version.major, version.minor, version.micro + 1)
    assert find_build(libdir, later) == built
    assert find_build(libdir, later, SUBMIT_LIBRARY) is None
    assert find_build(libdir, version, SUBMIT_LIBRARY) == built


@needs_compiler
def test_slurmctld_starts_with_a_build_for_it_in_any_directory(
    built: PluginBuild, tmp_path: Path
) -> None:
    ours = directory_of(built)
    (tmp_path / SUBMIT_LIBRARY).write_text("no library")
    check = check_submit
    assert check(shown("lua,steward", ours), built.version) == []
    assert check(shown("job_submit/steward", str(tmp_path), ours), built.version) == []
    (missing,) = check(shown("steward"), built.version)
    assert missing == (
        f"slurmctld {built.version} would not start: no directory of PluginDir (/usr/lib/slurm) "
        "has job_submit_steward.so"
    )
    coming = SlurmVersion(built.version.major + 1, 5, 1)
    (stop,) = check(shown("steward", ours), coming)
    assert f"slurmctld {coming} would not start: " in stop
    assert "build it again" in stop
    (vague,) = check(shown("steward", ours), SlurmVersion(24, 11))
    assert vague.endswith("give --slurm 24.11.N")


@needs_compiler
def test_what_stands_behind_it_is_named(built: PluginBuild) -> None:
    ours = directory_of(built)
    (order,) = check_submit(shown("steward,lua,defaults", ours), built.version)
    assert order.startswith("JobSubmitPlugins has lua, defaults after steward")
    for plugins in ("(null)", "", "defaults"):
        (none,) = check_submit(shown(plugins, ours), built.version)
        assert "slurmctld asks the gate only with steward or lua in it" in none


@needs_compiler
def test_installing_says_what_slurm_conf_is_to_say(built: PluginBuild, tmp_path: Path) -> None:
    libdir = str(tmp_path / "lib")
    ours = f"{libdir}/{built.version}"
    done = install_submit(built, libdir=libdir, config=shown("lua"))
    assert done.written_paths == (f"{ours}/{SUBMIT_LIBRARY}",)
    assert done.remaining[:2] == (
        f"set in slurm.conf: PluginDir=/usr/lib/slurm:{ours}",
        "set in slurm.conf: JobSubmitPlugins=lua,steward",
    )
    again = install_submit(built, libdir=libdir, config=shown("lua,steward", ours))
    assert again.remaining == ()
    assert check_submit(shown("lua,steward", ours), built.version) == []


def test_a_site_without_a_script_gets_one_of_five_lines(tmp_path: Path) -> None:
    etc, libdir = tmp_path / "etc", tmp_path / "lib"
    etc.mkdir()
    done = install_submit_lua(str(etc), libdir=str(libdir), cluster="c1")
    script = (etc / "job_submit.lua").read_text()
    assert f'dofile("{libdir}/steward_gate.lua")' in script
    assert 'steward_gate_cluster = "c1"' in script
    assert {path.name for path in libdir.iterdir()} == set(LUA_FILES)
    assert done == install_submit_lua(str(etc), libdir=str(libdir), cluster="c1")
    with pytest.raises(PluginInstallError, match="invalid cluster name"):
        install_submit_lua(str(etc), libdir=str(libdir), cluster='"..os.exit()..')


def test_a_sites_own_script_is_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "job_submit.lua"
    script.write_text("-- the site's\n")
    with pytest.raises(
        PluginInstallError, match=r"local steward = dofile\(.*return steward\.submit"
    ):
        install_submit_lua(str(tmp_path), libdir=str(tmp_path / "lib"))
    assert script.read_text() == "-- the site's\n"


def test_a_script_that_does_not_call_it_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = SlurmVersion(22, 5, 8)

    def check() -> list[str]:
        return check_submit(shown("lua"), version, directory=str(tmp_path))

    monkeypatch.setattr(job_submit, "find_lua_sockets", lambda: ["/usr/lib/lua/5.1/socket/unix.so"])
    assert "No such file" in check()[0]
    script = tmp_path / "job_submit.lua"
    script.write_text("function slurm_job_submit() return 0 end\n-- steward.submit(\n")
    assert check()[0].startswith(f"{script} does not call steward's submit")
    script.unlink()
    install_submit_lua(str(tmp_path), libdir=str(tmp_path / "lib"))
    assert check() == []
    shutil.rmtree(tmp_path / "lib")
    assert check() == [f"{script} calls {tmp_path}/lib/steward_gate.lua, which does not exist"]
    monkeypatch.setattr(job_submit, "find_lua_sockets", list)
    assert "install lua-socket" in check()[1]


@needs_compiler
def test_the_command_line(
    built: PluginBuild, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    libdir = os.path.dirname(directory_of(built))
    words = ["plugins", "install", "--job-submit", "--slurm", str(built.version)]
    more = ["--slurm-prefix", "/nowhere", "--from", libdir, "--libdir", str(tmp_path / "lib")]
    assert run([*words, *more]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/lib/{built.version}/{SUBMIT_LIBRARY}\n" in said
    assert "Now set in slurm.conf: JobSubmitPlugins=steward\n" in said
    assert run(["plugins", "install", "--job-submit-lua", str(tmp_path), *more[4:]]) == 0
    assert "Now set in slurm.conf: JobSubmitPlugins=lua" in capsys.readouterr().out
    assert run([*words[:3], "--slurm", "19.05.1", *more]) != 0
    assert "run 'steward plugins build'" in capsys.readouterr().err
