"""Checks of the spool: is it there, may Steward read it, and is all that lies in it archived."""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from typing import Final

from steward.admin.doctor.findings import Finding, ok, several, skipped, warning, wrong
from steward.admin.doctor.ground import Ground
from steward.capture.captured_jobs import Known
from steward.capture.schedulers import scheduler_called
from steward.core import events
from steward.core.errors import Unavailable
from steward.core.filesystems import may, network_kind
from steward.core.journal import JournalReader

_PATIENCE_S: Final = 120.0
"""What has lain there for longer should have been taken."""
_MOST: Final = 2000
_JOB: Final = re.compile(r"job\.(\d+)")
_LOOKED_AT: Final = "the spool, and whether what lies in it was taken"


def spool(ground: Ground) -> Iterator[Finding]:
    """Whether each cluster's spool is watched and readable."""
    shown = {one.name: one for one in ground.clusters}
    found = False
    for name, of in ground.settings.cluster.items():
        if of.remote:
            continue
        found = True
        usual = scheduler_called(of.scheduler).default_root
        of_slurm = shown[name].shown.get("StateSaveLocation", "") if name in shown else ""
        path = of.spool or usual or of_slurm
        if not path:
            yield skipped(_LOOKED_AT, "slurmctld does not answer, so nobody says where", of=name)
        else:
            yield _spool(ground, name, path, is_slurms=of.scheduler == "slurm")
    if not found:
        yield skipped(_LOOKED_AT, "every cluster is captured elsewhere (remote = true)")


def _spool(ground: Ground, name: str, path: str, *, is_slurms: bool) -> Finding:
    own = ground.uid if ground.own_uid is None else ground.own_uid
    try:
        os.stat(path)
        kind = network_kind(path)
    except OSError as error:
        return wrong(
            path,
            f"{error.strerror}: run Steward on slurmctld's host, or set where it is",
            f'[cluster.{name}] spool = "the StateSaveLocation of slurm.conf"',
            of=name,
        )
    if may(own, "r", path) is False:
        return wrong(
            path,
            f"{ground.own_name}, as whom Steward runs, cannot read it",
            "run Steward as SlurmUser: systemctl edit steward, [Service] User=…",
            of=name,
        )
    if not is_slurms:
        return ok(path, "it can be read", of=name)
    if not ground.is_root and ground.uid != own:
        return skipped(path, "only root and Steward's user can look into it", of=name)
    return _taken(ground, name, path, kind)


def _taken(ground: Ground, name: str, path: str, kind: str) -> Finding:
    """Whether the scripts that have lain there for a while are known to the journal."""
    old = sorted(_scripts(path))[-_MOST:]
    try:
        missing = _unknown(ground.settings.state_dir, name, old)
    except Unavailable as error:
        why = f"nothing of it was ever taken: {error}"
        return wrong(path, why, "systemctl start steward", of=name)
    if missing:
        return wrong(
            path,
            f"{several(len(missing), 'script')} of {len(old)} not taken, job {missing[0]} first",
            "journalctl -u steward -p warning",
            "systemctl restart steward",
            of=name,
        )
    text = f"{several(len(old), 'script')} there for a while, all of them taken"
    if kind:
        return warning(
            path,
            f"it is on {kind}, where nobody is told of new files: it is scanned. {text}",
            "run Steward, or steward controller, on slurmctld's host with the spool on its disk",
            of=name,
        )
    return ok(path, text, of=name)


def _scripts(path: str) -> Iterator[tuple[int, int]]:
    """Time and job of each script that has lain there for a while."""
    before_ns = time.time_ns() - int(_PATIENCE_S * 1e9)
    for hashed in os.scandir(path):
        if not hashed.name.startswith("hash.") or not hashed.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(hashed.path):
            job = _JOB.fullmatch(entry.name)
            # slurmctld removes what is over, also in this moment.
            with contextlib.suppress(OSError):
                mtime_ns = os.stat(f"{entry.path}/script", follow_symlinks=False).st_mtime_ns
                if job is not None and mtime_ns < before_ns:
                    yield mtime_ns, int(job[1])


def _unknown(state_dir: str, cluster: str, scripts: list[tuple[int, int]]) -> list[int]:
    reader = JournalReader(state_dir)
    known = Known(state_dir, reader)
    try:
        return [
            job_id
            for mtime_ns, job_id in scripts
            if not known.known(cluster, events.script_key(job_id, mtime_ns))
        ]
    finally:
        known.close()
        reader.close()
