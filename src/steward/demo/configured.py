"""The daemon's configuration in the demo: each part's lines, in one file."""

from typing import Any

import msgspec

from steward.slurm.settings import ClusterSettings


def configuration(
    *,
    state_dir: str,
    socket: str,
    cluster: str,
    slurm: ClusterSettings,
    munge_socket: str,
    archive: str,
    parts: list[str],
) -> str:
    """The text of the file.

    Args:
        state_dir: Where the daemon keeps its journal and databases.
        socket: Where it is asked.
        cluster: The cluster's name.
        slurm: How its Slurm is asked.
        munge_socket: Its munged's.
        archive: The root of the archive.
        parts: The lines of the parts that have tables of their own.
    """
    lines = [
        f"state_dir = {toml(state_dir)}",
        f"socket = {toml(socket)}",
        "",
        f"[cluster.{cluster}]",
        f"slurm_conf = {toml(slurm.slurm_conf)}",
        f"slurm_bin = {toml(slurm.slurm_bin)}",
        f"spool = {toml(slurm.spool)}",
        f"snapshot_interval_s = {slurm.snapshot_interval_s}",
        f"munge_socket = {toml(munge_socket)}",
        "",
        # A job log closes days, which takes a driver; the demo is over before.
        "[accounting]",
        'type = "jobacct/none"',
        "",
        *parts,
        "[archive.sink.files]",
        f"path = {toml(archive)}",
    ]
    return "\n".join(lines) + "\n"


def toml(value: Any) -> str:
    """A value as TOML writes it, which for what is here is as JSON does."""
    return msgspec.json.encode(value).decode()
