"""Checks of what Slurm loads of Steward: built for this Slurm, in its place, and last.

Where the place is another's, what is lost thereby is said.
"""

import os
import socket
from collections.abc import Iterator
from typing import Final

from steward.admin.doctor.findings import Finding, ok, skipped, warning, wrong
from steward.admin.doctor.ground import Asked, Ground, each_cluster
from steward.admin.plugins import checking, installing, reaching, submitting, telling, waking
from steward.admin.plugins.building import DEFAULT_LIBDIR, SlurmVersion
from steward.bank.gate.plugin_conf import ASKING_PLUGINS, PLUGIN, plugins_of
from steward.capture.sensor.triggers import EVENTS
from steward.capture.settings import HELPER_NAME
from steward.slurm import Machine, Triggers

_SPANK: Final = "plugstack.conf.d, and the library that it names"
_NO_JOBCOMP: Final = "former sizes of resized jobs, and jobs that come and go while slurmctld or \
Steward is away for longer than MinJobAge"


def _spank(ground: Ground, one: Asked) -> Iterator[Finding]:
    plugstack = one.shown.get("PlugStackConfig", "") or f"{one.etc}/plugstack.conf"
    ours = installing.our_conf(plugstack)
    lines = checking.shim_lines(plugstack)
    if not lines and not ground.settings.nodes.listen:
        yield skipped(_SPANK, "[nodes] listen is not set: no node is to tell of its steps")
        return
    if not lines:
        names = _nodes_here(one)
        if names:
            yield warning(
                _SPANK,
                f"this host is node {names[0]}, and its steps are not told of: {ours} is missing",
                "steward plugins build",
                checking.install_command(plugstack=plugstack),
            )
        else:
            yield skipped(_SPANK, "this host is no node: run 'steward plugins check' on one")
        return
    faults = checking.shim_faults(
        _version(one), libdir=_libdir(lines[0]), plugstack=plugstack, settings=ground.settings
    )
    for fault in faults:
        yield wrong(lines[0].file, fault.what, *fault.mend)
    if not faults:
        yield ok(lines[0].file, f"it is built for Slurm {_version(one)}, and its lines are written")


def _nodes_here(one: Asked) -> list[str]:
    here = socket.gethostname().partition(".")[0]
    nodes = Machine(one.name, one.settings).node_states().values()
    return [node.name for node in nodes if node.hostname.partition(".")[0] == here]


def _libdir(line: checking.ShimLine) -> str:
    """Where builds lie side by side, as a line that loads one names it."""
    return os.path.dirname(os.path.dirname(line.library)) or DEFAULT_LIBDIR


def _version(one: Asked) -> SlurmVersion:
    text = one.shown.get("SLURM_VERSION", "").split("-")[0]
    return SlurmVersion.parse(text) if text else SlurmVersion(*(one.version or (0, 0, 0)))


def _jobcomp(ground: Ground, one: Asked) -> Iterator[Finding]:
    path = f"{one.etc}/{installing.JOBCOMP}"
    looked_at = f"JobCompType, {path}"
    kind = one.shown.get("JobCompType", "") or "jobcomp/none"
    mend = (
        f"steward plugins install --jobcomp {one.etc}",
        "slurm.conf: JobCompType=jobcomp/lua",
        "systemctl restart slurmctld",
    )
    if not one.settings.jobcomp_lines:
        if ground.settings.accounting.type in ("jobacct/none", ""):
            yield skipped(looked_at, "no accounts are kept")
        elif kind in ("jobcomp/none", "jobcomp/lua"):
            yield warning(
                looked_at,
                f"jobcomp_lines is not set: lost are {_NO_JOBCOMP}",
                *mend,
                f'[cluster.{one.name}] jobcomp_lines = "{installing.DEFAULT_LINES}"',
            )
        else:
            yield warning(looked_at, f"the place is taken by {kind}: lost are {_NO_JOBCOMP}", *mend)
        return
    faults = telling.jobcomp_faults(one.shown, one.etc)
    for fault in faults:
        yield wrong(looked_at, fault.what, *fault.mend)
    if faults:
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        written = telling.lines_of(file.read())
    if os.path.realpath(written) != os.path.realpath(one.settings.jobcomp_lines):
        yield wrong(
            looked_at,
            f"slurmctld writes to {written}, Steward reads {one.settings.jobcomp_lines}",
            f'[cluster.{one.name}] jobcomp_lines = "{written}"',
        )
    else:
        yield ok(looked_at, f"slurmctld tells of jobs that end in {written}")


