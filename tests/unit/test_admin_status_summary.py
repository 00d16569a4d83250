"""Status summary: permissions and disks."""

import logging
import os
import pwd
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from harness.events import at
from harness.site import NOBODY, ROOT
from steward.admin.status.requests import MetricsRequest, StatusShowRequest
from steward.archive.settings import FilesSinkSettings
from steward.core.access import Caller, ScopeRefused
from steward.core.config import AccessSettings, ArchiveSettings, Settings
from steward.core.errors import PermissionRefused
from steward.core.files import write_status
from steward.core.logs import LogLimit
from steward.core.script_stores import HungCount
from steward.core.sqlite import open_database
from steward.daemon.contexts import make_registry
from steward.extensions.controllers.settings import ForwardSettings
from steward.slurm.settings import ClusterSettings
from steward.web.settings import WebSettings


def settings_in(directory: Path, *, forward: str = "", web_user: str = "") -> Settings:
    (directory / "state").mkdir(exist_ok=True)
    return Settings(
        state_dir=str(directory / "state"),
        cluster={"c1": ClusterSettings(slurm=False)},
        archive=ArchiveSettings(sink={"a": FilesSinkSettings(path=str(directory / "archive"))}),
        forward=ForwardSettings(to=forward),
        web=WebSettings(user=web_user),
    )


def test_the_disk_of_each_archive_is_shown(tmp_path: Path) -> None:
    (tmp_path / "archive").mkdir()
    registry = make_registry(settings_in(tmp_path))
    answer = registry.call("status.show", ROOT, StatusShowRequest())
    assert {disk.purpose: disk.path for disk in answer.disks} == {
        "state": str(tmp_path / "state"),
        "archive a": str(tmp_path / "archive"),
    }
    assert all(0 < disk.free <= disk.total for disk in answer.disks)
    registry = make_registry(settings_in(tmp_path, forward="https://books.example.org:6830"))
    answer = registry.call("status.show", ROOT, StatusShowRequest())
    assert [disk.purpose for disk in answer.disks] == ["state"]


def test_an_archive_that_is_not_mounted_is_unknown_with_its_error(tmp_path: Path) -> None:
    registry = make_registry(settings_in(tmp_path))
    answer = registry.call("status.show", ROOT, StatusShowRequest())
    assert [disk.purpose for disk in answer.disks] == ["state"]
    reason = f"{tmp_path / 'archive'}: No such file or directory"
    assert answer.unknown["disk of archive a"] == reason


def test_an_operators_narrow_token_sees_all_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("steward.core.access.RAISED_RIGHTS_LIMIT", LogLimit())
    settings = msgspec.structs.replace(
        settings_in(tmp_path), access=AccessSettings(operators=("olga",))
    )
    asker = Caller(uid=4000, user="olga", how="token", scopes=frozenset({"read"}))
    registry = make_registry(settings)
    answer = registry.call("status.show", asker, StatusShowRequest())
    by_root = registry.call("status.show", ROOT, StatusShowRequest())
    assert answer.unknown == by_root.unknown
    assert "rights raised: olga (token, uid 4000) runs status.show as" in caplog.text
    with pytest.raises(ScopeRefused):
        registry.call("journal.status", asker, registry.decode("journal.status", {}))


def test_a_count_of_files_that_hangs_is_unknown_with_its_process(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    count = HungCount(pid=4711, since=at(0), directories=("/srv/archive/.incoming",))
    write_status(f"{settings.state_dir}/incoming-count.json", count)
    answer = make_registry(settings).call("status.show", ROOT, StatusShowRequest())
    assert answer.unknown["incoming files"] == (
        "cannot count the files in /srv/archive/.incoming: pid 4711 hangs since "
        "2026-03-01T12:00:00+00:00 and cannot be killed. Repair the file system: Steward counts "
        "again when the process has ended"
    )


@pytest.mark.parametrize("damage", ["a directory", "no database"])
def test_missed_scripts_are_unknown_while_jobs_db_cannot_be_read(
    damage: str, tmp_path: Path
) -> None:
    registry = make_registry(settings_in(tmp_path))
    answer = registry.call("status.show", ROOT, StatusShowRequest())
    assert [cluster.missed_scripts for cluster in answer.clusters] == [0]
    assert "missed scripts" not in answer.unknown
    path = tmp_path / "state/jobs.db"
    if damage == "a directory":
        path.mkdir()
    else:
        path.write_bytes(b"no database" * 1000)
    registry = make_registry(settings_in(tmp_path))
    answer = registry.call("status.show", ROOT, StatusShowRequest())
    assert [cluster.missed_scripts for cluster in answer.clusters] == [None]
    assert str(path) in answer.unknown["missed scripts"]
    text = registry.call("status.metrics", ROOT, MetricsRequest()).text
    assert "steward_missed_scripts_total{" not in text


@pytest.mark.skipif(os.geteuid() != 0, reason="the state directory is another user's")
def test_metrics_are_for_operators_and_the_web_process(tmp_path: Path) -> None:
    entry = pwd.getpwnam("nobody")
    web_process = Caller(uid=entry.pw_uid, user="nobody")
    registry = make_registry(settings_in(tmp_path, web_user="nobody"))
    text = registry.call("status.metrics", web_process, MetricsRequest()).text
    assert "steward_up 0.0" in text
    with pytest.raises(
        PermissionRefused, match="only operators and the user of 'steward web' may read metrics"
    ):
        registry.call("status.metrics", NOBODY, MetricsRequest())
    registry = make_registry(settings_in(tmp_path, web_user="nobody-here"))
    with pytest.raises(
        PermissionRefused, match="only operators and the user of 'steward web' may read metrics"
    ):
        registry.call("status.metrics", web_process, MetricsRequest())


def test_each_database_is_shown_with_its_writers_size_and_free_pages(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    state = Path(settings.state_dir)
    month = state / "catalog" / "1"
    month.mkdir(parents=True)
    (state / "catalog" / "current").symlink_to("1")
    schema = ("CREATE TABLE t (id INTEGER PRIMARY KEY, x BLOB);",)
    names = ("jobs.db", "archive-a.db", "catalog/1/2026-01.db", "catalog/1/2026-02.db")
    for name in names:
        with closing(open_database(str(state / name), schema)) as connection:
            connection.execute("INSERT INTO t (x) VALUES (zeroblob(1000000))")
            connection.execute("DELETE FROM t")
    (state / "history.db").write_bytes(b"no database at all" * 100)
    answer = make_registry(settings).call("status.show", ROOT, StatusShowRequest())
    lines = {line.name: line for line in answer.databases}
    assert [(line.name, line.writers, line.files) for line in answer.databases] == [
        ("archive-a.db", ("archive.a", "mover.a"), 1),
        ("catalog/1/*.db", ("catalog", "actions"), 2),
        ("history.db", ("history",), 1),
        ("jobs.db", ("jobs",), 1),
    ]
    free = lines["jobs.db"].free
    assert free is not None
    assert 900_000 < free < lines["jobs.db"].bytes
    assert lines["catalog/1/*.db"].free == 2 * free
    assert (lines["history.db"].bytes, lines["history.db"].free) == (1800, None)
    assert "file is not a database" in answer.unknown["database history.db"]
    text = make_registry(settings).call("status.metrics", ROOT, MetricsRequest()).text
    assert f'steward_database_free_bytes{{database="jobs.db"}} {float(free)}' in text
    assert 'steward_database_bytes{database="history.db"} 1800.0' in text
