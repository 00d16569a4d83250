"""``steward init``: a configuration from Slurm's settings, and the next steps."""

import os
import pty
import pwd
import select
import stat
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from harness.commands import steward
from harness.slurm import Stage
from steward.admin import init
from steward.admin.init import (
    InitOptions,
    SetupError,
    SlurmSite,
    list_steps,
    query_site,
    render_config_text,
    write_configuration,
)
from steward.archive.settings import FilesSinkSettings
from steward.core.config.reader import ConfigError, load_settings
from steward.core.files import find_network_type

ME = pwd.getpwuid(os.geteuid()).pw_name
SHOWN = {
    "ClusterName": "hpc1",
    "SlurmUser": f"{ME}({os.geteuid()})",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "StateSaveLocation": "/var/spool/slurmctld",
    "JobCompType": "(null)",
}


def wishes_in(root: Path, **wanted: object) -> InitOptions:
    wishes = InitOptions(
        cluster="hpc1",
        user=ME,
        archive_dir=f"{root}/srv/archive",
        state_dir=f"{root}/var/lib/steward",
        out=f"{root}/etc/steward",
        jobcomp_lines=f"{root}/var/spool/steward/jobcomp.jsonl",
    )
    return msgspec.structs.replace(wishes, **wanted)


def shown_by(stage: Stage, **changes: str) -> None:
    lines = [f"{name:<23} = {value}" for name, value in {**SHOWN, **changes}.items()]
    stage.answer("scontrol show config", "Configuration data as of now\n" + "\n".join(lines) + "\n")


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_what_is_written_is_a_configuration_of_what_was_wanted(tmp_path: Path) -> None:
    wishes = wishes_in(tmp_path, nodes="0.0.0.0:6826", bank=True, web="127.0.0.1:8290")
    path = tmp_path / "one.toml"
    path.write_text(render_config_text(wishes, SlurmSite(config=SHOWN)))
    settings = load_settings(str(path))
    assert list(settings.cluster) == ["hpc1"]
    assert settings.cluster["hpc1"].jobcomp_lines == wishes.jobcomp_lines
    assert settings.cluster["hpc1"].slurm_conf == ""
    sink = settings.archive.sink["files"]
    assert isinstance(sink, FilesSinkSettings)
    assert sink.path == wishes.archive_dir
    assert (settings.nodes.listen, settings.nodes.listener) == ("0.0.0.0:6826", "")
    assert settings.bank.enabled
    assert settings.web.listen == "127.0.0.1:8290"
    assert not settings.sensor.enabled
    assert not settings.rules.is_enabled
    assert settings.actions.programs_file == f"{wishes.out}/programs"


def test_little_is_written_where_little_is_wanted(tmp_path: Path) -> None:
    path = tmp_path / "one.toml"
    path.write_text(
        render_config_text(
            wishes_in(tmp_path, jobcomp_lines=""),
            SlurmSite(config=SHOWN, slurm_bin="/opt/slurm/bin"),
        )
    )
    settings = load_settings(str(path))
    assert settings.cluster["hpc1"].jobcomp_lines == ""
    assert settings.cluster["hpc1"].slurm_bin == "/opt/slurm/bin"
    assert (settings.nodes.listen, settings.web.listen, settings.bank.enabled) == ("", "", False)


def test_the_comment_on_the_bank_stands_above_its_section(tmp_path: Path) -> None:
    text = render_config_text(wishes_in(tmp_path, bank=True), SlurmSite(config=SHOWN))
    assert "until 'steward bank mode enforce'.\n[bank]\nenabled = true\n" in text


def test_plugstack_conf_is_where_slurm_says_or_beside_slurm_conf(tmp_path: Path) -> None:
    assert SlurmSite(config=SHOWN).plugstack == "/etc/slurm/plugstack.conf"
    named = {**SHOWN, "PlugStackConfig": "/opt/slurm/plugstack.conf"}
    assert SlurmSite(config=named).plugstack == "/opt/slurm/plugstack.conf"


@pytest.mark.parametrize("text", ["", "include {}.d/*.conf\n"])
def test_a_plugstack_conf_that_includes_ours_is_left_alone(tmp_path: Path, text: str) -> None:
    plugstack = tmp_path / "plugstack.conf"
    plugstack.write_text(text.format(plugstack))
    shown = {**SHOWN, "PlugStackConfig": str(plugstack)}
    options = wishes_in(tmp_path, nodes="0.0.0.0:6826", jobcomp_lines="")
    _, step = list_steps(options, SlurmSite(config=shown))
    include = f"{plugstack}: include {plugstack}.d/*.conf"
    assert (include in step.commands) == (not text)
    assert f"steward plugins check --plugstack {plugstack}" in "\n".join(step.commands)


