"""The file that the submit plugin reads: where the gate is, and what holds while it is not.

The plugin reads it again when it changes, so that a site changes its policy
without a touch of slurm.conf.
"""

import logging
import os
from typing import Final

from steward.config import Settings

log = logging.getLogger(__name__)

_HEAD: Final = "# Written by 'steward serve' from its configuration: change that.\n"


def lines_of(settings: Settings) -> str:
    """What the file holds."""
    gate = settings.gate
    lines = [
        f"socket {gate.socket}",
        f"off_file {gate.off_switch}",
        f"timeout_ms {gate.timeout_ms}",
        f"quiet_s {gate.quiet_s:g}",
        f"policy {gate.policy}",
    ]
    lines += [
        f"partition {name} {of.policy}"
        for name, of in sorted(settings.bank.partition.items())
        if of.policy is not None
    ]
    return _HEAD + "".join(f"{line}\n" for line in lines)


def write(settings: Settings) -> bool:
    """Write the file, whole or not at all; whether it could be.

    It is for everybody to read: slurmctld runs as a user of its own.
    """
    path = settings.gate.plugin_conf
    if not path:
        return False
    text = lines_of(settings)
    fresh = f"{path}.{os.getpid()}"
    try:
        try:
            with open(path, encoding="utf-8") as file:
                if file.read() == text:
                    return True
        except FileNotFoundError:
            log.info("%s is made", path)
        os.makedirs(os.path.dirname(path) or ".", mode=0o755, exist_ok=True)
        with open(fresh, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), 0o644)
        os.replace(fresh, path)
    except OSError as error:
        # The plugin goes on with what it read last, or with what is built into it.
        log.error("cannot write %s for the submit plugin: %s", path, error.strerror)
        return False
    return True
