"""Compressed files: every reader returns the plain bytes in bounded memory."""

import errno
import io
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from harness import archive
from harness.archive import DAY, ENVIRONMENT
from harness.events import NOON_NS
from harness.site import Site
from steward.archive.catalog.rebuild import CatalogRebuild
from steward.archive.files.compression import (
    DamagedFile,
    compress_bytes,
    compute_plain_digest,
    read_blocks,
    read_plain,
)
from steward.archive.files.layout import compile_layout
from steward.archive.files.manifest import decode_facts, find_named_scripts, iterate_scripts_in_tree
from steward.archive.files.mover import ArchiveMover
from steward.archive.files.reader import FilesReader
from steward.archive.files.verify import verify_sink
from steward.core.events import Event
from steward.core.waits import Stop

SCRIPT = b"#!/bin/sh\n" + b"hostname\n" * 200


def keep(site: Site, job_id: int, data: bytes = SCRIPT) -> Event:
    script = archive.script(site, job_id, data)
    site.feed(script, archive.identity(script))
    return script


def plain(site: Site) -> dict[str, bytes]:
    return {
        path: read_plain(io.BufferedReader(io.BytesIO(data)), path)
        for path, data in archive.files(site).items()
    }


def test_files_are_compressed_and_read_plain(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, compress="zstd")
    script = keep(site, 7)
    assert plain(site) == {f"{DAY}/7-run.sh.zst": SCRIPT, f"{DAY}/7-run.env.zst": ENVIRONMENT}
    assert len(archive.files(site)[f"{DAY}/7-run.sh.zst"]) < len(SCRIPT) / 10
    (kept, _) = decode_facts((archive.root_of(site) / DAY / "MANIFEST.jsonl").read_bytes())
    assert kept.script is not None
    assert (kept.script.name, kept.script.length) == ("7-run.sh.zst", len(SCRIPT))
    assert kept.script.sha256 == script.body.script.sha256
    reader = FilesReader(site.settings, "files")
    assert reader.read(script.key, "script") == SCRIPT
    assert reader.read(script.key, "environment") == ENVIRONMENT
    assert list(verify_sink(site.settings, "files")) == []


@pytest.mark.parametrize("layout", ["default", "job_archive", "sarchive", "sliced"])
def test_every_layout_is_found_again(tmp_path: Path, layout: str) -> None:
    site = archive.make_site(tmp_path, layout=layout, compress="zstd")
    keep(site, 7)
    keep(site, 8)
    assert all(path.endswith(".zst") for path in archive.files(site))
    assert set(plain(site).values()) == {SCRIPT, ENVIRONMENT}
    found = list(iterate_scripts_in_tree(str(archive.root_of(site)), compile_layout(layout)))
    assert {one.job_id for one in found} == {7, 8}
    assert all(one.script and one.environment for one in found)
    *_, answer = CatalogRebuild(site.settings, "files").run()
    assert (answer.scripts, answer.distinct, answer.unreadable) == (2, 1, 0)  # type: ignore[union-attr]
    assert list(verify_sink(site.settings, "files")) == []


def test_a_tree_of_both_kinds_goes_on_working(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path)
    first, other = keep(site, 7), keep(site, 8, b"first plain, not shared")
    site = archive.make_site(tmp_path, compress="zstd")
    # Existing files are shared unchanged; new ones are compressed.
    second, third = keep(site, 9), keep(site, 10, b"then compressed")
    site = archive.make_site(tmp_path)
    fourth = keep(site, 11, b"then compressed")
    assert {path.removeprefix(DAY) for path in archive.files(site) if ".sh" in path} == {
        *("/7-run.sh", "/8-run.sh", "/9-run.sh", "/10-run.sh.zst", "/11-run.sh.zst")
    }
    reader = FilesReader(site.settings, "files")
    assert reader.read(first.key, "script") == reader.read(second.key, "script") == SCRIPT
    assert reader.read(third.key, "script") == b"then compressed"
    assert reader.read(fourth.key, "script") == b"then compressed"
    assert list(verify_sink(site.settings, "files")) == []
    site.feed(archive.purge(first, other, second, third, fourth))
    assert archive.files(site) == {}


def test_what_is_compressed_stays_so_on_its_way(tmp_path: Path) -> None:
    there = tmp_path / "there"
    site = archive.make_site(
        tmp_path, slurm=False, compress="zstd", move_to=str(there), move_after_s=0
    )
    script = archive.script(site, 7)
    site.feed(script)
    assert set(archive.files(site)) == {
        f"unverified/alpha/2026/03/01/7-claim{suffix}" for suffix in (".sh.zst", ".env.zst")
    }
    site.feed(archive.identity(script))
    assert set(archive.files(site)) == {f"{DAY}/7-run.sh.zst", f"{DAY}/7-run.env.zst"}
    ArchiveMover(site.settings, "files").run_once(Stop())
    assert archive.files(site) == {}
    assert FilesReader(site.settings, "files").read(script.key, "environment") == ENVIRONMENT
    assert (there / f"{DAY}/7-run.env.zst").is_file()
    assert list(verify_sink(site.settings, "files")) == []


