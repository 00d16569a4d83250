"""``steward plugins``: build, install and check the plugins that Slurm loads; make certificates.

Covers the SPANK plugin of compute nodes, jobcomp.lua, the submit plugin (C or Lua) and the strigger
helper of slurmctld. ``native/`` holds their source; Slurm's version comes from an option or from
the installed Slurm.
"""

import os
from typing import TYPE_CHECKING, Annotated

import click

from steward.admin.certificates import CertificateAuthority
from steward.admin.plugins.build import DEFAULT_LIBDIR
from steward.admin.plugins.installation import DEFAULT_LINES_PATH, DEFAULT_PLUGSTACK, DEFAULT_SPOOL
from steward.capture.settings import SensorSettings
from steward.cli.groups import ADMINISTRATORS, Entry, LazyGroup
from steward.cli.options import Config
from steward.cli.parameters import Argument, Option
from steward.core.config.reader import DEFAULT_PATH
from steward.core.errors import UsageError

if TYPE_CHECKING:
    from steward.admin.plugins.build import SlurmVersion
    from steward.admin.plugins.installation import InstallResult
    from steward.core.config import Settings
    from steward.slurm.client import Slurm


class PluginsGroup(LazyGroup):
    """Commands of ``steward plugins``."""

    entries = (
        Entry(
            "build",
            ADMINISTRATORS,
            "Compile the plugins for one version of Slurm.",
            "steward.cli.plugins",
            "build",
        ),
        Entry(
            "install",
            ADMINISTRATORS,
            "Install the SPANK plugin on this node, or the plugins of slurmctld.",
            "steward.cli.plugins",
            "install",
        ),
        Entry(
            "check",
            ADMINISTRATORS,
            "Check installed plugins, and suggest fixes.",
            "steward.cli.plugins",
            "check",
        ),
        Entry(
            "certificates",
            ADMINISTRATORS,
            "Create certificates for nodes and for Steward.",
            "steward.cli.plugins",
            "certificates",
        ),
    )


_SENSOR = SensorSettings()

app = PluginsGroup("Manage the plugins that Slurm loads on compute nodes and in slurmctld.")


Libdir = Annotated[
    str,
    Option(
        "--libdir",
        metavar="DIR",
        help="Directory of the builds, with one subdirectory per version.",
    ),
]
SlurmPrefix = Annotated[
    str,
    Option(
        "--slurm-prefix",
        metavar="DIR",
        help=(
            "Installation prefix of Slurm. Default: commands from PATH, headers from /usr, "
            "/usr/local or /opt/slurm."
        ),
    ),
]
SlurmVersionOption = Annotated[
    str,
    Option(
        "--slurm",
        metavar="VERSION",
        help="Version of Slurm: 24.11 or 24.11.5. Default: that of this host.",
    ),
]
Plugstack = Annotated[
    str,
    Option(
        "--plugstack",
        metavar="FILE",
        help="Path of plugstack.conf. Default: Slurm's PlugStackConfig.",
    ),
]
JobComp = Annotated[
    str,
    Option(
        "--jobcomp",
        metavar="DIR",
        help="Apply to jobcomp.lua in DIR (where slurm.conf is), not to the SPANK plugin.",
    ),
]
JobSubmitLua = Annotated[
    str,
    Option(
        "--job-submit-lua",
        metavar="DIR",
        help="Apply to job_submit.lua in DIR (where slurm.conf is), not to the SPANK plugin.",
    ),
]
Trigger = Annotated[
    bool,
    Option(
        "--trigger",
        help="Apply to the strigger program of the sensor, not to the SPANK plugin.",
    ),
]
Helper = Annotated[
    str,
    Option("--helper", metavar="FILE", help="With --trigger: path of the strigger program."),
]
Secret = Annotated[
    str,
    Option(
        "--secret", metavar="FILE", help="With --trigger: path of the strigger program's secret."
    ),
]


