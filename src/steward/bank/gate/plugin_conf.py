"""The file that the submit plugin reads: where the gate is, and what holds while it is not.

The plugin reads it again when it changes, so that a site changes its policy
without a touch of slurm.conf.
"""

import logging
import os
import stat
from collections.abc import Mapping
from typing import Final

from steward.core.config import Settings
from steward.core.files import replacing

log = logging.getLogger(__name__)

PLUGIN: Final = "steward"
"""What JobSubmitPlugins calls the plugin in C."""
ASKING_PLUGINS: Final = frozenset({PLUGIN, "lua"})
"""Names in JobSubmitPlugins that can ask the gate."""

_HEAD: Final = "# Written by 'steward serve' from its configuration: change that.\n"


def plugins_of(shown: Mapping[str, str]) -> list[str]:
    """Return what JobSubmitPlugins names, in its order.

    Args:
        shown: What ``scontrol show config`` shows.
    """
    text = shown.get("JobSubmitPlugins", "")
    names = [name.strip().removeprefix("job_submit/") for name in text.split(",")]
    return [name for name in names if name and name != "(null)"]


def lines_of(settings: Settings, *, is_enforced: bool) -> str:
    """What the file holds."""
    gate = settings.gate
    lines = [
        f"socket {gate.socket}",
        f"off_file {gate.off_switch}",
        f"timeout_ms {gate.timeout_ms}",
        f"quiet_s {gate.quiet_s:g}",
        f"policy {gate.policy}",
        f"enforced {'yes' if is_enforced else 'no'}",
    ]
    lines += [
        f"partition {name} {of.policy}"
        for name, of in sorted(settings.bank.partition.items())
        if of.policy is not None
    ]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def write(settings: Settings, *, is_enforced: bool) -> bool:
    """Write the file, whole or not at all; whether it could be.

    It is for everybody to read: slurmctld runs as a user of its own.

    Args:
        settings: The configuration.
        is_enforced: Whether the mode of any job is ``gate``: where none is, the plugin lets texts
            pass that are too long, also while the gate is away.
    """
    path = settings.gate.plugin_conf
    if not path:
        return False
    text = lines_of(settings, is_enforced=is_enforced)
    try:
        try:
            with open(path, encoding="utf-8") as file:
                if file.read() == text:
                    return True
        except FileNotFoundError:
            log.info("%s is made", path)
        open_directory(os.path.dirname(path) or ".")
        with replacing(path, 0o644) as file:
            file.write(text.encode())
    except OSError as error:
        # The plugin goes on with what it read last, or with what is built into it.
        log.error("cannot write %s for the submit plugin: %s", path, error.strerror)
        return False
    return True


def open_directory(directory: str) -> None:
    """Make a directory in which slurmctld finds what is for it, whatever our umask.

    One that is there already is left as it is: its owner may want it so.

    Raises:
        OSError: It cannot be made.
    """
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # noqa: S103 - slurmctld is another user
    elif not os.stat(directory).st_mode & stat.S_IXOTH:
        log.warning(
            "%s is closed to others: if slurmctld is another user it cannot ask the gate; "
            "'chmod o+x %s' opens it",
            *(directory, directory),
        )
