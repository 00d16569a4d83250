"""Health checks of Slurm: slurmctld, clocks, plugins, triggers, and the spool.

Private functions check one cluster; ``make_cluster_check`` turns them into the public checks of
all clusters: ``check_controllers``, ``check_job_memory``, ``check_poll_cost``, ``check_clocks``,
``check_usage_sources``, ``check_spank_plugin``, ``check_jobcomp_plugin``, ``check_submit_plugin``
and ``check_sensor_triggers``. ``check_slurmctld`` and ``check_spools`` handle clusters themselves.
``checks.py`` lists them all. Where another plugin takes the place of Steward's, the finding says
what data is lost.
"""

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from typing import Final

from steward.admin.doctor.context import CheckContext, ClusterReport, make_cluster_check
from steward.admin.doctor.findings import (
    CheckFinding,
    format_count,
    make_ok,
    make_skipped,
    make_warning,
    make_wrong,
)
from steward.admin.plugins.build import DEFAULT_LIBDIR, SlurmVersion
from steward.admin.plugins.installation import DEFAULT_LINES, JOBCOMP, get_own_conf, install_command
from steward.admin.plugins.job_submit import check_reach, check_submit, find_gate_conf
from steward.admin.plugins.jobcomp import find_jobcomp_faults, parse_lines_path
from steward.admin.plugins.spank import ShimLine, find_shim_faults, read_shim_lines
from steward.admin.plugins.trigger import check_trigger
from steward.bank.gate.plugin_conf import ASKING_PLUGINS, PLUGIN_NAME, parse_submit_plugins
from steward.capture.captured_jobs import CapturedScripts
from steward.capture.schedulers import load_scheduler
from steward.capture.sensor.triggers import TRIGGER_EVENTS
from steward.capture.settings import HELPER_NAME
from steward.core.errors import Unavailable
from steward.core.events import make_script_key
from steward.core.files import can_access, find_network_type
from steward.core.journal import JournalReader
from steward.core.poll_status import COST_FACTOR
from steward.slurm import ClusterQueries, SlurmError, SlurmUnavailable, Triggers

_OLDEST: Final = (22, 5)
_NEWEST: Final = (26, 5)
_SECONDS: Final = re.compile(r"(\d+)\s*sec")
_SKEW_S: Final = 2.0
"""Clock skew, in seconds, from which a check warns."""
_MUNGE_S: Final = 60.0
"""Clock skew, in seconds, that is an error: MUNGE accepts 300 s, which a drifting clock reaches."""
_SHORT_MEMORY_S: Final = 60
"""Shortest good MinJobAge, and longest good poll interval, in seconds."""
_NEARLY_ALL: Final = 0.9
"""Share of MaxJobCount from which a check warns."""


def check_slurmctld(ground: CheckContext, *, ping_s: float = 8.0) -> Iterator[CheckFinding]:
    """Check that Slurm's commands exist and slurmctld answers them.

    Args:
        ground: Context of the checks.
        ping_s: Longest wait for ``scontrol ping``, in seconds. Less than Slurm's shortest usual
            MessageTimeout of 10 s, after which Slurm reports a hanging daemon as DOWN.
    """
    if not ground.clusters:
        yield make_skipped("scontrol show config", "no cluster's Slurm is asked from here")
    for one in ground.clusters:
        yield _check_answer(one, ping_s)


def _check_answer(one: ClusterReport, ping_s: float) -> CheckFinding:
    """Check the version and answers of one cluster's Slurm."""
    looked_at = "squeue --version, scontrol show config"
    if one.version is None:
        return make_wrong(
            looked_at,
            one.no_version,
            f"[cluster.{one.name}] slurm_bin = the directory of Slurm's commands",
            of=one.name,
        )
    version = f"{one.version[0]}.{one.version[1]:02d}.{one.version[2]}"
    if one.no_answer:
        return _check_silent_slurmctld(one, f"{looked_at}, scontrol ping", ping_s)
    running = one.shown.get("SLURM_VERSION", version)
    if not _OLDEST <= one.version[:2] <= _NEWEST:
        return make_warning(
            looked_at,
            f"Slurm {version} is none that Steward is tested with (22.05 to 26.05)",
            of=one.name,
        )
    if running.split("-")[0] != version:
        return make_warning(
            looked_at,
            f"slurmctld is {running}, the commands here are {version}",
            "install the same Slurm on both",
            of=one.name,
        )
    return make_ok(looked_at, f"slurmctld {running} answers", of=one.name)