def test_files_are_made_for_whom_they_are(tmp_path: Path) -> None:
    wishes = wishes_in(tmp_path)
    umask = os.umask(0o077)
    try:
        written = write_configuration(wishes, SlurmSite(config=SHOWN))
    finally:
        os.umask(umask)
    assert written == [
        *(wishes.path, f"{wishes.out}/programs", f"{wishes.out}/rules.d"),
        *(wishes.state_dir, wishes.archive_dir, f"{tmp_path}/var/spool/steward"),
    ]
    assert mode_of(wishes.path) == 0o640
    assert mode_of(wishes.state_dir) == 0o700
    assert mode_of(wishes.archive_dir) == 0o755
    assert mode_of(f"{wishes.out}/programs") == 0o644
    assert mode_of(f"{wishes.out}/rules.d") == 0o755
    assert set(os.listdir(wishes.out)) == {"steward.toml", "programs", "rules.d"}


def test_nothing_that_is_there_is_lost(tmp_path: Path) -> None:
    wishes = wishes_in(tmp_path)
    write_configuration(wishes, SlurmSite(config=SHOWN))
    Path(wishes.path).write_text("[cluster.mine]\n")
    Path(wishes.out, "programs").write_text("/usr/local/bin/mine\n")
    with pytest.raises(SetupError, match="exists already: edit it, or replace it with --force"):
        write_configuration(wishes, SlurmSite(config=SHOWN))
    assert Path(wishes.path).read_text() == "[cluster.mine]\n"
    written = write_configuration(wishes, SlurmSite(config=SHOWN), force=True)
    assert written == [f"{wishes.path}.old", wishes.path]
    assert Path(f"{wishes.path}.old").read_text() == "[cluster.mine]\n"
    assert Path(wishes.out, "programs").read_text() == "/usr/local/bin/mine\n"
    assert list(load_settings(wishes.path).cluster) == ["hpc1"]


def test_what_makes_no_configuration_leaves_the_old_one(tmp_path: Path) -> None:
    wishes = wishes_in(tmp_path)
    write_configuration(wishes, SlurmSite(config=SHOWN))
    wrong = msgspec.structs.replace(wishes, cluster="no.name")
    with pytest.raises(ConfigError):
        write_configuration(wrong, SlurmSite(config=SHOWN), force=True)
    assert list(load_settings(wishes.path).cluster) == ["hpc1"]
    assert not os.path.exists(f"{wishes.path}.old")
    assert not [name for name in os.listdir(wishes.out) if name.startswith(".")]


def test_a_user_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="unknown user 'nobody-here'"):
        write_configuration(wishes_in(tmp_path, user="nobody-here"), SlurmSite(config=SHOWN))
    assert not os.path.exists(tmp_path / "etc")


def test_a_state_directory_on_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_network_type(str(tmp_path)) == ""
    monkeypatch.setattr(init, "find_network_type", lambda _: "NFS")
    with pytest.raises(SetupError, match="is on NFS: choose a local disk with --state-dir"):
        write_configuration(wishes_in(tmp_path), SlurmSite(config=SHOWN))


def test_a_file_where_a_directory_is_to_be(tmp_path: Path) -> None:
    (tmp_path / "srv").mkdir()
    (tmp_path / "srv/archive").touch()
    with pytest.raises(SetupError, match="is not a directory"):
        write_configuration(wishes_in(tmp_path), SlurmSite(config=SHOWN))


def test_the_steps_come_in_the_order_of_adoption(tmp_path: Path) -> None:
    everything = wishes_in(tmp_path, nodes="0.0.0.0:6826", bank=True, web="127.0.0.1:8290")
    found = list(
        list_steps(everything, SlurmSite(config={**SHOWN, "JobSubmitPlugins": "lua,site"}))
    )
    first = [step.title.split(",")[0].split(":")[0] for step in found]
    assert first == [
        "The archive",
        "Job ends",
        "Resource use of steps and tasks",
        "The bank in mode observe",
        "The gate",
        "The web pages and the API",
    ]
    assert "systemctl enable --now steward-listen" not in found[2].commands
    apart = msgspec.structs.replace(everything, listener="steward-listen")
    told = list(list_steps(apart, SlurmSite(config=SHOWN)))[2]
    assert told.commands[0] == "systemctl enable --now steward-listen"
    path = tmp_path / "apart.toml"
    path.write_text(render_config_text(apart, SlurmSite(config=SHOWN)))
    assert load_settings(str(path)).nodes.listener == "steward-listen"
    assert found[-1].commands == (
        "systemctl enable --now steward-web",
        f"steward login --config {everything.path}",
    )
    assert "set [web] url" in found[-1].note
    named = msgspec.structs.replace(everything, web_url="https://steward.example.org")
    assert list(list_steps(named, SlurmSite(config=SHOWN)))[-1].note == ""
    lines = [line for step in found for line in step.commands]
    assert "/etc/slurm/slurm.conf: JobCompType=jobcomp/lua" in lines
    assert "/etc/slurm/slurm.conf: JobSubmitPlugins=site,lua" in lines
    (alone,) = list_steps(wishes_in(tmp_path, jobcomp_lines=""), SlurmSite(config=SHOWN))
    # The unit lets Steward write to init's default archive, and nowhere else.
    assert any("ReadWritePaths=" in line for line in alone.commands)
    usual = wishes_in(tmp_path, jobcomp_lines="", archive_dir="/srv/steward/archive", user="slurm")
    (alone,) = list_steps(usual, SlurmSite(config=SHOWN))
    assert not any("systemctl edit" in line for line in alone.commands)