def build(
    headers: Annotated[
        str, Option("--headers", metavar="DIR", help="Directory of slurm/spank.h.")
    ] = "",
    slurm_prefix: SlurmPrefix = "",
    libdir: Libdir = DEFAULT_LIBDIR,
    compiler: Annotated[
        str, Option("--cc", metavar="PROGRAM", help="C compiler. Default: CC, or cc.")
    ] = "",
) -> None:
    """Compile the SPANK plugin and the submit plugin for one version of Slurm.

    Builds for several versions can exist side by side.
    """
    from steward.admin.plugins.build import build_plugins, find_headers

    if headers and slurm_prefix:
        raise UsageError("--headers and --slurm-prefix exclude each other: give one of them")
    if slurm_prefix:
        headers = os.path.join(slurm_prefix, "include")
    plugin_build = build_plugins(headers or find_headers(), libdir, compiler=compiler)
    click.echo(f"Built {plugin_build.path} for Slurm {plugin_build.version}.")
    libdir_option = "" if libdir == DEFAULT_LIBDIR else f" --libdir {libdir}"
    click.echo(
        "On each compute node: steward plugins install --slurm "
        f"{plugin_build.version}{libdir_option}"
    )
    click.echo(f"or in plugstack.conf: optional {plugin_build.path} spool={DEFAULT_SPOOL}")
    click.echo(
        "On the host of slurmctld, for the gate: steward plugins install --job-submit "
        f"--slurm {plugin_build.version}{libdir_option}"
    )


def install(
    slurm: SlurmVersionOption = "",
    slurm_prefix: SlurmPrefix = "",
    libdir: Libdir = DEFAULT_LIBDIR,
    built_in: Annotated[
        str,
        Option("--from", metavar="DIR", help="Copy the build from this directory to --libdir."),
    ] = "",
    plugstack: Plugstack = DEFAULT_PLUGSTACK,
    spool: Annotated[
        str,
        Option(
            "--spool",
            metavar="DIR",
            help="Spool of the SPANK plugin: the directory that it writes to, on a local disk.",
        ),
    ] = DEFAULT_SPOOL,
    prolog: Annotated[
        bool,
        Option(
            "--prolog",
            help="Also report Prolog and Epilog. This starts two more processes per job.",
        ),
    ] = False,
    jobcomp: JobComp = "",
    lines: Annotated[
        str,
        Option(
            "--lines",
            metavar="FILE",
            help="With --jobcomp: file that slurmctld writes job ends to.",
        ),
    ] = DEFAULT_LINES_PATH,
    job_submit: Annotated[
        bool,
        Option(
            "--job-submit",
            help="Apply to the job submit plugin written in C, not to the SPANK plugin.",
        ),
    ] = False,
    job_submit_lua: JobSubmitLua = "",
    cluster: Annotated[
        str,
        Option(
            "--cluster",
            metavar="NAME",
            help="With --job-submit-lua: name of this cluster, if several share the gate.",
        ),
    ] = "",
    trigger: Trigger = False,
    helper: Helper = _SENSOR.helper,
    secret: Secret = _SENSOR.secret_file,
    python: Annotated[
        str,
        Option(
            "--python",
            metavar="FILE",
            help="With --trigger: Python interpreter that runs the program.",
        ),
    ] = "",
    user: Annotated[
        str,
        Option("--user", metavar="NAME", help="With --trigger: SlurmUser, who runs the program."),
    ] = "",
    config: Config = DEFAULT_PATH,
) -> None:
    """Install the SPANK plugin on this node, or the plugins of slurmctld.

    It leaves the site's files unchanged, and prints the lines to add to them.
    """
    from steward.admin.plugins.build import LIBRARY, SUBMIT_LIBRARY, find_build
    from steward.admin.plugins.errors import PluginInstallError
    from steward.admin.plugins.installation import install_jobcomp, install_shim
    from steward.admin.plugins.job_submit import install_submit, install_submit_lua
    from steward.admin.plugins.spank import (
        find_spool,
        find_spool_faults,
        list_daemon_directories,
        require_outside_spool,
        require_usable_spool,
    )

    if jobcomp:
        require_outside_spool(lines, find_spool(plugstack))
        _print_installed(install_jobcomp(jobcomp, libdir=libdir, lines_path=lines))
        return
    if trigger:
        from steward.admin.plugins.trigger import install_trigger

        user = user or _find_slurm_user(slurm_prefix)
        _print_installed(install_trigger(helper, secret, user=user, interpreter=python))
        return
    if job_submit_lua:
        _print_installed(install_submit_lua(job_submit_lua, libdir=libdir, cluster=cluster))
        return
    version = _find_version(slurm, slurm_prefix)
    library = SUBMIT_LIBRARY if job_submit else LIBRARY
    plugin_build = find_build(built_in or libdir, version, library)
    if plugin_build is None:
        raise PluginInstallError(
            f"no build for Slurm {version} in {built_in or libdir}: run 'steward plugins "
            "build' on a host with Slurm's headers",
            version,
        )
    if job_submit:
        slurm_config = _read_slurm_config_if_running(slurm_prefix)
        _print_installed(install_submit(plugin_build, libdir=libdir, config=slurm_config))
        return
    current_spool = find_spool(plugstack)
    require_usable_spool(spool, list_daemon_directories(_load_or_default(config)), current_spool)
    _print_installed(
        install_shim(
            plugin_build, libdir=libdir, plugstack=plugstack, spool=spool, with_prolog=prolog
        )
    )
    # An existing directory keeps its owner and mode.
    for fault in find_spool_faults(spool):
        for command in fault.fix:
            click.echo(f"Now run: {command}")
    if spool != DEFAULT_SPOOL or current_spool not in ("", spool):
        click.echo(
            f"Allow the agent to read {spool}: run 'systemctl edit steward-agent.service' and "
            "set ConditionPathIsDirectory, ExecStart and ReadWritePaths"
        )


