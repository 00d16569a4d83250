"""Configuration file of the submit plugin: the gate's socket, time-out and outage policy.

`parse_submit_plugins` parses JobSubmitPlugins. `write_plugin_conf` derives the file from Steward's
settings and the modes of the bank. The plugin reads it again whenever it changes, so a site changes
its policy without touching slurm.conf. `make_shared_directory` makes a directory that slurmctld can
enter.
"""

import logging
import os
import re
import stat
from collections.abc import Mapping
from typing import Final

from steward.bank.gate.policy import GateRules
from steward.core.config import Settings
from steward.core.files import replace_file

log = logging.getLogger(__name__)

PLUGIN_NAME: Final = "steward"
"""The C plugin's name in JobSubmitPlugins."""
GATE_PLUGINS: Final = frozenset({PLUGIN_NAME, "lua"})
"""Names in JobSubmitPlugins of plugins that can ask the gate."""

QUIET_S: Final = 10
"""Time after a time-out during which the plugin does not ask, in seconds."""

FORMAT: Final = 1
"""Format of the file; gate_conf.c and steward_gate.lua have the newest that they can read.

Increase it with each change that an older plugin would misunderstand: the plugin that slurmctld has
loaded then keeps the settings that it read last, or its defaults. The lines ``policy`` and
``partition`` are the same in every format, so that every plugin applies the site's outage policy.
"""

_NAME: Final = re.compile(r"[^\s#,]+")
"""Partition that can exist, and that stays one word of the file."""
_HEADER: Final = "# Written by 'steward serve' from its configuration: change that.\n"


def parse_submit_plugins(slurm_config: Mapping[str, str]) -> list[str]:
    """Return the plugins that JobSubmitPlugins names, in its order.

    Args:
        slurm_config: Output of ``scontrol show config``, by key.
    """
    text = slurm_config.get("JobSubmitPlugins", "")
    names = [name.strip().removeprefix("job_submit/") for name in text.split(",")]
    return [name for name in names if name and name != "(null)"]


def format_plugin_conf(rules: GateRules) -> str:
    """Return the file's text."""
    settings = rules.settings
    gate = settings.gate
    defaults = sorted({model.default_partition for model in rules.models.values()} - {""})
    lines = [
        f"format {FORMAT}",
        f"socket {settings.gate_socket}",
        f"off_file {settings.gate_off}",
        f"timeout_ms {gate.timeout_ms}",
        f"quiet_s {QUIET_S}",
        f"policy {rules.get_plugin_policy('')}",
        *([f"default_partition {','.join(defaults)}"] if defaults else []),
    ]
    lines += [
        f"partition {name} {rules.get_plugin_policy(name)}"
        for name in sorted(rules.list_ruled_partitions())
        if _NAME.fullmatch(name)
    ]
    return _HEADER + "".join(f"{line}\n" for line in lines)


def write_plugin_conf(rules: GateRules) -> bool:
    """Write the file atomically; return False if it cannot be written.

    Everybody may read it: slurmctld runs as another user.
    """
    path = rules.settings.gate_conf
    text = format_plugin_conf(rules)
    try:
        try:
            with open(path, encoding="utf-8") as file:
                if file.read() == text:
                    return True
        except FileNotFoundError:
            log.info("creating %s", path)
        make_shared_directory(os.path.dirname(path) or ".")
        with replace_file(path, 0o644) as file:
            file.write(text.encode())
    except OSError as error:
        # The plugin keeps the configuration that it read last, or its built-in one.
        log.error("cannot write %s for the submit plugin: %s", path, error.strerror)
        return False
    return True


def is_denied_everywhere(settings: Settings) -> bool:
    """Return True if the written outage policy rejects jobs of every partition.

    It decides about a job whose partition is unknown.
    """
    try:
        with open(settings.gate_conf, encoding="utf-8") as file:
            lines = [line.split() for line in file if line.strip()]
    except OSError:
        return settings.gate.policy == "deny"
    return all(line[-1] == "deny" for line in lines if line[0] in ("policy", "partition"))


def make_shared_directory(directory: str) -> None:
    """Make a directory that slurmctld can enter, whatever Steward's umask.

    An existing directory keeps its mode: its owner may want it so.

    Raises:
        OSError: The directory cannot be made.
    """
    if not os.path.isdir(directory):
        os.makedirs(directory, exist_ok=True)
        os.chmod(directory, 0o755)  # noqa: S103 - slurmctld is another user
    elif not os.stat(directory).st_mode & stat.S_IXOTH:
        log.warning(
            "other users cannot enter %s: unless slurmctld runs as root or as Steward's user, it "
            "cannot reach the gate. Run 'chmod o+x %s'",
            *(directory, directory),
        )
