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
from steward.admin.plugins.installation import (
    DEFAULT_LINES_PATH,
    JOBCOMP_SCRIPT,
    get_own_conf,
    install_command,
)
from steward.admin.plugins.job_submit import check_reach, check_submit, find_gate_conf
from steward.admin.plugins.jobcomp import find_jobcomp_faults, parse_lines_path
from steward.admin.plugins.spank import ShimLine, find_shim_faults, read_shim_lines
from steward.admin.plugins.trigger import check_trigger
from steward.bank.gate.plugin_conf import GATE_PLUGINS, PLUGIN_NAME, parse_submit_plugins
from steward.capture.script_lookup import CapturedScripts
from steward.capture.sensor.triggers import TRIGGER_EVENTS
from steward.capture.settings import HELPER_NAME
from steward.capture.spool_entries import load_scheduler
from steward.core.errors import Unavailable
from steward.core.events import make_script_key
from steward.core.files import can_access, find_network_type
from steward.core.journal import JournalReader
from steward.core.poll_status import COST_FACTOR
from steward.slurm import SlurmError, SlurmUnavailable, Triggers

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


def check_slurmctld(
    context: CheckContext, *, ping_timeout_s: float = 8.0
) -> Iterator[CheckFinding]:
    """Check that Slurm's commands exist and slurmctld answers them.

    Args:
        context: Context of the checks.
        ping_timeout_s: Longest wait for ``scontrol ping``, in seconds. Less than Slurm's shortest
            usual MessageTimeout of 10 s, after which Slurm reports a hanging daemon as DOWN.
    """
    if not context.clusters:
        yield make_skipped("scontrol show config", "no cluster is queried from this host")
    for report in context.clusters:
        yield _check_answer(report, ping_timeout_s)


def _check_answer(report: ClusterReport, ping_timeout_s: float) -> CheckFinding:
    """Check the version and answers of one cluster's Slurm."""
    checked = "squeue --version, scontrol show config"
    if report.version is None:
        return make_wrong(
            checked,
            report.version_error,
            f"[cluster.{report.name}] slurm_bin = the directory of Slurm's commands",
            name=report.name,
        )
    version = f"{report.version[0]}.{report.version[1]:02d}.{report.version[2]}"
    if report.config_error:
        return _check_silent_slurmctld(report, f"{checked}, scontrol ping", ping_timeout_s)
    running = report.config.get("SLURM_VERSION", version)
    if not _OLDEST <= report.version[:2] <= _NEWEST:
        return make_warning(
            checked,
            f"Steward is not tested with Slurm {version}, only with 22.05 to 26.05",
            name=report.name,
        )
    if running.split("-")[0] != version:
        return make_warning(
            checked,
            f"slurmctld has version {running}, but the commands here have {version}",
            "install the same Slurm on both",
            name=report.name,
        )
    return make_ok(checked, f"slurmctld {running} answers", name=report.name)


def _check_silent_slurmctld(
    report: ClusterReport, checked: str, ping_timeout_s: float
) -> CheckFinding:
    """Distinguish a stopped slurmctld from a busy one, which still answers a ping."""
    try:
        pings = report.queries.ping_controllers(timeout_s=ping_timeout_s)
    except SlurmUnavailable:
        return make_wrong(
            checked,
            f"slurmctld does not answer a ping within {ping_timeout_s:g} s: it hangs, or its host "
            f"is down: {report.config_error}",
            "systemctl status slurmctld",
            name=report.name,
        )
    except SlurmError:
        pings = []
    if any(ping.up for ping in pings if ping.daemon == "slurmctld"):
        return make_wrong(
            checked,
            f"slurmctld is busy: it answers a ping, but no other request: {report.config_error}",
            "find out with sdiag why slurmctld is busy",
            name=report.name,
        )
    is_down = any(ping.daemon == "slurmctld" for ping in pings)
    return make_wrong(
        checked,
        "slurmctld is not running: scontrol ping reports DOWN"
        if is_down
        else f"slurmctld does not answer: {report.config_error}",
        "systemctl start slurmctld" if is_down else "systemctl status slurmctld",
        name=report.name,
    )


