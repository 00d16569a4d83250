"""Long tasks of the archive, and its actions in a registry."""

import base64
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest

from harness import archive
from harness.site import ADA, BELA, ROOT, Site
from steward.archive.errors import NoMatch, NotArchived
from steward.archive.export import ExportFile, SecretLine
from steward.core.actions import ActionError, Registry
from steward.core.errors import PermissionRefused, UsageError
from steward.core.events import ArchivePurge
from steward.daemon.registry import import_actions

ACTIONS = tuple(import_actions("archive").values())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = archive.make_library(tmp_path)
    yield made
    made.close()


# ---------------------------------------------------------------- export, secrets


def test_an_export_holds_what_the_asker_may_read(site: Site) -> None:
    archive.add_job(site, 1, b"one", name="../../etc")
    archive.add_job(site, 2, b"two", environment=None)
    archive.add_job(site, 3, b"three", who=BELA)
    archive.add_job(site, 4, None)
    items, answer = site.stream("archive.export", ADA)
    files = {item.path: item.data for item in items}
    assert files["alpha/ada/2-run.sh"] == b"two"
    assert sorted(path.rpartition(".")[2] for path in files) == ["env", "sh", "sh"]
    assert all(".." not in path.split("/") for path in files)
    assert (answer.jobs, answer.files, answer.unreadable) == (2, 3, ())
    scripts, _ = site.stream("archive.export", ROOT, environments=False)
    assert len(scripts) == 3
    one, _ = site.stream("archive.export", ROOT, environments=False, limit=1)
    assert len(one) == 1
    # Over the socket bytes are base64.
    line = msgspec.json.encode(one[0])
    assert base64.b64encode(one[0].data) in line
    assert msgspec.json.decode(line, type=ExportFile) == one[0]


def test_an_arrays_script_is_exported_once_and_a_reused_id_twice(site: Site) -> None:
    archive.add_job(site, 10, b"array", array_job_id=10, array_task="2")
    archive.add_job(site, 11, None, array_job_id=10, array_task="1")
    archive.add_job(site, 1, b"old", ago=timedelta(days=5))
    archive.add_job(site, 1, b"new", ago=timedelta(days=1))
    items, answer = site.stream("archive.export", ADA, environments=False)
    assert sorted(item.data for item in items) == [b"array", b"new", b"old"]
    assert len({item.path for item in items}) == 3
    assert answer.jobs == 3


def test_secrets_are_pointed_at_but_not_told(site: Site) -> None:
    archive.add_job(site, 1, b"#!/bin/sh\nexport DB_PASSWORD=hunter2hunter2\n")
    archive.add_job(site, 2, b"#!/bin/sh\necho fine\n")
    archive.add_job(site, 3, b"export DB_PASSWORD=belas\n", who=BELA)
    items, answer = site.stream("archive.secrets", ADA)
    assert [(item.job.job_id, item.line) for item in items] == [(1, 2)]
    assert all(isinstance(item, SecretLine) for item in items)
    assert b"hunter2" not in msgspec.json.encode(items)
    assert (answer.scripts, answer.suspicious, answer.default_days) == (2, 1, 7)


def test_one_script_that_is_gone_does_not_end_the_look_for_secrets(site: Site) -> None:
    archive.add_job(site, 1, b"export DB_PASSWORD=hunter2hunter2\n")
    archive.add_job(site, 2, b"export DB_PASSWORD=swordfish99\n")
    path = site.ask("archive.show", ADA, job="2").script.path
    archive.trim(site)
    Path(path).unlink()
    items, answer = site.stream("archive.secrets", ROOT)
    assert [item.job.job_id for item in items] == [1]
    assert (answer.scripts, answer.suspicious, answer.unreadable) == (1, 1, 1)


# ---------------------------------------------------------------- purge