def check(
    slurm: SlurmVersionOption = "",
    slurm_prefix: SlurmPrefix = "",
    libdir: Libdir = DEFAULT_LIBDIR,
    plugstack: Plugstack = DEFAULT_PLUGSTACK,
    jobcomp: JobComp = "",
    job_submit: Annotated[
        bool,
        Option(
            "--job-submit",
            help="Apply to the job submit plugin written in C, not to the SPANK plugin.",
        ),
    ] = False,
    job_submit_lua: JobSubmitLua = "",
    trigger: Trigger = False,
    helper: Helper = _SENSOR.helper,
    secret: Secret = _SENSOR.secret_file,
    config: Config = DEFAULT_PATH,
) -> None:
    """Check installed plugins, and suggest fixes; the exit code is 1 if there is a problem.

    Before an upgrade of Slurm, --slurm checks whether the new version will load the plugin. With
    --job-submit, it also checks whether the new slurmctld will start.
    """
    from steward.admin.plugins.build import SlurmVersion
    from steward.admin.plugins.job_submit import check_reach, check_submit, find_gate_conf
    from steward.admin.plugins.jobcomp import check_jobcomp
    from steward.admin.plugins.spank import check_shim, check_upgrade, find_spool
    from steward.core.printable import escape_line

    if jobcomp:
        problems = check_jobcomp(_read_slurm_config(slurm_prefix), jobcomp)
        success_text = (
            f"JobCompType is jobcomp/lua, and {jobcomp}/jobcomp.lua calls Steward's script."
        )
    elif trigger:
        from steward.admin.plugins.trigger import check_trigger
        from steward.core.config import Settings

        socket = Settings().wake_socket("")
        problems = check_trigger(_read_slurm_config(slurm_prefix), helper, secret, socket)
        success_text = f"slurmctld can run {helper}, which wakes Steward's sensor."
    elif job_submit or job_submit_lua:
        slurm_config, version = _read_slurm_config(slurm_prefix), _find_version(slurm, slurm_prefix)
        problems = check_submit(slurm_config, version, directory=job_submit_lua)
        if not slurm:
            problems += check_reach(slurm_config, find_gate_conf(slurm_config, job_submit_lua))
        success_text = (
            f"slurmctld {version} asks the gate through "
            f"JobSubmitPlugins={slurm_config.get('JobSubmitPlugins', '')}."
        )
    elif slurm:
        version = SlurmVersion.parse(slurm)
        problems = check_upgrade(version, libdir=libdir)
        success_text = (
            f"Slurm {version} loads the plugin after 'steward plugins install --slurm {version}'."
        )
    else:
        version = _find_version("", slurm_prefix)
        problems = check_shim(
            version, libdir=libdir, plugstack=plugstack, settings=_load_or_default(config)
        )
        success_text = f"Slurm {version} loads the plugin, which writes to {find_spool(plugstack)}."
    for problem in problems:
        click.echo(escape_line(problem))
    if problems:
        raise click.exceptions.Exit(1)
    click.echo(success_text)