def _check_silent_slurmctld(one: ClusterReport, looked_at: str, ping_s: float) -> CheckFinding:
    """Distinguish a stopped slurmctld from a busy one, which still answers a ping."""
    try:
        pings = ClusterQueries(one.name, one.settings).controllers(timeout_s=ping_s)
    except SlurmUnavailable:
        return make_wrong(
            looked_at,
            f"slurmctld answers no ping within {ping_s:g} s: it hangs, or its host is away: "
            f"{one.no_answer}",
            "systemctl status slurmctld",
            of=one.name,
        )
    except SlurmError:
        pings = []
    if any(ping.up for ping in pings if ping.daemon == "slurmctld"):
        return make_wrong(
            looked_at,
            f"slurmctld is busy: it answers a ping, and nothing else: {one.no_answer}",
            "look at what slurmctld is busy with: sdiag",
            of=one.name,
        )
    is_down = any(ping.daemon == "slurmctld" for ping in pings)
    return make_wrong(
        looked_at,
        "slurmctld does not run: scontrol ping says DOWN"
        if is_down
        else f"slurmctld does not answer: {one.no_answer}",
        "systemctl start slurmctld" if is_down else "systemctl status slurmctld",
        of=one.name,
    )


def _check_hosts(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that every slurmctld host's spool is captured."""
    hosts = [
        re.split(r"[(:]", value)[0].strip()
        for name, value in one.shown.items()
        if name.startswith("SlurmctldHost[") and value
    ]
    looked_at = "SlurmctldHost, StateSaveLocation, scontrol ping"
    spool = one.shown.get("StateSaveLocation", "")
    kind = find_network_type(spool) if spool else ""
    down = [
        ping.host or ping.role
        for ping in ClusterQueries(one.name, one.settings).pings()
        if ping.daemon == "slurmctld" and not ping.up
    ]
    if len(hosts) < 2:
        yield make_ok(looked_at, f"there is one controller, {', '.join(hosts) or 'here'}")
        return
    if down:
        yield make_warning(
            looked_at, f"slurmctld on {', '.join(down)} is away", "systemctl status slurmctld"
        )
    here = socket.gethostname().partition(".")[0]
    others = [host for host in hosts if host.partition(".")[0] != here]
    reported = set(one.settings.controllers) | {
        name.partition(".")[0] for name in one.settings.controllers
    }
    unseen = [host for host in others if host not in reported]
    if kind:
        yield make_ok(
            looked_at, f"{len(hosts)} controllers share {spool} on {kind}, which is scanned"
        )
    elif unseen:
        yield make_wrong(
            looked_at,
            f"{spool} is a local disk as seen from here: what slurmctld on "
            f"{', '.join(unseen)} takes while it is in charge is not archived",
            f"run 'steward controller' on {', '.join(unseen)}, and set here "
            f"[cluster.{one.name}] controllers = {unseen}",
        )
    else:
        yield make_ok(looked_at, f"{', '.join(others)} may report for {one.name}")
    gate = ground.settings.gate
    if ground.settings.bank.enabled and not gate.listen:
        yield make_warning(
            "[gate] listen",
            "a slurmctld on another host cannot ask this gate: its policy holds for every job",
            "see docs/bank-operate.md: [gate] listen here, and ask on the other host",
        )


def _check_memory(_ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that slurmctld keeps ended jobs long enough and has room for new ones."""
    looked_at = "MinJobAge, MaxJobCount"
    age = int(found[1]) if (found := _SECONDS.match(one.shown.get("MinJobAge", ""))) else 0
    most = int(one.shown.get("MaxJobCount", "0") or 0)
    least = max(_SHORT_MEMORY_S, int(4 * one.settings.snapshot_interval_s))
    if age and age < least:
        told = "" if one.settings.jobcomp_lines else ", and nothing else tells of their ends"
        lost = make_wrong if age < 2 * one.settings.snapshot_interval_s and told else make_warning
        yield lost(
            looked_at,
            f"slurmctld forgets jobs {age} s after their end{told}: records of jobs that end "
            "while Steward is down are lost",
            "slurm.conf: MinJobAge=300",
        )
        return
    jobs = len(one.slurm.queue().rows)
    if most and jobs > _NEARLY_ALL * most:
        yield make_warning(
            looked_at,
            f"slurmctld holds {jobs} of at most {most} jobs: soon it takes no more",
            f"slurm.conf: MaxJobCount={2 * most}",
        )
    else:
        stay = f"for {age} s" if age else "for good"
        yield make_ok(
            looked_at,
            f"jobs stay {stay} after their end; it holds {format_count(jobs, 'job')} of {most}",
        )


def _check_poll_cost(_ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check how long one poll of the queue takes."""
    looked_at = "one squeue, as a look at the queue takes it"
    queue = one.slurm.queue()
    interval_s = one.settings.snapshot_interval_s
    apart_s = COST_FACTOR * queue.cost_s
    text = f"a look at {format_count(len(queue.rows), 'job')} takes {queue.cost_s:.2f} s"
    if apart_s > max(interval_s, _SHORT_MEMORY_S):
        yield make_warning(
            looked_at,
            f"{text}: looks are {apart_s:.0f} s apart, so as not to burden slurmctld",
            "look at what slurmctld is busy with: sdiag",
        )
    else:
        yield make_ok(looked_at, f"{text}, one is taken every {max(apart_s, interval_s):.1f} s")


def _check_clocks(_ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check the clocks of slurmctld and nodes against this host's."""
    looked_at = "slurmctld's clock, and when nodes say that their slurmd started"
    began = time.time()
    shown = one.slurm.clock().timestamp()
    ended = time.time()
    # Slurm truncates to whole seconds.
    skew_s = max(began - (shown + 1.0), shown - ended, 0.0)
    if skew_s > _SKEW_S:
        grave = make_wrong if skew_s > _MUNGE_S else make_warning
        yield grave(
            looked_at,
            f"slurmctld's clock and this host's are {skew_s:.0f} s apart",
            "chronyc tracking",
            "systemctl restart chronyd",
        )
        return
    ahead = [
        node.name
        for node in ClusterQueries(one.name, one.settings).node_states().values()
        for at in (node.slurmd_started_at, node.boot_at)
        if at is not None and at.timestamp() > ended + _SKEW_S
    ]
    if ahead:
        names = sorted(set(ahead))
        yield make_warning(
            looked_at,
            f"the clock of {names[0]} is ahead: its slurmd started in the future"
            + (f" (and {len(names) - 1} more)" if len(names) > 1 else ""),
            f"ssh {names[0]} chronyc tracking",
        )
    else:
        yield make_ok(looked_at, "slurmctld's clock is this host's, and no node's is ahead")


check_controllers = make_cluster_check(
    "SlurmctldHost, StateSaveLocation, scontrol ping", _check_hosts
)
check_job_memory = make_cluster_check("MinJobAge, MaxJobCount", _check_memory)
check_poll_cost = make_cluster_check("one squeue", _check_poll_cost)
check_clocks = make_cluster_check("slurmctld's clock", _check_clocks)


_USAGE_SETTINGS: Final = "ProctrackType, JobAcctGatherType, TaskEpilog"
_NOT_CONTAINED: Final = ("proctrack/pgid", "proctrack/linuxproc")


def _check_usage(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that Slurm or the agents measure what jobs use."""
    shown, tells = one.shown, bool(ground.settings.nodes.listen)
    strange = False
    tracked = shown.get("ProctrackType", "")
    if tells and tracked in _NOT_CONTAINED:
        strange = True
        yield make_warning(
            _USAGE_SETTINGS,
            f"{tracked} has no control groups: processes that leave their task are nobody's",
            "slurm.conf: ProctrackType=proctrack/cgroup",
        )
    gathered = shown.get("JobAcctGatherType", "")
    if not tells and gathered in ("", "jobacct_gather/none"):
        strange = True
        yield make_warning(
            _USAGE_SETTINGS,
            "neither Slurm nor Steward's agents tell what jobs use",
            "slurm.conf: JobAcctGatherType=jobacct_gather/cgroup",
            "or docs/accounting.md: the SPANK plugin, and the agent",
        )
    epilog = shown.get("TaskEpilog", "")
    if tells and epilog:
        strange = True
        yield make_warning(
            _USAGE_SETTINGS,
            f"TaskEpilog is {epilog}: its CPU time counts to the task, and is marked so",
            "use Epilog, where it need not run within the task",
        )
    if not strange:
        yield make_ok(_USAGE_SETTINGS, f"{tracked}, {gathered or 'jobacct_gather/none'}")


check_usage_sources = make_cluster_check(_USAGE_SETTINGS, _check_usage)


_SPANK: Final = "plugstack.conf.d, and the library that it names"
_NO_JOBCOMP: Final = "former sizes of resized jobs, and jobs that come and go while slurmctld or \
Steward is away for longer than MinJobAge"


def _check_spank(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check the SPANK plugin of this host, if it is a node."""
    plugstack = one.shown.get("PlugStackConfig", "") or f"{one.etc}/plugstack.conf"
    ours = get_own_conf(plugstack)
    lines = read_shim_lines(plugstack)
    if not lines and not ground.settings.nodes.listen:
        yield make_skipped(_SPANK, "[nodes] listen is not set: no node is to tell of its steps")
        return
    if not lines:
        names = _list_local_nodes(one)
        if names:
            yield make_warning(
                _SPANK,
                f"this host is node {names[0]}, and its steps are not told of: {ours} is missing",
                "steward plugins build",
                install_command(plugstack=plugstack),
            )
        else:
            yield make_skipped(_SPANK, "this host is no node: run 'steward plugins check' on one")
        return
    faults = find_shim_faults(
        _get_version(one),
        libdir=_get_libdir(lines[0]),
        plugstack=plugstack,
        settings=ground.settings,
    )
    for fault in faults:
        yield make_wrong(lines[0].file, fault.what, *fault.mend)
    if not faults:
        yield make_ok(
            lines[0].file, f"it is built for Slurm {_get_version(one)}, and its lines are written"
        )


def _list_local_nodes(one: ClusterReport) -> list[str]:
    here = socket.gethostname().partition(".")[0]
    nodes = ClusterQueries(one.name, one.settings).node_states().values()
    return [node.name for node in nodes if node.hostname.partition(".")[0] == here]


def _get_libdir(line: ShimLine) -> str:
    """Return the directory of all builds, from the library that a line loads."""
    return os.path.dirname(os.path.dirname(line.library)) or DEFAULT_LIBDIR


def _get_version(one: ClusterReport) -> SlurmVersion:
    text = one.shown.get("SLURM_VERSION", "").split("-")[0]
    return SlurmVersion.parse(text) if text else SlurmVersion(*(one.version or (0, 0, 0)))


def _check_jobcomp(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that slurmctld writes ended jobs to the file that Steward reads."""
    path = f"{one.etc}/{JOBCOMP}"
    looked_at = f"JobCompType, {path}"
    kind = one.shown.get("JobCompType", "") or "jobcomp/none"
    mend = (
        f"steward plugins install --jobcomp {one.etc}",
        "slurm.conf: JobCompType=jobcomp/lua",
        "systemctl restart slurmctld",
    )
    if not one.settings.jobcomp_lines:
        if ground.settings.accounting.type in ("jobacct/none", ""):
            yield make_skipped(looked_at, "no accounts are kept")
        elif kind in ("jobcomp/none", "jobcomp/lua"):
            yield make_warning(
                looked_at,
                f"jobcomp_lines is not set: lost are {_NO_JOBCOMP}",
                *mend,
                f'[cluster.{one.name}] jobcomp_lines = "{DEFAULT_LINES}"',
            )
        else:
            yield make_warning(
                looked_at, f"the place is taken by {kind}: lost are {_NO_JOBCOMP}", *mend
            )
        return
    faults = find_jobcomp_faults(one.shown, one.etc)
    for fault in faults:
        yield make_wrong(looked_at, fault.what, *fault.mend)
    if faults:
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        written = parse_lines_path(file.read())
    if os.path.realpath(written) != os.path.realpath(one.settings.jobcomp_lines):
        yield make_wrong(
            looked_at,
            f"slurmctld writes to {written}, Steward reads {one.settings.jobcomp_lines}",
            f'[cluster.{one.name}] jobcomp_lines = "{written}"',
        )
    else:
        yield make_ok(looked_at, f"slurmctld tells of jobs that end in {written}")


def _check_submit(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that slurmctld's submit plugin asks the gate, after all others."""
    named = ",".join(parse_submit_plugins(one.shown)) or "(null)"
    looked_at = f"JobSubmitPlugins={named}"
    asks = bool(ASKING_PLUGINS & set(parse_submit_plugins(one.shown)))
    if not ground.settings.bank.enabled and not ground.settings.gate.ask:
        yield make_skipped(looked_at, "there is no bank here to ask")
        return
    if not asks:
        yield make_warning(
            looked_at,
            "slurmctld does not ask the bank: jobs are held for and charged from the queue, "
            "and no submission is refused",
            f"steward plugins install --job-submit-lua {one.etc}",
            f"slurm.conf: JobSubmitPlugins={','.join([*parse_submit_plugins(one.shown), 'lua'])}",
            "systemctl restart slurmctld",
        )
        return
    cluster = one.shown.get("ClusterName", "")
    if PLUGIN_NAME in parse_submit_plugins(one.shown) and cluster != one.name:
        # The plugin in C sends ClusterName; Lua does not know it and sends the configured name.
        yield make_wrong(
            f"ClusterName={cluster}",
            f"the gate knows the cluster as {one.name}: of {cluster} it knows nothing",
            f"[cluster.{cluster}] in Steward's configuration, in place of [cluster.{one.name}]",
        )
    lines = check_submit(one.shown, _get_version(one), directory=one.etc)
    lines += check_reach(one.shown, find_gate_conf(one.shown, one.etc))
    for line in lines:
        yield make_wrong(looked_at, line, f"steward plugins check --job-submit-lua {one.etc}")
    if not lines:
        yield make_ok(looked_at, "slurmctld asks the bank, behind all other plugins")


def _check_triggers(ground: CheckContext, one: ClusterReport) -> Iterator[CheckFinding]:
    """Check that Steward's triggers are set and can wake the sensor."""
    sensor = ground.settings.sensor
    looked_at = f"strigger --get, {sensor.helper}"
    if not sensor.enabled or not sensor.triggers:
        yield make_skipped(looked_at, "the sensor is to set none")
        return
    user, uid = one.slurm_user
    own = ground.uid if ground.own_uid is None else ground.own_uid
    if own not in (0, uid):
        yield make_wrong(
            looked_at,
            f"only SlurmUser {user} may set triggers, Steward runs as {ground.own_name}: nodes "
            "are looked at by the clock alone",
            f"systemctl edit steward, [Service] User={user}",
            "or [sensor] triggers = false",
        )
        return
    socket_path = ground.settings.wake_socket(one.name)
    lines = check_trigger(one.shown, sensor.helper, sensor.secret_file, socket_path)
    for line in lines:
        yield make_wrong(looked_at, line, "steward plugins install --trigger")
    found = [
        trigger
        for trigger in Triggers(one.name, one.settings).all()
        if os.path.basename(trigger.program.split()[0]) == HELPER_NAME
        and one.name in trigger.program.split()
    ]
    if lines:
        return
    if not found:
        yield make_wrong(
            looked_at,
            "none of Steward's triggers is set: the sensor sets them when it starts",
            "journalctl -u steward | grep triggers",
            "systemctl restart steward",
        )
    else:
        yield make_ok(looked_at, f"{len(found)} of at most {len(TRIGGER_EVENTS)} triggers are set")


check_spank_plugin = make_cluster_check(_SPANK, _check_spank)
check_jobcomp_plugin = make_cluster_check("JobCompType", _check_jobcomp)
check_submit_plugin = make_cluster_check("JobSubmitPlugins", _check_submit)
check_sensor_triggers = make_cluster_check("strigger --get", _check_triggers)


_PATIENCE_S: Final = 120.0
"""Age, in seconds, from which a script in the spool should have been captured."""
_MOST: Final = 2000
"""Most scripts of a spool to look up, the newest ones."""
_JOB: Final = re.compile(r"job\.(\d+)")
_SPOOL_CHECK: Final = "the spool, and whether what lies in it was taken"


def check_spools(ground: CheckContext) -> Iterator[CheckFinding]:
    """Check that each cluster's spool is readable and its scripts are captured."""
    shown = {one.name: one for one in ground.clusters}
    found = False
    for name, of in ground.settings.cluster.items():
        if of.remote:
            continue
        found = True
        usual = load_scheduler(of.scheduler).default_root
        of_slurm = shown[name].shown.get("StateSaveLocation", "") if name in shown else ""
        path = of.spool or usual or of_slurm
        if not path:
            yield make_skipped(
                _SPOOL_CHECK, "slurmctld does not answer, so nobody says where", of=name
            )
        else:
            yield _check_spool(ground, name, path, is_slurms=of.scheduler == "slurm")
    if not found:
        yield make_skipped(_SPOOL_CHECK, "every cluster is captured elsewhere (remote = true)")


def _check_spool(ground: CheckContext, name: str, path: str, *, is_slurms: bool) -> CheckFinding:
    """Check one cluster's spool: access, file system, captured scripts."""
    own = ground.uid if ground.own_uid is None else ground.own_uid
    try:
        os.stat(path)
        kind = find_network_type(path)
    except OSError as error:
        return make_wrong(
            path,
            f"{error.strerror}: run Steward on slurmctld's host, or set where it is",
            f'[cluster.{name}] spool = "the StateSaveLocation of slurm.conf"',
            of=name,
        )
    if can_access(own, "r", path) is False:
        return make_wrong(
            path,
            f"{ground.own_name}, as whom Steward runs, cannot read it",
            "run Steward as SlurmUser: systemctl edit steward, [Service] User=…",
            of=name,
        )
    if not is_slurms:
        return make_ok(path, "it can be read", of=name)
    if not ground.is_root and ground.uid != own:
        return make_skipped(path, "only root and Steward's user can look into it", of=name)
    return _check_captured(ground, name, path, kind)


def _check_captured(ground: CheckContext, name: str, path: str, kind: str) -> CheckFinding:
    """Check that the journal knows the scripts that have been in the spool for a while."""
    old = sorted(_list_old_scripts(path))[-_MOST:]
    try:
        missing = _find_uncaptured(ground.settings.state_dir, name, old)
    except Unavailable as error:
        why = f"nothing of it was ever taken: {error}"
        return make_wrong(path, why, "systemctl start steward", of=name)
    if missing:
        return make_wrong(
            path,
            f"{format_count(len(missing), 'script')} of {len(old)} not taken, job {missing[0]} "
            "first",
            "journalctl -u steward -p warning",
            "systemctl restart steward",
            of=name,
        )
    text = f"{format_count(len(old), 'script')} there for a while, all of them taken"
    if kind:
        return make_warning(
            path,
            f"it is on {kind}, where nobody is told of new files: it is scanned. {text}",
            "run Steward, or steward controller, on slurmctld's host with the spool on its disk",
            of=name,
        )
    return make_ok(path, text, of=name)


def _list_old_scripts(path: str) -> Iterator[tuple[int, int]]:
    """Yield time and job id of each script that has been in the spool for a while."""
    before_ns = time.time_ns() - int(_PATIENCE_S * 1e9)
    for hashed in os.scandir(path):
        if not hashed.name.startswith("hash.") or not hashed.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(hashed.path):
            job = _JOB.fullmatch(entry.name)
            # slurmctld may delete entries at any moment.
            with contextlib.suppress(OSError):
                mtime_ns = os.stat(f"{entry.path}/script", follow_symlinks=False).st_mtime_ns
                if job is not None and mtime_ns < before_ns:
                    yield mtime_ns, int(job[1])


def _find_uncaptured(state_dir: str, cluster: str, scripts: list[tuple[int, int]]) -> list[int]:
    """Return the jobs whose scripts the journal does not know."""
    reader = JournalReader(state_dir)
    known = CapturedScripts(state_dir, reader)
    try:
        return [
            job_id
            for mtime_ns, job_id in scripts
            if not known.known(cluster, make_script_key(job_id, mtime_ns))
        ]
    finally:
        known.close()
        reader.close()