@pytest.mark.parametrize("torn", [b"", b"torn", None])
def test_what_a_crash_kept_from_the_disk_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes | None
) -> None:
    site = archive.make_site(tmp_path, compress="zstd")
    script = archive.script(site, 7)

    class Crash(Exception):
        pass

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr("steward.archive.files.placement.sync_filesystem", crash)
        with pytest.raises(Crash):
            site.feed(script, archive.identity(script))
    if torn is not None:
        for path in archive.files(site):
            (archive.root_of(site) / path).write_bytes(torn)
    site.reopen()
    site.feed(script, archive.identity(script))
    assert plain(site) == {
        f"{DAY}/7-run.sh.zst": b"#!/bin/sh\nhostname\n",
        f"{DAY}/7-run.env.zst": ENVIRONMENT,
    }
    assert {os.stat(archive.root_of(site) / path).st_nlink for path in archive.files(site)} == {1}


def test_a_compressed_file_that_may_not_be_linked_to_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = archive.make_site(tmp_path, compress="zstd")
    keep(site, 7)
    link = os.link

    def refuse(source: str, name: str, **of: Any) -> None:
        if source.startswith("7-run"):
            raise OSError(errno.EMLINK, "Too many links")
        link(source, name, **of)

    monkeypatch.setattr(os, "link", refuse)
    keep(site, 8)
    assert set(plain(site)) == {
        f"{DAY}/{number}-run{suffix}.zst" for number in (7, 8) for suffix in (".sh", ".env")
    }
    assert set(plain(site).values()) == {SCRIPT, ENVIRONMENT}
    assert list(verify_sink(site.settings, "files")) == []


def test_a_files_own_time_is_that_of_its_capture(tmp_path: Path) -> None:
    site = archive.make_site(tmp_path, layout="job_archive", compress="zstd")
    script = archive.script(site, 7)
    there = Path(archive.store_of(site).get_path(script.body.script))
    os.utime(there, ns=(NOON_NS, NOON_NS))
    site.feed(script, archive.identity(script))
    directory = archive.root_of(site) / "ada/2026/03"
    (found,) = find_named_scripts(
        str(archive.root_of(site)),
        "ada/2026/03",
        os.listdir(directory),
        str(directory),
        compile_layout("job_archive"),
    )
    assert found.spool_mtime_ns == NOON_NS


def bomb() -> bytes:
    return zstandard.ZstdCompressor(level=19).compress(bytes(64 << 20))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(compress_bytes(SCRIPT) + b"tail", id="tail"),
        pytest.param(compress_bytes(SCRIPT) + compress_bytes(b"more"), id="more"),
        pytest.param(compress_bytes(SCRIPT)[:-5], id="cut"),
        pytest.param(b"no frame", id="plain"),
        pytest.param(bomb(), id="bomb"),
    ],
)
def test_damage_is_told_by_verify_and_never_shown(tmp_path: Path, data: bytes) -> None:
    site = archive.make_site(tmp_path, compress="zstd")
    script = keep(site, 7)
    path = archive.root_of(site) / f"{DAY}/7-run.sh.zst"
    path.write_bytes(data)
    assert [(one.kind, one.path) for one in verify_sink(site.settings, "files")] == [
        ("changed", str(path))
    ]
    reader = FilesReader(site.settings, "files")
    tracemalloc.start()
    try:
        assert reader.read(script.key, "script") != SCRIPT
    except DamagedFile:
        pass
    finally:
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
        tracemalloc.stop()
    keep(site, 8)
    assert FilesReader(site.settings, "files").read(f"script:8:{NOON_NS}", "script") == SCRIPT


@given(st.binary(max_size=300))
def test_what_is_packed_comes_back(data: bytes) -> None:
    file = io.BufferedReader(io.BytesIO(compress_bytes(data)))
    assert read_plain(file, "x.zst", len(data)) == data


@given(st.binary(max_size=200))
def test_garbage_is_damaged_or_little(data: bytes) -> None:
    file = io.BufferedReader(io.BytesIO(data))
    try:
        assert len(b"".join(read_blocks(file, "x.zst", 1000))) <= 1000
    except DamagedFile:
        return
    file.seek(0)
    compute_plain_digest(file, "x.zst", 1000)
