"""Health checks of the host: files, permissions, disk space, and paths in settings."""

import os
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from harness.doctor import DoctorSite, only, site
from steward.admin.doctor import host_checks
from steward.admin.doctor.host_checks import check_config_file
from steward.capture.settings import NodesSettings
from steward.core.section import TlsSettings
from steward.web.settings import HEALTHY_BODY, WebSettings

__all__ = ["site"]


@pytest.mark.parametrize(
    ("mode", "status"),
    [(0o640, "ok"), (0o600, "ok"), (0o644, "warning"), (0o646, "wrong"), (0o622, "wrong")],
)
def test_who_may_change_the_configuration(tmp_path: Path, mode: int, status: str) -> None:
    path = tmp_path / "steward.toml"
    path.touch()
    path.chmod(mode)
    found = check_config_file(str(path))
    assert found.status == status
    assert all("chmod" in line for line in found.fix)


def test_a_configuration_that_is_not_there_is_made_by_init(tmp_path: Path) -> None:
    assert check_config_file(str(tmp_path / "none")).fix == ("steward init",)


def test_a_state_directory_is_nobody_elses(site: DoctorSite) -> None:
    assert only(host_checks.check_state_directory(site.ground())).status == "wrong"  # none yet
    state = site.directory / "state"
    state.mkdir(mode=0o700)
    (state / "journal.db").touch()
    assert only(host_checks.check_state_directory(site.ground())).status == "ok"
    state.chmod(0o755)
    found = only(host_checks.check_state_directory(site.ground()))
    assert (found.status, found.fix) == ("wrong", (f"chmod 0700 {state}",))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_that_the_daemon_cannot_use_is_named(site: DoctorSite) -> None:
    state = site.directory / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 12345, 12345)
    (state / "gate.db-wal").touch()
    found = only(host_checks.check_state_directory(site.ground()))
    assert found.status == "wrong"
    assert "gate.db-wal" in found.finding
    assert found.fix == (f"chown -R 12345: {state}",)


def test_a_damaged_database_is_named(site: DoctorSite) -> None:
    state = site.directory / "state"
    state.mkdir(mode=0o700)
    (state / "jobs.db").write_bytes(b"no database at all" * 100)
    (state / "accounting-log.db").touch()
    ok, wrong = host_checks.check_state_directory(site.ground())
    assert (ok.status, wrong.status) == ("ok", "wrong")
    assert wrong.checked == f"{state}/jobs.db"
    assert "file is not a database" in wrong.finding


@pytest.mark.skipif(os.geteuid() != 0, reason="only root follows no links of others")
def test_the_catalogs_link_to_its_generation_is_no_database(site: DoctorSite) -> None:
    state = site.directory / "state"
    generation = state / "catalog" / "g1"
    generation.mkdir(mode=0o700, parents=True)
    state.chmod(0o700)
    (generation / "cursor.db").touch()
    link = generation.parent / "current"
    link.symlink_to("g1")
    for path in (state, *state.rglob("*")):
        os.chown(path, 12345, 12345, follow_symlinks=False)
    assert only(host_checks.check_state_directory(site.ground())).status == "ok"
    (generation / "cursor.db").write_bytes(b"no database at all" * 100)
    _, wrong = host_checks.check_state_directory(site.ground())
    assert wrong.checked == str(generation / "cursor.db")


def statvfs(blocks: int, free: int, files: int = 1000, files_free: int = 1000) -> os.statvfs_result:
    """Report blocks of 4 KiB."""
    return os.statvfs_result(
        (4096, 4096, blocks, free, free, files, files_free, files_free, 0, 255)
    )


@pytest.mark.parametrize(
    ("status", "of"),
    [
        (statvfs(1_000_000, 500_000), "ok"),
        (statvfs(1_000_000, 50_000), "warning"),
        (statvfs(1_000_000, 1_000), "wrong"),
        # A hundredth of a petabyte is enough.
        (statvfs(250_000_000_000, 2_500_000_000), "ok"),
        (statvfs(1_000_000, 500_000, files_free=50), "warning"),
        (statvfs(1_000_000, 500_000, files_free=1), "wrong"),
        (statvfs(1_000_000, 500_000, files=0, files_free=0), "ok"),
    ],
)
def test_how_much_room_is_enough(status: os.statvfs_result, of: str) -> None:
    assert host_checks.check_free_space("state", "/x", status).status == of


