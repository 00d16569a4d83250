"""A files sink takes in scripts that are sent again, from wherever their bytes are by now."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
from archive_site import ENVIRONMENT, Site

from steward.archive.files.pending import Pending
from steward.archive.files.sink import FilesSink
from steward.archive.files.verify import verify
from steward.archive.settings import FilesSinkSettings
from steward.core.config import ArchiveSettings
from steward.core.consumers import Rejected
from steward.core.events import ARCHIVE_RESEND, ArchiveResend, Event, Resent
from steward.core.incoming import stores_of

DAY = "alpha/ada/2026/03/05"
SCRIPT = b"#!/bin/sh\nhostname\n"


class TwoSinks(Site):
    """The sink ``files`` of the site, and one called ``more`` that came later."""

    def __init__(self, directory: Path, **more: Any) -> None:
        super().__init__(directory, compress="zstd")
        sinks = dict(self.settings.archive.sink)
        sinks["more"] = FilesSinkSettings(path=str(directory / "more"), **more)
        environments = self.settings.archive.environments
        archive = ArchiveSettings(sink=sinks, environments=environments)
        self.settings = msgspec.structs.replace(self.settings, archive=archive)
        self.first, self.first_root = self.sink, self.root
        self.more = FilesSink(self.settings, "more", stores_of(self.settings))

    def resend(self, *resent: Resent, sink: str = "more") -> None:
        event = self.event(
            ARCHIVE_RESEND, "resend:1", ArchiveResend(sink=sink, scripts=resent, asked_by="root")
        )
        self.more.apply([event], 1, self.append)

    def there(self) -> dict[str, bytes]:
        self.root = self.directory / "more"
        try:
            return self.files()
        finally:
            self.root = self.first_root

    def keep(self, job_id: int, data: bytes = SCRIPT, *, trimmed: bool = True) -> Event:
        script = self.script(job_id, data)
        self.apply(script, self.identity(script))
        if trimmed:
            self.store().unlink([script.body.script.path, script.body.environment.path])
        return script

    def again(self, script: Event, **who: Any) -> Resent:
        identity = self.identity(script, **who).body if who else None
        return Resent(script_key=script.key, script=script.body, identity=identity)


ADA = {"uid": 4001, "user": "ada"}


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_a_new_sink_is_filled(tmp_path: Path, trimmed: bool, compress: str) -> None:
    site = TwoSinks(tmp_path, compress=compress)
    scripts = [site.keep(number, trimmed=trimmed) for number in (7, 8)]
    site.resend(*[site.again(script, **ADA) for script in scripts])
    end = ".zst" if compress == "zstd" else ""
    assert set(site.there()) == {
        f"{DAY}/{number}-run{suffix}{end}" for number in (7, 8) for suffix in (".sh", ".env")
    }
    assert list(verify(site.settings, "more")) == []
    assert os.listdir(tmp_path / "more/.waiting") == []
    ((sum_,),) = site.rows("SELECT bytes FROM holder", "more")
    assert sum_ == len(SCRIPT + ENVIRONMENT)
    inodes = {os.stat(tmp_path / "more" / path).st_ino for path in site.there()}
    assert len(inodes) == 2


def test_what_is_there_is_left_alone_and_what_was_not_verified_gets_its_owner(
    tmp_path: Path,
) -> None:
    site = TwoSinks(tmp_path)
    script = site.keep(7)
    site.resend(site.again(script))
    assert set(site.there()) == {
        f"unverified/alpha/2026/03/05/7-claim{suffix}" for suffix in (".sh", ".env")
    }
    site.resend(site.again(script, **ADA))
    before = site.there()
    assert set(before) == {f"{DAY}/7-run.sh", f"{DAY}/7-run.env"}
    site.resend(site.again(script, **ADA))
    site.resend(site.again(script))
    assert site.there() == before
    lines = (tmp_path / "more" / DAY / "MANIFEST.jsonl").read_bytes().splitlines()
    assert len(lines) == 2


@pytest.mark.parametrize("layout", ["sarchive", "sliced"])
def test_layouts_without_a_user(tmp_path: Path, layout: str) -> None:
    site = TwoSinks(tmp_path, layout=layout)
    site.resend(site.again(site.keep(7), **ADA))
    assert set(site.there().values()) == {SCRIPT, ENVIRONMENT}
    assert site.rows("SELECT uid FROM script", "more") == [(4001,)]


def test_what_is_nowhere_or_was_changed_is_set_aside_and_stops_no_other(tmp_path: Path) -> None:
    site = TwoSinks(tmp_path)
    lost, changed, sound = site.keep(7, b"lost"), site.keep(8, b"changed"), site.keep(9)
    (site.first_root / DAY / "7-run.sh.zst").unlink()
    (site.first_root / DAY / "8-run.sh.zst").write_bytes(b"damaged")
    site.resend(*[site.again(script, **ADA) for script in (lost, changed, sound)])
    assert set(site.there()) == {f"{DAY}/9-run.sh", f"{DAY}/9-run.env"}
    assert os.listdir(tmp_path / "more/.waiting") == []
    with pytest.raises(Rejected, match="2 of 3 scripts are lost") as caught:
        site.more.tick(site.append)
    assert [one.event.kind for one in caught.value.each] == [ARCHIVE_RESEND]
    assert str(caught.value).count("is not archived again") == 2
    site.more.tick(site.append)
    # The dead letter is replayed once its bytes are there again.
    site.store().write(changed.body.script.path, b"changed")
    site.resend(*[site.again(script, **ADA) for script in (changed, sound)])
    assert f"{DAY}/8-run.sh" in site.there()
    site.more.tick(site.append)


def test_each_event_of_a_batch_that_lost_something_is_told_of(tmp_path: Path) -> None:
    site = TwoSinks(tmp_path)
    events = []
    for number in (7, 8):
        script = site.keep(number, b"%d" % number)
        (site.first_root / DAY / f"{number}-run.sh.zst").unlink()
        body = ArchiveResend(sink="more", scripts=(site.again(script, **ADA),), asked_by="root")
        events.append(site.event(ARCHIVE_RESEND, f"resend:{number}", body))
    site.more.apply(events, 2, site.append)
    with pytest.raises(Rejected) as caught:
        site.more.tick(site.append)
    assert [one.event for one in caught.value.each] == events
    assert all("is not archived again" in str(one) for one in caught.value.each)


def test_what_is_for_another_sink_is_not_ours(tmp_path: Path) -> None:
    site = TwoSinks(tmp_path)
    site.resend(site.again(site.keep(7), **ADA), sink="files")
    assert site.there() == {}


def test_a_crash_in_between_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = TwoSinks(tmp_path)
    resent = site.again(site.keep(7), **ADA)

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    monkeypatch.setattr(Pending, "write", crash)
    with pytest.raises(Crash):
        site.resend(resent)
    monkeypatch.undo()
    site.more = FilesSink(site.settings, "more", stores_of(site.settings))
    site.resend(resent)
    assert site.there() == {f"{DAY}/7-run.sh": SCRIPT, f"{DAY}/7-run.env": ENVIRONMENT}
    assert os.listdir(tmp_path / "more/.waiting") == []