def test_a_submit_script_of_the_sites_own_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "job_submit.lua").write_text("-- ours\n")
    shown = {**SHOWN, "SLURM_CONF": f"{tmp_path}/slurm.conf"}
    *_, gate = list_steps(wishes_in(tmp_path, bank=True), SlurmSite(config=shown))
    assert "job_submit.lua is the site's own" in gate.note


def test_what_slurm_says_is_what_is_proposed(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    shown_by(stage, SlurmUser="slurmer(64030)", JobCompType="jobcomp/elasticsearch")
    site = query_site(slurm_bin=str(tmp_path))
    assert (site.cluster, site.slurm_user, site.conf_dir) == ("hpc1", "slurmer", "/etc/slurm")
    assert site.jobcomp == "jobcomp/elasticsearch"
    stage.answer("scontrol show config", "", 1)
    with pytest.raises(SetupError, match="slurmctld does not answer: run this on its host"):
        query_site(slurm_bin=str(tmp_path))


def words(root: Path) -> list[str]:
    return [
        *("init", "--slurm-bin", str(root), "--out", f"{root}/etc", "--archive-dir", f"{root}/a"),
        *("--state-dir", f"{root}/state", "--lines", f"{root}/lines/jobcomp.jsonl"),
    ]


def test_the_command_asks_nothing_where_nobody_can_answer(tmp_path: Path) -> None:
    shown_by(Stage(tmp_path))
    done = steward(*words(tmp_path))
    assert done.returncode == 0, done.stderr
    out = done.stdout.decode()
    assert f"Wrote {tmp_path}/etc/steward.toml." in out
    assert "steward plugins install --jobcomp /etc/slurm" in out
    assert list(load_settings(f"{tmp_path}/etc/steward.toml").cluster) == ["hpc1"]
    again = steward(*words(tmp_path))
    assert again.returncode == 1
    assert again.stderr.count(b"\n") == 1


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    shown_by(Stage(tmp_path), JobCompType="jobcomp/kafka")
    done = steward(*words(tmp_path), "--yes")
    assert "JobCompType is jobcomp/kafka" in done.stdout.decode()
    assert load_settings(f"{tmp_path}/etc/steward.toml").cluster["hpc1"].jobcomp_lines == ""


def test_a_path_that_is_not_whole(tmp_path: Path) -> None:
    shown_by(Stage(tmp_path))
    done = steward("init", "--yes", "--slurm-bin", str(tmp_path), "--out", "here")
    assert done.returncode == 2
    assert b"--out must be an absolute path" in done.stderr


def test_a_person_is_asked(tmp_path: Path) -> None:
    shown_by(Stage(tmp_path))
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "steward", *words(tmp_path)],
        stdin=other,
        stdout=subprocess.PIPE,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    said = ""

    def answer(question: str, text: str) -> None:
        nonlocal said
        until = time.monotonic() + 60
        while question not in said:
            assert select.select([main], [], [], until - time.monotonic())[0], said
            said += os.read(main, 4096).decode()
        said = ""
        os.write(main, f"{text}\n".encode())

    try:
        answer("Record job ends that slurmctld reports [Y/n]", "")
        answer("Name of the cluster [hpc1]", "tower")
        answer(f"User that Steward runs as [{ME}]", "")
        answer("Receive usage reports of nodes [y/N]", "y")
        answer("Address [0.0.0.0:6826]", "")
        answer("Enable the bank, in mode observe (rejects no jobs) [y/N]", "y")
        answer("Record state changes of nodes [y/N]", "n")
        answer("Serve web pages [y/N]", "y")
        answer("Address [127.0.0.1:8290]", "")
        answer("URL of the pages in users' browsers", "https://steward.example.org")
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(main)
    assert process.returncode == 0
    assert b"4. The bank" in out
    settings = load_settings(f"{tmp_path}/etc/steward.toml")
    assert list(settings.cluster) == ["tower"]
    assert (settings.nodes.listen, settings.web.listen) == ("0.0.0.0:6826", "127.0.0.1:8290")
    assert settings.web.url == "https://steward.example.org"