def test_every_place_that_is_written_to_is_looked_at(site: DoctorSite) -> None:
    ((name, sink),) = site.settings.files_sinks().items()
    path = site.settings.sink_path(name)
    assert list(host_checks.list_written_places(site.settings)) == [
        ("state", site.settings.state_dir),
        (f"archive.{name}", path),
    ]
    moving = msgspec.structs.replace(sink, move_to="/common/scripts")
    archive = msgspec.structs.replace(site.settings.archive, sink={name: moving})
    site.reopen(archive=archive)
    assert list(host_checks.list_written_places(site.settings))[2:] == [
        (f"archive.{name} (move_to)", "/common/scripts")
    ]


def test_munge_is_looked_at_where_pages_use_it(site: DoctorSite) -> None:
    assert only(host_checks.check_munge(site.ground())).status == "skipped"
    socket = str(site.directory / "munge.sock")
    web = WebSettings(listen="127.0.0.1:1", munge_socket=socket)
    site.reopen(web=web)
    found = only(host_checks.check_munge(site.ground()))
    assert (found.status, found.checked) == ("warning", socket)
    assert "MUNGE fails, so commands on other hosts need tokens" in found.finding
    site.reopen(web=msgspec.structs.replace(web, munge_from=()))
    assert only(host_checks.check_munge(site.ground())).status == "skipped"


def test_a_password_that_everybody_may_read(site: DoctorSite, tmp_path: Path) -> None:
    key = tmp_path / "steward.key"
    key.touch(mode=0o640)
    tls = TlsSettings(certificate_file=str(key), key_file=str(key))
    nodes = NodesSettings(listen="127.0.0.1:1", tls=tls)
    site.reopen(nodes=nodes, web=WebSettings(tls=tls), tls={"t": tls})
    assert only(host_checks.check_secret_files(site.ground())).finding == "1 file, private"
    key.chmod(0o644)
    found = only(host_checks.check_secret_files(site.ground()))
    assert (found.status, found.fix) == ("wrong", (f"chmod o= {key}",))


def test_what_the_settings_name_and_is_not_there(site: DoctorSite) -> None:
    tls = TlsSettings(certificate_file="/nowhere/cert")
    nodes = NodesSettings(listen="127.0.0.1:1", tls=tls)
    site.reopen(nodes=nodes, web=WebSettings(tls=tls), tls={"t": tls})
    found = only(host_checks.check_settings_resources(site.ground()))
    assert found.status == "warning"
    assert "/nowhere/cert" in found.finding


class Other(BaseHTTPRequestHandler):
    """Foreign program at the port of the pages."""

    def do_GET(self) -> None:
        is_health = self.path == "/healthz"
        words = self.server.words if is_health else b"hello"  # type: ignore[attr-defined] # set below
        self.send_response(200)
        self.end_headers()
        self.wfile.write(words)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_another_program_at_the_port_is_not_taken_for_the_pages(site: DoctorSite) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        web = WebSettings(listen=f"127.0.0.1:{server.server_port}", url="http://steward.test")
        site.reopen(web=web)
        server.words = b"hello"  # type: ignore[attr-defined] # read above
        (found,) = (
            one for one in host_checks.check_web_server(site.ground()) if one.object != "static"
        )
        assert (found.status, "another program answers" in found.finding) == ("wrong", True)
        server.words = HEALTHY_BODY  # type: ignore[attr-defined] # read above
        (found,) = (
            one for one in host_checks.check_web_server(site.ground()) if one.object != "static"
        )
        assert found.status == "ok"
        unnamed = msgspec.structs.replace(web, url="")
        site.reopen(web=unnamed)
        told = {one.object: one for one in host_checks.check_web_server(site.ground())}
        assert (told["url"].status, told["url"].checked) == ("warning", "[web] url")
        server.shutdown()