def test_a_purge_is_said_first_and_done_on_demand(site: Site) -> None:
    key = archive.add_job(site, 1, b"xylophone")
    archive.add_job(site, 2, b"xylophone", who=BELA)
    with pytest.raises(PermissionRefused):
        site.ask("archive.erase", ADA, jobs=["1"], yes=True)
    with pytest.raises(UsageError):
        site.ask("archive.erase", ROOT, yes=True)
    with pytest.raises(UsageError):
        site.ask("archive.erase", ROOT, jobs=["1"], sink="tape")
    before = len(site.journal)
    said = site.ask("archive.erase", ROOT, jobs=["1"])
    assert not said.done
    assert [line.script.key for line in said.scripts] == [key]
    assert len(site.journal) == before
    done = site.ask("archive.erase", ROOT, users=["ada"], yes=True, reason="asked to")
    assert done.done
    order = site.journal[-1].body
    assert isinstance(order, ArchivePurge)
    assert (order.script_keys, order.asked_by, order.reason) == ((key,), "root", "asked to")
    site.feed()
    archive.trim(site)
    with pytest.raises(NotArchived):
        site.ask("archive.env", ROOT, job="1")
    assert [hit.job.job_id for hit in site.ask("archive.search", ROOT, terms=["xylo"]).hits] == [2]
    hidden = {
        who: site.ask("archive.list", who, jobs=["1"]).jobs[0].script_hidden for who in (ADA, BELA)
    }
    assert hidden == {ADA: "erased", BELA: "private"}
    left = [
        path
        for path in (site.directory / "archive").rglob("*")
        if path.is_file() and b"secret-of-ada" in path.read_bytes()
    ]
    assert left == []


@pytest.mark.parametrize("selection", [{"jobs": ["9"]}, {"users": ["bela"]}])
def test_a_selection_of_nothing_is_an_error_also_to_programs(
    site: Site, selection: dict[str, list[str]]
) -> None:
    archive.add_job(site, 1, b"one")
    for yes in (False, True):
        reply = site.ask("archive.erase", ROOT, **selection, yes=yes)
        assert (reply.exit_code, reply.scripts, [*reply.list_lines()]) == (1, (), [])
        assert "nothing erased" in next(iter(reply.list_warnings()))
    with pytest.raises(NoMatch, match="nothing exported"):
        site.stream("archive.export", ROOT, **selection)
    items, answer = site.stream("archive.export", ROOT, until="2020-01-01")
    assert (list(items), answer.jobs) == ([], 0)


@pytest.mark.parametrize("name", ["archive.export", "archive.secrets"])
def test_a_limit_is_not_negative(site: Site, name: str) -> None:
    with pytest.raises(UsageError, match="limit"):
        site.stream(name, ROOT, limit=-1)


# ---------------------------------------------------------------- the registry


def test_a_components_stand_in_is_its_owners_and_goes_with_the_job(site: Site) -> None:
    archive.add_job(site, 20, b"xylophone", feed=False, het_job_id=20)
    # Options that sbatch gives Slurm for every component but the first.
    archive.add_job(site, 21, b"#!/bin/bash\nexit 0\n", het_job_id=20, het_offset=1)
    assert [job.job for job in site.ask("archive.list", ADA).jobs] == ["20+1", "20+0"]
    shown = site.ask("archive.show", ADA, job="20+1")
    assert (shown.content.text, shown.script_of) == ("xylophone", "20")
    site.ask("archive.erase", ROOT, users=["ada"], yes=True)
    site.feed()
    left = [path for path in (site.directory / "archive").rglob("2*-*") if path.is_file()]
    assert left == []


def test_actions_are_called_by_name_with_their_own_requests(site: Site) -> None:
    names = {action.name for action in site.registry}
    assert {"archive.list", "archive.search", "archive.erase"} <= names
    with pytest.raises(ActionError, match=r"archive\.dance"):
        site.registry.call("archive.dance", ROOT, None)
    with pytest.raises(ActionError):
        site.registry.call("archive.list", ROOT, site.registry.decode("archive.env", {"job": "1"}))
    with pytest.raises(ActionError):
        Registry(ACTIONS).call("archive.list", ROOT, site.registry.decode("archive.list", {}))
    with pytest.raises(ActionError):
        Registry((*ACTIONS, ACTIONS[0]))


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.name)
def test_every_shape_can_be_decoded_again(action: object) -> None:
    for shape in (action.request, action.answer, *action.items):  # type: ignore[attr-defined] # of ids=
        msgspec.json.Decoder(shape)
        msgspec.json.schema(shape)