def _print_installed(result: "InstallResult") -> None:
    """Print the files installed and the remaining steps."""
    from steward.core.printable import escape_line

    for path in result.written_paths:
        click.echo(escape_line(path))
    for sentence in result.remaining:
        click.echo(escape_line(f"Now {sentence}"))


def _load_or_default(path: str) -> "Settings":
    """Return this host's configuration; the defaults if absent, as on a compute node."""
    from steward.core.config import Settings
    from steward.core.config.reader import load_settings

    if path == DEFAULT_PATH and not os.access(path, os.R_OK):
        return Settings()
    return load_settings(path)


def _find_version(version: str, prefix: str) -> "SlurmVersion":
    """Return the Slurm version named, or that of the installed Slurm."""
    from steward.admin.plugins.build import SlurmVersion

    if version:
        return SlurmVersion.parse(version)
    from steward.admin.plugins.errors import PluginInstallError
    from steward.slurm.errors import SlurmError

    try:
        return SlurmVersion(*_make_slurm_client(prefix).version())
    except SlurmError as error:
        raise PluginInstallError(
            f"cannot determine the version of Slurm: give --slurm VERSION ({error})", error
        ) from error


def _read_slurm_config(prefix: str) -> dict[str, str]:
    """Return slurmctld's configuration, as scontrol show config prints it."""
    from steward.admin.plugins.errors import PluginInstallError
    from steward.slurm.errors import SlurmError

    try:
        return _make_slurm_client(prefix).config()
    except SlurmError as error:
        remedy = "run this on the host of slurmctld, or set SLURM_CONF"
        raise PluginInstallError(f"slurmctld does not answer: {remedy} ({error})", error) from error


def _read_slurm_config_if_running(prefix: str) -> dict[str, str]:
    """Return slurmctld's configuration; empty if it does not run, as on a new host."""
    from steward.admin.plugins.errors import PluginInstallError

    try:
        return _read_slurm_config(prefix)
    except PluginInstallError:
        return {}


def _find_slurm_user(prefix: str) -> str:
    """Return the name of SlurmUser; "" if slurmctld does not answer."""
    from steward.admin.plugins.jobcomp import parse_slurm_user

    slurm_user = parse_slurm_user(_read_slurm_config_if_running(prefix))
    return slurm_user[0] if slurm_user else ""


def _make_slurm_client(prefix: str) -> "Slurm":
    """Return a client of the Slurm installed under a prefix."""
    from steward.slurm.client import Slurm
    from steward.slurm.settings import ClusterSettings

    return Slurm("here", ClusterSettings(slurm_bin=f"{prefix}/bin" if prefix else ""))


def certificates(
    directory: Annotated[
        str, Argument(metavar="DIR", help="Directory of the certificates and private keys.")
    ],
    server: Annotated[
        list[str] | None,
        Option(
            "--server",
            metavar="HOST",
            help="Name or address of Steward's host that agents connect to.",
        ),
    ] = None,
    nodes: Annotated[
        str, Option("--nodes", metavar="NODELIST", help="Node list, as Slurm writes it.")
    ] = "",
    cluster: Annotated[
        str,
        Option("--cluster", metavar="NAME", help="Cluster of the nodes, if Steward has several."),
    ] = "",
    days: Annotated[
        int, Option("--days", min=1, max=36500, help="Validity of the certificates, in days.")
    ] = 1825,
) -> None:
    """Create certificates for nodes and for Steward.

    The first call also creates a certificate authority. Existing files stay unchanged: to renew
    a certificate, remove it with its key. Each node needs ca.crt and its own two files.
    """
    if not server and not nodes:
        raise UsageError(
            "no certificate requested: give --server for Steward's host, or --nodes for nodes"
        )
    authority = CertificateAuthority(directory, days)
    if server:
        is_new = authority.make_server(server)
        click.echo(f"{directory}/server.crt {'created' if is_new else 'exists already'}")
        if is_new:
            click.echo(f"Next: chown {directory}/server.key to Steward's user")
    are_new = [is_new for _, is_new in authority.make_nodes(nodes, cluster)] if nodes else []
    if are_new:
        click.echo(
            f"{directory}/nodes: {sum(are_new)} created, {len(are_new) - sum(are_new)} exist "
            "already"
        )
