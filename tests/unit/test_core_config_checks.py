"""``config check``: problems of valid settings on this host."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from steward.cli.app import run
from steward.core.config import Settings
from steward.core.config.checks import find_extension_problems, find_missing_resources
from steward.core.config.reader import load_settings

BEGIN = '[cluster.c]\nslurm = false\nspool = "/spool"\n'
KAFKA = '[archive.sink.k]\nkind = "kafka"\n[archive.sink.k.broker]\nservers = ["k1:1"]\n'
TOPIC = '[consume.t.broker]\nservers = ["k1:1"]\n'
SEARCH = '[archive.sink.e]\nkind = "{}"\nurls = ["https://e1:1"]\n'


def loaded(tmp_path: Path, text: str) -> Settings:
    path = tmp_path / "steward.toml"
    path.write_text(f'state_dir = "{tmp_path}"\n{BEGIN}{text}')
    return load_settings(str(path))


def doubted(tmp_path: Path, text: str) -> list[str]:
    return [problem.what for problem in find_missing_resources(loaded(tmp_path, text))]


def test_what_is_there_gives_no_doubt(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a:b")
    secret = f'password_file = "{tmp_path}/key"\n'
    limit = '[archive.sink.files.limit.l]\ndays = 1\nusers = ["root", "4242"]\n'
    assert doubted(tmp_path, SEARCH.format("opensearch") + secret + limit + KAFKA + TOPIC) == []


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (SEARCH.format("elasticsearch") + 'password_file = "{}"\n', "archive.sink.e.password_file"),
        (KAFKA + 'tls = "kafka"\n[tls.kafka]\nca_file = "{}"\n', "tls.kafka.ca_file"),
        (TOPIC + 'user = "u"\npassword_file = "{}"\n', "password_file"),
        ('[mybrc]\nusers_file = "{}"\n', "mybrc.users_file"),
        ('[cluster.d]\nspool = "/d"\nslurm_conf = "{}"\n', "cluster.d.slurm_conf"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, text: str, key: str) -> None:
    for path, why in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        [what] = doubted(tmp_path, text.format(path))
        assert key in what
        assert f"cannot read {path}: {why}" in what


def test_nobody_waits_for_the_writer_of_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert doubted(tmp_path, f'[mybrc]\nusers_file = "{tmp_path}/pipe"\n') == []


def test_a_user_who_is_not_there_is_told(tmp_path: Path) -> None:
    text = '[archive.sink.files.limit.l]\ndays = 1\nusers = ["root", "nobody-here"]\n'
    [told] = doubted(tmp_path, text)
    assert told == (
        "'archive.sink.files.limit.l.users': user 'nobody-here' does not exist on this host: "
        "create the user, or name another"
    )


@pytest.mark.parametrize(
    ("text", "module", "package"),
    [
        (KAFKA, "confluent_kafka", "confluent-kafka"),
        (TOPIC, "confluent_kafka", "confluent-kafka"),
    ],
)
def test_a_package_that_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    [what] = doubted(tmp_path, text)
    assert f"the Python package {package} is not installed: " in what


@pytest.mark.parametrize("table", [KAFKA, TOPIC])
@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("linger.mz", "5", "No such configuration property"),
        ("socket.keepalive.enable", "maybe", "Expected bool"),
        ("metadata.max.age.ms", "-7", "outside allowed range"),
        ("metadata.max.age.ms", "60000", ""),
        # Right with others that this one needs.
        ("ssl.keystore.location", "/nowhere", ""),
        ("plugin.library.paths", "/nowhere", ""),
    ],
)
def test_an_option_that_librdkafka_does_not_take(
    tmp_path: Path, table: str, option: str, value: str, why: str
) -> None:
    name = "archive.sink.k" if table == KAFKA else "consume.t"
    text = f'{table}[{name}.broker.options]\n"{option}" = "{value}"\n'
    found = [problem.what for problem in find_extension_problems(loaded(tmp_path, text))]
    assert len(found) == (1 if why else 0)
    assert all(why in what and option in what for what in found)


def test_check_warns_of_what_is_missing_and_refuses_what_is_wrong(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = (
        "[archive.sink.files]\nretention_days = 365\n"
        '[archive.sink.files.limit.a]\nusers = ["nobody-here"]\nmax_bytes = 20_000\n'
        '[archive.sink.files.limit.b]\naccounts = ["physics"]\ndays = 1\n'
    )
    path = str(tmp_path / "steward.toml")
    loaded(tmp_path, limits)
    assert run(["config", "check", "--config", path]) == 0
    told = capfd.readouterr()
    assert "is valid, with 1 warning." in told.out
    assert "from files: scripts older than 365 days\n" in told.out
    assert "from files: scripts beyond 19.5K bytes of each user (users nobody-here)\n" in told.out
    assert "from files: scripts older than 1 day (accounts physics)\n" in told.out
    assert f"{path}:8: 'archive.sink.files.limit.a.users': user 'nobody-here' does not" in told.err
    loaded(tmp_path, KAFKA + '[archive.sink.k.broker.options]\n"linger.mz" = "1"\n')
    assert run(["config", "check", "--config", path]) == 2
    assert f"{path}:10: librdkafka rejects 'linger.mz'" in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask for others")
def test_a_key_that_stewards_user_cannot_read_is_told(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        here = Path(name)
        for what in ("crt", "key"):
            (here / what).touch(0o600)
        text = '[nodes]\nlisten = "0.0.0.0:1"\ntls = "t"\n[web]\ntls = "t"\n'
        text += f'[tls.t]\ncertificate_file = "{here}/crt"\nkey_file = "{here}/key"\n'
        assert doubted(tmp_path, text) == []
        os.chown(tmp_path, 65534, 65534)
        os.chown(here / "crt", 65534, 65534)
        [told] = doubted(tmp_path, text)
    assert f"'tls.t.key_file': Steward's user nobody cannot read {here}/key" in told


def test_check_tells_where_facts_on_jobs_come_from(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = f'jobcomp_lines = "{tmp_path}/none/lines"\n[nodes]\nlisten = "0.0.0.0:6826"\n'
    text += '[mail]\nprogram = "/usr/bin/mail"\n'
    loaded(tmp_path, text)
    assert run(["config", "check", "--config", str(tmp_path / "steward.toml")]) == 0
    told = capfd.readouterr()
    assert f"  jobcomp   of c in {tmp_path}/none/lines\n" in told.out
    assert "  nodes     at 0.0.0.0:6826, authenticated by MUNGE\n" in told.out
    assert "  plugins   jobacct/log\n" in told.out
    assert "  mail      by /usr/bin/mail\n" in told.out
    assert f"{tmp_path}/none does not exist" in told.err


def test_check_tells_whether_munge_or_a_certificate_authenticates(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(tables: str) -> str:
        path = tmp_path / "steward.toml"
        path.write_text(f'state_dir = "{tmp_path}"\n{tables}')
        assert run(["config", "check", "--config", str(path)]) == 0
        return capfd.readouterr().out

    forward = f'[cluster.c]\nspool = "{tmp_path}/spool"\n[forward]\nto = "steward:6825"\n'
    tls = 'tls = "t"\n[tls.t]\n'
    certificate = 'certificate_file = "/c"\nkey_file = "/k"\n'
    assert "  forwards  to steward:6825, authenticated by MUNGE\n" in told(forward)
    assert "authenticated by MUNGE, encrypted\n" in told(f'{forward}{tls}ca_file = "/ca"\n')
    assert "authenticated by certificates, encrypted\n" in told(forward + tls + certificate)
    receive = '[cluster.c]\nremote = true\ncontrollers = ["h"]\n[receive]\nlisten = "[::]:6825"\n'
    assert "  receives  at [::]:6825, authenticated by MUNGE\n" in told(receive)
    assert "authenticated by MUNGE, encrypted\n" in told(receive + tls + certificate)
    by_certificate = f'{receive}{tls}{certificate}client_ca_file = "/ca"\n'
    assert "authenticated by certificates, encrypted\n" in told(by_certificate)


def test_the_triggers_secret_is_looked_for_where_triggers_are_kept_set(tmp_path: Path) -> None:
    def told(more: str) -> list[str]:
        path = tmp_path / "steward.toml"
        path.write_text(f'state_dir = "{tmp_path}"\n[cluster.c]\n[sensor]\nenabled = true\n{more}')
        return [problem.what for problem in find_missing_resources(load_settings(str(path)))]

    assert told("helper = ''\n") == []
    (missing,) = told("")
    assert "sensor.secret_file" in missing
