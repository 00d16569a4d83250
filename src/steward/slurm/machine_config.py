"""Slurm's configuration as ``scontrol show config`` writes it, under names of Python's kind.

Names are snake_case, as pyslurm's are; where pyslurm's older dictionary shortened one,
that spelling is there as well. Passwords are left out.
"""

import re
from typing import Any, Final

from steward.slurm import values
from steward.slurm.shown import snake

_SETTING: Final = re.compile(r"([A-Za-z_][^=\n]*?)\s*=\s?([^\n]*)")
_INDEXED: Final = re.compile(r"(\w+)\[(\d+)\]")
_UNIT: Final = re.compile(r"(\d{1,18}) (sec|min|usec|percent|nodes/min)")
_USER: Final = re.compile(r"(.*)\((\d{1,10})\)")
_SECRET: Final = re.compile(r"pass(?:word)?$")
_NOTHING: Final = frozenset({"", "(null)"})

# What pyslurm's config().get() calls otherwise.
_SHORT: Final = {
    "accounting_storage_parameters": "accounting_storage_params",
    "auth_info": "authinfo",
    "auth_type": "authtype",
    "burst_buffer_type": "bb_type",
    "communication_parameters": "comm_params",
    "cpu_freq_governors": "cpu_freq_govs",
    "dependency_parameters": "dependency_params",
    "federation_parameters": "fed_params",
    "gres_types": "gres_plugins",
    "launch_parameters": "launch_params",
    "max_array_size": "max_array_sz",
    "max_job_count": "max_job_cnt",
    "max_step_count": "max_step_cnt",
    "message_timeout": "msg_timeout",
    "plugin_dir": "plugindir",
    "plug_stack_config": "plugstack",
    "priority_decay_half_life": "priority_decay_hl",
    "priority_parameters": "priority_params",
    "scheduler_parameters": "sched_params",
    "scheduler_time_slice": "sched_time_slice",
    "scheduler_type": "schedtype",
    "select_type_parameters": "select_type_param",
    "slurm_version": "version",
    "slurmctld_log_file": "slurmctld_logfile",
    "slurmctld_parameters": "slurmctld_params",
    "slurmctld_pid_file": "slurmctld_pidfile",
    "slurmd_log_file": "slurmd_logfile",
    "slurmd_parameters": "slurmd_params",
    "slurmd_pid_file": "slurmd_pidfile",
    "slurmd_spool_dir": "slurmd_spooldir",
    "unkillable_step_program": "unkillable_program",
    "unkillable_step_timeout": "unkillable_timeout",
    "prep_parameters": "prep_params",
    "v_size_factor": "vsize_factor",
    "x11_parameters": "x11_params",
}


def items(out: bytes) -> dict[str, Any]:
    """What ``scontrol show config`` wrote.

    Numbers are numbers, in the unit that Slurm shows (seconds for nearly all; ``OverTimeLimit``
    is minutes), BOOT_TIME seconds since the epoch, what is not set None.
    """
    found: dict[str, Any] = {}
    for line in out.decode("utf-8", "backslashreplace").splitlines():
        setting = _SETTING.fullmatch(line)
        if setting is None:
            if found:
                break  # those of cgroup.conf and the like follow, and are not slurm.conf's
            continue
        _add(found, setting[1].strip(), setting[2].strip())
    for name, short in _SHORT.items():
        if name in found:
            found.setdefault(short, found[name])
    hosts = found.get("slurmctld_host")
    if hosts:
        # As pyslurm calls the first of them.
        host, _, address = hosts[0].partition("(")
        found |= {"control_machine": host, "control_addr": address.rstrip(")") or None}
    return found


def _add(found: dict[str, Any], name: str, text: str) -> None:
    indexed = _INDEXED.fullmatch(name)
    key = snake(indexed[1] if indexed else name)
    if _SECRET.search(key):
        return
    if indexed:
        found.setdefault(key, []).append(text)
        return
    if key in found:
        return
    found[key] = _value(text)
    user = _USER.fullmatch(text)
    if user and key in ("slurm_user", "slurmd_user"):
        found |= {f"{key}_name": user[1], f"{key}_id": int(user[2])}


def _value(text: str) -> Any:
    if text in _NOTHING:
        return None
    if re.fullmatch(r"\d{1,18}", text):
        return int(text)
    if unit := _UNIT.fullmatch(text):
        return int(unit[1])
    at = values.moment(text) if re.match(r"\d{4}-", text) else None
    return text if at is None else int(at.timestamp())
