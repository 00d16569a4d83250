"""Resend to a files sink: it finds scripts wherever their bytes are."""

import os
from pathlib import Path
from typing import Any

import pytest

from harness import archive
from harness.archive import DAY, ENVIRONMENT, SCRIPT
from harness.events import make_event
from steward.archive.files.batch import PendingBatch
from steward.archive.files.verify import verify_sink
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings
from steward.core.consumers import Rejected
from steward.core.events import ARCHIVE_RESEND, ArchiveResend, Event, ResentScript


class TwoSinks:
    """Site with the sink ``files`` and a later sink ``more``."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.site = archive.make_site(directory, compress="zstd")
        sinks = dict(self.site.settings.archive.sink)
        sinks["more"] = FilesSinkSettings(path=str(directory / "more"), **more)
        self.site.reopen(archive=ArchiveSettings(sink=sinks))
        self.more = archive.open_sink(self.site, "more")

    def resend(self, *resent: ResentScript, sink: str = "more") -> None:
        self.more.apply([resend(*resent, sink=sink)], 1, self.site.append)

    def there(self) -> dict[str, bytes]:
        return archive.files(self.site, "more")

    def keep(self, job_id: int, data: bytes = SCRIPT, *, trimmed: bool = True) -> Event:
        script = archive.script(self.site, job_id, data)
        self.site.feed(script, archive.identity(script))
        if trimmed:
            archive.trim(self.site)
        return script


def resend(*resent: ResentScript, sink: str = "more", key: str = "resend:1") -> Event:
    body = ArchiveResend(sink=sink, scripts=resent, asked_by="root")
    return make_event(ARCHIVE_RESEND, key, body, cluster="alpha")


def again(script: Event, **who: Any) -> ResentScript:
    identity = archive.identity(script, **who).body if who else None
    return ResentScript(script_key=script.key, script=script.body, identity=identity)


ADA = {"uid": 4001, "user": "ada"}


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_a_new_sink_is_filled(tmp_path: Path, trimmed: bool, compress: str) -> None:
    sinks = TwoSinks(tmp_path, compress=compress)
    scripts = [sinks.keep(number, trimmed=trimmed) for number in (7, 8)]
    sinks.resend(*[again(script, **ADA) for script in scripts])
    end = ".zst" if compress == "zstd" else ""
    assert set(sinks.there()) == {
        f"{DAY}/{number}-run{suffix}{end}" for number in (7, 8) for suffix in (".sh", ".env")
    }
    assert list(verify_sink(sinks.site.settings, "more")) == []
    assert os.listdir(tmp_path / "more/.waiting") == []
    ((sum_,),) = archive.rows(sinks.site, "SELECT bytes FROM holder", "more")
    assert sum_ == len(SCRIPT + ENVIRONMENT)
    inodes = {os.stat(tmp_path / "more" / path).st_ino for path in sinks.there()}
    assert len(inodes) == 2


def test_what_is_there_is_left_alone_and_what_was_not_verified_gets_its_owner(
    tmp_path: Path,
) -> None:
    sinks = TwoSinks(tmp_path)
    script = sinks.keep(7)
    sinks.resend(again(script))
    assert set(sinks.there()) == {
        f"unverified/alpha/2026/03/01/7-claim{suffix}" for suffix in (".sh", ".env")
    }
    sinks.resend(again(script, **ADA))
    before = sinks.there()
    assert set(before) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env"}
    sinks.resend(again(script, **ADA))
    sinks.resend(again(script))
    assert sinks.there() == before
    lines = (tmp_path / "more" / DAY / "MANIFEST.jsonl").read_bytes().splitlines()
    assert len(lines) == 2


@pytest.mark.parametrize("layout", ["sarchive", "sliced"])
def test_layouts_without_a_user(tmp_path: Path, layout: str) -> None:
    sinks = TwoSinks(tmp_path, layout=layout)
    sinks.resend(again(sinks.keep(7), **ADA))
    assert set(sinks.there().values()) == {SCRIPT, ENVIRONMENT}
    assert archive.rows(sinks.site, "SELECT uid FROM script", "more") == [(4001,)]


def test_what_is_nowhere_or_was_changed_is_set_aside_and_stops_no_other(tmp_path: Path) -> None:
    sinks = TwoSinks(tmp_path)
    lost, changed, sound = sinks.keep(7, b"lost"), sinks.keep(8, b"changed"), sinks.keep(9)
    (archive.root_of(sinks.site) / DAY / "7-run.sh.zst").unlink()
    (archive.root_of(sinks.site) / DAY / "8-run.sh.zst").write_bytes(b"damaged")
    sinks.resend(*[again(script, **ADA) for script in (lost, changed, sound)])
    assert set(sinks.there()) == {f"{DAY}/9-run.sh", f"{DAY}/9-run.env"}
    assert os.listdir(tmp_path / "more/.waiting") == []
    with pytest.raises(Rejected, match="2 of 3 scripts are lost") as caught:
        sinks.more.tick(sinks.site.append)
    assert [one.event.kind for one in caught.value.rejections] == [ARCHIVE_RESEND]
    assert str(caught.value).count("cannot archive") == 2
    sinks.more.tick(sinks.site.append)
    # The dead letter is retried once its bytes are there again.
    archive.store_of(sinks.site).write(changed.body.script.path, b"changed")
    sinks.resend(*[again(script, **ADA) for script in (changed, sound)])
    assert f"{DAY}/8-run.sh" in sinks.there()
    sinks.more.tick(sinks.site.append)


def test_each_event_of_a_batch_that_lost_something_is_told_of(tmp_path: Path) -> None:
    sinks = TwoSinks(tmp_path)
    events = []
    for number in (7, 8):
        script = sinks.keep(number, b"%d" % number)
        (archive.root_of(sinks.site) / DAY / f"{number}-run.sh.zst").unlink()
        events.append(resend(again(script, **ADA), key=f"resend:{number}"))
    sinks.more.apply(events, 2, sinks.site.append)
    with pytest.raises(Rejected) as caught:
        sinks.more.tick(sinks.site.append)
    assert [one.event for one in caught.value.rejections] == events
    assert all("cannot archive" in str(one) for one in caught.value.rejections)


def test_what_is_for_another_sink_is_not_ours(tmp_path: Path) -> None:
    sinks = TwoSinks(tmp_path)
    sinks.resend(again(sinks.keep(7), **ADA), sink="files")
    assert sinks.there() == {}


def test_a_crash_in_between_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinks = TwoSinks(tmp_path)
    resent = again(sinks.keep(7), **ADA)

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(PendingBatch, "write", crash)
    with pytest.raises(Crash):
        sinks.resend(resent)
    monkeypatch.undo()
    sinks.more = archive.open_sink(sinks.site, "more")
    sinks.resend(resent)
    assert sinks.there() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert os.listdir(tmp_path / "more/.waiting") == []


@pytest.mark.parametrize("kind", ["script", "environment"])
def test_bytes_that_were_changed_in_the_store_are_not_archived(tmp_path: Path, kind: str) -> None:
    sinks = TwoSinks(tmp_path)
    script = archive.script(sinks.site, 7, store="state")
    name = getattr(script.body, kind).path
    path = Path(archive.store_of(sinks.site, "state").directory) / name
    data = path.read_bytes()
    path.write_bytes(bytes(reversed(data)))
    sinks.resend(again(script, **ADA))
    assert sinks.there() == {}
    with pytest.raises(Rejected, match="was changed in its directory"):
        sinks.more.tick(sinks.site.append)