def _submit(ground: Ground, one: Asked) -> Iterator[Finding]:
    named = ",".join(plugins_of(one.shown)) or "(null)"
    looked_at = f"JobSubmitPlugins={named}"
    asks = bool(ASKING_PLUGINS & set(plugins_of(one.shown)))
    if not ground.settings.bank.enabled and not ground.settings.gate.ask:
        yield skipped(looked_at, "there is no bank here to ask")
        return
    if not asks:
        yield warning(
            looked_at,
            "slurmctld does not ask the bank: jobs are held for and charged from the queue, "
            "and no submission is refused",
            f"steward plugins install --job-submit-lua {one.etc}",
            f"slurm.conf: JobSubmitPlugins={','.join([*plugins_of(one.shown), 'lua'])}",
            "systemctl restart slurmctld",
        )
        return
    cluster = one.shown.get("ClusterName", "")
    if PLUGIN in plugins_of(one.shown) and cluster != one.name:
        # The plugin in C says ClusterName; Lua is not told it, and says what it was given.
        yield wrong(
            f"ClusterName={cluster}",
            f"the gate knows the cluster as {one.name}: of {cluster} it knows nothing",
            f"[cluster.{cluster}] in Steward's configuration, in place of [cluster.{one.name}]",
        )
    lines = submitting.check_submit(one.shown, _version(one), directory=one.etc)
    lines += reaching.check_reach(one.shown, reaching.conf_of(one.shown, one.etc))
    for line in lines:
        yield wrong(looked_at, line, f"steward plugins check --job-submit-lua {one.etc}")
    if not lines:
        yield ok(looked_at, "slurmctld asks the bank, behind all other plugins")


def _triggers(ground: Ground, one: Asked) -> Iterator[Finding]:
    sensor = ground.settings.sensor
    looked_at = f"strigger --get, {sensor.helper}"
    if not sensor.enabled or not sensor.triggers:
        yield skipped(looked_at, "the sensor is to set none")
        return
    user, uid = one.slurm_user
    own = ground.uid if ground.own_uid is None else ground.own_uid
    if own not in (0, uid):
        yield wrong(
            looked_at,
            f"only SlurmUser {user} may set triggers, Steward runs as {ground.own_name}: nodes "
            "are looked at by the clock alone",
            f"systemctl edit steward, [Service] User={user}",
            "or [sensor] triggers = false",
        )
        return
    socket_path = ground.settings.wake_socket(one.name)
    lines = waking.check_trigger(one.shown, sensor.helper, sensor.secret_file, socket_path)
    for line in lines:
        yield wrong(looked_at, line, "steward plugins install --trigger")
    found = [
        trigger
        for trigger in Triggers(one.name, one.settings).all()
        if os.path.basename(trigger.program.split()[0]) == HELPER_NAME
        and one.name in trigger.program.split()
    ]
    if lines:
        return
    if not found:
        yield wrong(
            looked_at,
            "none of Steward's triggers is set: the sensor sets them when it starts",
            "journalctl -u steward | grep triggers",
            "systemctl restart steward",
        )
    else:
        yield ok(looked_at, f"{len(found)} of at most {len(EVENTS)} triggers are set")


spank = each_cluster(_SPANK, _spank)
jobcomp = each_cluster("JobCompType", _jobcomp)
submit = each_cluster("JobSubmitPlugins", _submit)
triggers = each_cluster("strigger --get", _triggers)
