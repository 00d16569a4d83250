import os
from pathlib import Path

from harness.spool import environment_bytes
from steward.capture.crash_recovery import recover_lost_scripts
from steward.core.redaction import REDACTED
from steward.core.script_stores import IncomingStore, make_incoming_filename


def never(job_id: int, mtime_ns: int) -> bool:
    return False


def always(job_id: int, mtime_ns: int) -> bool:
    return True


def every(job_id: int) -> bool:
    return True


def keep(store: IncomingStore, job_id: int, script: bytes, environment: bytes) -> None:
    store.write(make_incoming_filename("c1", job_id, 5, len(environment), "env"), environment)
    store.write(make_incoming_filename("c1", job_id, 5, len(script), "script"), script)


def test_complete_scripts_become_events_again(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    keep(
        store,
        1,
        b"#!/bin/sh",
        environment_bytes(b"A=1", b"SLURM_JOB_NAME=lost", b"TOKEN=" + REDACTED),
    )
    keep(store, 2, b"#!/bin/sh 2", environment_bytes())
    events = sorted(
        recover_lost_scripts(store, "c1", never, never, every), key=lambda event: event.key
    )
    assert [event.key for event in events] == ["script:1:5", "script:2:5"]
    assert events[0].body.redacted == ("TOKEN",)
    assert [event.body.claimed_name for event in events] == ["lost", ""]
    assert store.read(events[0].body.script) == b"#!/bin/sh"
    assert store.read(events[1].body.environment) == environment_bytes()
    assert recover_lost_scripts(store, "c2", never, never, every) == []
    only_second = recover_lost_scripts(store, "c1", never, never, lambda job_id: job_id == 2)
    assert [event.body.job_id for event in only_second] == [2]


def test_a_script_cut_short_is_left_to_the_spool(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    keep(store, 1, b"whole", environment_bytes())
    name = make_incoming_filename("c1", 1, 5, 5, "script")
    (tmp_path / "incoming" / name).write_bytes(b"who")
    assert recover_lost_scripts(store, "c1", never, never, every) == []
    assert len(list(store.iterate_names())) == 2
    for path in (tmp_path / "incoming").iterdir():
        os.utime(path, (0, 0))
    assert recover_lost_scripts(store, "c1", never, never, every) == []
    assert list(store.iterate_names()) == []


def test_leftovers_of_trimmed_events_go_and_waiting_bytes_stay(tmp_path: Path) -> None:
    store = IncomingStore("state", str(tmp_path / "incoming"))
    keep(store, 1, b"x", environment_bytes())
    assert recover_lost_scripts(store, "c1", always, always, every) == []
    assert len(list(store.iterate_names())) == 2
    assert recover_lost_scripts(store, "c1", always, never, every) == []
    assert list(store.iterate_names()) == []