def _check_hosts(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that every slurmctld host's spool is captured."""
    hosts = [
        re.split(r"[(:]", value)[0].strip()
        for name, value in report.config.items()
        if name.startswith("SlurmctldHost[") and value
    ]
    checked = "SlurmctldHost, StateSaveLocation, scontrol ping"
    spool = report.config.get("StateSaveLocation", "")
    network_type = find_network_type(spool) if spool else ""
    down = [
        ping.host or ping.role
        for ping in report.queries.pings()
        if ping.daemon == "slurmctld" and not ping.up
    ]
    if len(hosts) < 2:
        yield make_ok(checked, f"one controller: {', '.join(hosts) or 'this host'}")
        return
    if down:
        yield make_warning(
            checked, f"slurmctld on {', '.join(down)} is down", "systemctl status slurmctld"
        )
    this_host = socket.gethostname().partition(".")[0]
    others = [host for host in hosts if host.partition(".")[0] != this_host]
    reported = set(report.settings.controllers) | {
        name.partition(".")[0] for name in report.settings.controllers
    }
    unreported = [host for host in others if host not in reported]
    if network_type:
        yield make_ok(
            checked,
            f"{len(hosts)} controllers share {spool} on {network_type}, which Steward scans",
        )
    elif unreported:
        yield make_wrong(
            checked,
            f"{spool} is a local disk on this host: jobs that slurmctld on "
            f"{', '.join(unreported)} accepts after a failover are not archived",
            f"run 'steward controller' on {', '.join(unreported)}, and set "
            f"[cluster.{report.name}] controllers = {unreported}",
        )
    else:
        yield make_ok(checked, f"{', '.join(others)} may forward events of {report.name}")
    gate = context.settings.gate
    if context.settings.bank.enabled and not gate.listen:
        yield make_warning(
            "[gate] listen",
            "a slurmctld on another host cannot ask this gate: the outage policy applies to "
            "every job",
            "see docs/bank-operate.md: set [gate] 'listen' here and 'ask' on the other host",
        )


def _check_memory(_context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that slurmctld keeps ended jobs long enough and has room for new ones."""
    checked = "MinJobAge, MaxJobCount"
    min_age_s = (
        int(match[1]) if (match := _SECONDS.match(report.config.get("MinJobAge", ""))) else 0
    )
    max_jobs = int(report.config.get("MaxJobCount", "0") or 0)
    required_s = max(_SHORT_MEMORY_S, int(4 * report.settings.snapshot_interval_s))
    if min_age_s and min_age_s < required_s:
        remark = "" if report.settings.jobcomp_lines else ", and no other source reports job ends"
        make_finding = (
            make_wrong
            if min_age_s < 2 * report.settings.snapshot_interval_s and remark
            else make_warning
        )
        yield make_finding(
            checked,
            f"slurmctld keeps ended jobs only for {min_age_s} s{remark}: records of jobs that "
            "end while Steward is down are lost",
            "slurm.conf: MinJobAge=300",
        )
        return
    jobs = len(report.slurm.queue().rows)
    if max_jobs and jobs > _NEARLY_ALL * max_jobs:
        yield make_warning(
            checked,
            f"slurmctld has {jobs} of at most {max_jobs} jobs: it will reject submits soon",
            f"slurm.conf: MaxJobCount={2 * max_jobs}",
        )
    else:
        duration = f"for {min_age_s} s" if min_age_s else "forever"
        yield make_ok(
            checked,
            f"slurmctld keeps ended jobs {duration}; it has {format_count(jobs, 'job')} of "
            f"{max_jobs}",
        )


def _check_poll_cost(_context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check how long one poll of the queue takes."""
    checked = "one squeue, as in a poll"
    queue = report.slurm.queue()
    interval_s = report.settings.snapshot_interval_s
    poll_interval_s = COST_FACTOR * queue.cost_s
    text = f"a poll of {format_count(len(queue.rows), 'job')} takes {queue.cost_s:.2f} s"
    if poll_interval_s > max(interval_s, _SHORT_MEMORY_S):
        yield make_warning(
            checked,
            f"{text}: polls are {poll_interval_s:.0f} s apart to spare slurmctld",
            "find out with sdiag why slurmctld is busy",
        )
    else:
        yield make_ok(checked, f"{text}, one poll every {max(poll_interval_s, interval_s):.1f} s")


def _check_clocks(_context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check the clocks of slurmctld and nodes against this host's."""
    checked = "clocks of slurmctld and of nodes, from their slurmd start times"
    began = time.time()
    slurmctld_time = report.slurm.read_clock().timestamp()
    ended = time.time()
    # Slurm truncates to whole seconds.
    skew_s = max(began - (slurmctld_time + 1.0), slurmctld_time - ended, 0.0)
    if skew_s > _SKEW_S:
        make_finding = make_wrong if skew_s > _MUNGE_S else make_warning
        yield make_finding(
            checked,
            f"the clocks of slurmctld and this host differ by {skew_s:.0f} s",
            "chronyc tracking",
            "systemctl restart chronyd",
        )
        return
    ahead = [
        node.name
        for node in report.queries.node_states().values()
        for at in (node.slurmd_started_at, node.boot_at)
        if at is not None and at.timestamp() > ended + _SKEW_S
    ]
    if ahead:
        names = sorted(set(ahead))
        yield make_warning(
            checked,
            f"the clock of node {names[0]} is ahead: its slurmd started in the future"
            + (f" (and {len(names) - 1} more)" if len(names) > 1 else ""),
            f"ssh {names[0]} chronyc tracking",
        )
    else:
        yield make_ok(checked, "the clocks of slurmctld and this host agree, and no node is ahead")


check_controllers = make_cluster_check(
    "SlurmctldHost, StateSaveLocation, scontrol ping", _check_hosts
)
check_job_memory = make_cluster_check("MinJobAge, MaxJobCount", _check_memory)
check_poll_cost = make_cluster_check("one squeue", _check_poll_cost)
check_clocks = make_cluster_check("slurmctld's clock", _check_clocks)


_USAGE_SETTINGS: Final = "ProctrackType, JobAcctGatherType, TaskEpilog"
_NOT_CONTAINED: Final = ("proctrack/pgid", "proctrack/linuxproc")


def _check_usage(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that Slurm or the agents measure what jobs use."""
    config, has_agents = report.config, bool(context.settings.nodes.listen)
    has_problem = False
    proctrack = config.get("ProctrackType", "")
    if has_agents and proctrack in _NOT_CONTAINED:
        has_problem = True
        yield make_warning(
            _USAGE_SETTINGS,
            f"{proctrack} uses no control groups: processes that leave their task are not measured",
            "slurm.conf: ProctrackType=proctrack/cgroup",
        )
    jobacct_gather = config.get("JobAcctGatherType", "")
    if not has_agents and jobacct_gather in ("", "jobacct_gather/none"):
        has_problem = True
        yield make_warning(
            _USAGE_SETTINGS,
            "neither Slurm nor Steward's agents measure jobs",
            "slurm.conf: JobAcctGatherType=jobacct_gather/cgroup",
            "or install the SPANK plugin and the agent: docs/accounting.md",
        )
    epilog = config.get("TaskEpilog", "")
    if has_agents and epilog:
        has_problem = True
        yield make_warning(
            _USAGE_SETTINGS,
            f"TaskEpilog is {epilog}: its CPU time counts as the task's, marked 'with TaskEpilog'",
            "use Epilog, unless it must run within the task",
        )
    if not has_problem:
        yield make_ok(_USAGE_SETTINGS, f"{proctrack}, {jobacct_gather or 'jobacct_gather/none'}")


check_usage_sources = make_cluster_check(_USAGE_SETTINGS, _check_usage)


_SPANK: Final = "plugstack.conf.d, and the library that it names"
_NO_JOBCOMP: Final = "former sizes of resized jobs, and jobs that come and go while slurmctld or \
Steward is away for longer than MinJobAge"


def _check_spank(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check the SPANK plugin of this host, if it is a node."""
    plugstack = report.config.get("PlugStackConfig", "") or f"{report.conf_dir}/plugstack.conf"
    own_conf = get_own_conf(plugstack)
    lines = read_shim_lines(plugstack)
    if not lines and not context.settings.nodes.listen:
        yield make_skipped(_SPANK, "[nodes] listen is not set: nodes report no steps")
        return
    if not lines:
        names = _list_local_nodes(report)
        if names:
            yield make_warning(
                _SPANK,
                f"this host is node {names[0]}, but its steps are not reported: {own_conf} is "
                "missing",
                "steward plugins build",
                install_command(plugstack=plugstack),
            )
        else:
            yield make_skipped(
                _SPANK, "this host is not a compute node: run 'steward plugins check' on one"
            )
        return
    faults = find_shim_faults(
        _get_version(report),
        libdir=_get_libdir(lines[0]),
        plugstack=plugstack,
        settings=context.settings,
    )
    for fault in faults:
        yield make_wrong(lines[0].file, fault.problem, *fault.fix)
    if not faults:
        yield make_ok(
            lines[0].file,
            f"built for Slurm {_get_version(report)}, and its lines are written",
        )


def _list_local_nodes(report: ClusterReport) -> list[str]:
    this_host = socket.gethostname().partition(".")[0]
    nodes = report.queries.node_states().values()
    return [node.name for node in nodes if node.hostname.partition(".")[0] == this_host]


def _get_libdir(line: ShimLine) -> str:
    """Return the directory of all builds, from the library that a line loads."""
    return os.path.dirname(os.path.dirname(line.library)) or DEFAULT_LIBDIR


def _get_version(report: ClusterReport) -> SlurmVersion:
    text = report.config.get("SLURM_VERSION", "").split("-")[0]
    return SlurmVersion.parse(text) if text else SlurmVersion(*(report.version or (0, 0, 0)))


def _check_jobcomp(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that slurmctld writes ended jobs to the file that Steward reads."""
    path = f"{report.conf_dir}/{JOBCOMP_SCRIPT}"
    checked = f"JobCompType, {path}"
    kind = report.config.get("JobCompType", "") or "jobcomp/none"
    fix = (
        f"steward plugins install --jobcomp {report.conf_dir}",
        "slurm.conf: JobCompType=jobcomp/lua",
        "systemctl restart slurmctld",
    )
    if not report.settings.jobcomp_lines:
        if context.settings.accounting.type in ("jobacct/none", ""):
            yield make_skipped(checked, "accounting is disabled")
        elif kind in ("jobcomp/none", "jobcomp/lua"):
            yield make_warning(
                checked,
                f"jobcomp_lines is not set, so Steward misses {_NO_JOBCOMP}",
                *fix,
                f'[cluster.{report.name}] jobcomp_lines = "{DEFAULT_LINES_PATH}"',
            )
        else:
            yield make_warning(
                checked, f"JobCompType is {kind}, so Steward misses {_NO_JOBCOMP}", *fix
            )
        return
    faults = find_jobcomp_faults(report.config, report.conf_dir)
    for fault in faults:
        yield make_wrong(checked, fault.problem, *fault.fix)
    if faults:
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        written = parse_lines_path(file.read())
    if os.path.realpath(written) != os.path.realpath(report.settings.jobcomp_lines):
        yield make_wrong(
            checked,
            f"slurmctld writes to {written}, but Steward reads {report.settings.jobcomp_lines}",
            f'[cluster.{report.name}] jobcomp_lines = "{written}"',
        )
    else:
        yield make_ok(checked, f"slurmctld reports job ends in {written}")


def _check_submit(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that slurmctld's submit plugin asks the gate, after all others."""
    plugins = ",".join(parse_submit_plugins(report.config)) or "(null)"
    checked = f"JobSubmitPlugins={plugins}"
    asks_gate = bool(GATE_PLUGINS & set(parse_submit_plugins(report.config)))
    if not context.settings.bank.enabled and not context.settings.gate.ask:
        yield make_skipped(checked, "the bank is disabled")
        return
    if not asks_gate:
        yield make_warning(
            checked,
            "slurmctld does not ask the gate: jobs get holds and charges from queue polls, "
            "and no submission is rejected",
            f"steward plugins install --job-submit-lua {report.conf_dir}",
            "slurm.conf: "
            f"JobSubmitPlugins={','.join([*parse_submit_plugins(report.config), 'lua'])}",
            "systemctl restart slurmctld",
        )
        return
    cluster = report.config.get("ClusterName", "")
    if PLUGIN_NAME in parse_submit_plugins(report.config) and cluster != report.name:
        # The plugin in C sends ClusterName; Lua does not know it and sends the configured name.
        yield make_wrong(
            f"ClusterName={cluster}",
            f"the gate knows the cluster as {report.name}, but slurmctld asks as {cluster}",
            f"rename [cluster.{report.name}] to [cluster.{cluster}] in Steward's configuration",
        )
    lines = check_submit(report.config, _get_version(report), directory=report.conf_dir)
    lines += check_reach(report.config, find_gate_conf(report.config, report.conf_dir))
    for line in lines:
        yield make_wrong(checked, line, f"steward plugins check --job-submit-lua {report.conf_dir}")
    if not lines:
        yield make_ok(checked, "slurmctld asks the gate, after all other plugins")


def _check_triggers(context: CheckContext, report: ClusterReport) -> Iterator[CheckFinding]:
    """Check that Steward's triggers are set and can wake the sensor."""
    sensor = context.settings.sensor
    checked = f"strigger --get, {sensor.helper}"
    if not sensor.enabled or not sensor.helper:
        yield make_skipped(checked, "triggers are disabled: [sensor] helper is empty")
        return
    user, uid = report.slurm_user
    steward_uid = context.uid if context.steward_uid is None else context.steward_uid
    if steward_uid not in (0, uid):
        yield make_wrong(
            checked,
            f"only SlurmUser {user} may set triggers, but Steward runs as "
            f"{context.steward_user}: the sensor polls nodes instead",
            f"systemctl edit steward, [Service] User={user}",
            'or [sensor] helper = ""',
        )
        return
    socket_path = context.settings.wake_socket(report.name)
    lines = check_trigger(report.config, sensor.helper, sensor.secret_file, socket_path)
    for line in lines:
        yield make_wrong(checked, line, "steward plugins install --trigger")
    triggers = [
        trigger
        for trigger in Triggers(report.name, report.settings, report.timeout_s).list_all()
        if os.path.basename(trigger.program.split()[0]) == HELPER_NAME
        and report.name in trigger.program.split()
    ]
    if lines:
        return
    if not triggers:
        yield make_wrong(
            checked,
            "no trigger of Steward is set: the sensor sets them when it starts",
            "journalctl -u steward | grep triggers",
            "systemctl restart steward",
        )
    else:
        yield make_ok(checked, f"{len(triggers)} of at most {len(TRIGGER_EVENTS)} triggers set")


check_spank_plugin = make_cluster_check(_SPANK, _check_spank)
check_jobcomp_plugin = make_cluster_check("JobCompType", _check_jobcomp)
check_submit_plugin = make_cluster_check("JobSubmitPlugins", _check_submit)
check_sensor_triggers = make_cluster_check("strigger --get", _check_triggers)


_PATIENCE_S: Final = 120.0
"""Age, in seconds, from which a script in the spool should have been captured."""
_MOST: Final = 2000
"""Most scripts of a spool to look up, the newest ones."""
_JOB: Final = re.compile(r"job\.(\d+)")
_SPOOL_CHECK: Final = "the spool, and whether its scripts were captured"


def check_spools(context: CheckContext) -> Iterator[CheckFinding]:
    """Check that each cluster's spool is readable and its scripts are captured."""
    reports = {report.name: report for report in context.clusters}
    has_spool = False
    for name, settings in context.settings.cluster.items():
        if settings.remote:
            continue
        has_spool = True
        default_path = load_scheduler(settings.scheduler).default_root
        slurm_path = reports[name].config.get("StateSaveLocation", "") if name in reports else ""
        path = settings.spool or default_path or slurm_path
        if not path:
            yield make_skipped(_SPOOL_CHECK, "unknown path: slurmctld does not answer", name=name)
        else:
            yield _check_spool(context, name, path, is_slurms=settings.scheduler == "slurm")
    if not has_spool:
        yield make_skipped(_SPOOL_CHECK, "controllers capture every cluster (remote = true)")


def _check_spool(context: CheckContext, name: str, path: str, *, is_slurms: bool) -> CheckFinding:
    """Check one cluster's spool: access, file system, captured scripts."""
    steward_uid = context.uid if context.steward_uid is None else context.steward_uid
    try:
        os.stat(path)
        network_type = find_network_type(path)
    except OSError as error:
        return make_wrong(
            path,
            f"{error.strerror}: run Steward on slurmctld's host, or set the path",
            f'[cluster.{name}] spool = "the StateSaveLocation of slurm.conf"',
            name=name,
        )
    if can_access(steward_uid, "r", path) is False:
        return make_wrong(
            path,
            f"Steward's user {context.steward_user} cannot read it",
            "run Steward as SlurmUser: systemctl edit steward, [Service] User=…",
            name=name,
        )
    if not is_slurms:
        return make_ok(path, "readable", name=name)
    if not context.is_root and context.uid != steward_uid:
        return make_skipped(path, "not readable: run as root or Steward's user", name=name)
    return _check_captured(context, name, path, network_type)


def _check_captured(context: CheckContext, name: str, path: str, network_type: str) -> CheckFinding:
    """Check that the journal knows the scripts that have been in the spool for a while."""
    scripts = sorted(_list_old_scripts(path))[-_MOST:]
    try:
        missing = _find_uncaptured(context.settings.state_dir, name, scripts)
    except Unavailable as error:
        why = f"none of its scripts was ever captured: {error}"
        return make_wrong(path, why, "systemctl start steward", name=name)
    if missing:
        return make_wrong(
            path,
            f"{format_count(len(missing), 'script')} of {len(scripts)} not captured, job "
            f"{missing[0]} first",
            "journalctl -u steward -p warning",
            "systemctl restart steward",
            name=name,
        )
    text = f"{format_count(len(scripts), 'script')}, all captured"
    if network_type:
        return make_warning(
            path,
            f"on {network_type}, without change notifications: Steward scans it. {text}",
            "run Steward, or steward controller, on slurmctld's host with the spool on its disk",
            name=name,
        )
    return make_ok(path, text, name=name)


def _list_old_scripts(path: str) -> Iterator[tuple[int, int]]:
    """Yield time and job id of each script that has been in the spool for a while."""
    before_ns = time.time_ns() - int(_PATIENCE_S * 1e9)
    for directory in os.scandir(path):
        if not directory.name.startswith("hash.") or not directory.is_dir(follow_symlinks=False):
            continue
        for entry in os.scandir(directory.path):
            job = _JOB.fullmatch(entry.name)
            # slurmctld may delete entries at any moment.
            with contextlib.suppress(OSError):
                mtime_ns = os.stat(f"{entry.path}/script", follow_symlinks=False).st_mtime_ns
                if job is not None and mtime_ns < before_ns:
                    yield mtime_ns, int(job[1])


def _find_uncaptured(state_dir: str, cluster: str, scripts: list[tuple[int, int]]) -> list[int]:
    """Return the jobs whose scripts the journal does not know."""
    reader = JournalReader(state_dir)
    captured = CapturedScripts(state_dir, reader)
    try:
        return [
            job_id
            for mtime_ns, job_id in scripts
            if not captured.was_captured(cluster, make_script_key(job_id, mtime_ns))
        ]
    finally:
        captured.close()
        reader.close()
