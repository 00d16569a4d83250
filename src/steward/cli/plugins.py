"""``steward plugins``: build, install and check the plugins that Slurm loads; make certificates.

Covers the SPANK plugin of compute nodes, jobcomp.lua, the submit plugin (C or Lua) and the strigger
helper of slurmctld. ``native/`` holds their source; Slurm's version comes from an option or from
the installed Slurm.
"""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from steward.admin.certificates import CertificateAuthority
from steward.admin.plugins.build import DEFAULT_LIBDIR
from steward.admin.plugins.installation import DEFAULT_LINES_PATH, DEFAULT_PLUGSTACK, DEFAULT_SPOOL
from steward.capture.settings import SensorSettings
from steward.cli.groups import ADMINISTRATORS, CONTEXT, Entry, LazyGroup
from steward.cli.options import Config
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
            "Have Slurm load the SPANK plugin on this node, or slurmctld what is its own.",
            "steward.cli.plugins",
            "install",
        ),
        Entry(
            "check",
            ADMINISTRATORS,
            "Say what would go wrong when Slurm loads them.",
            "steward.cli.plugins",
            "check",
        ),
        Entry(
            "certificates",
            ADMINISTRATORS,
            "Make certificates for nodes, and for Steward.",
            "steward.cli.plugins",
            "certificates",
        ),
    )


_SENSOR = SensorSettings()

app = typer.Typer(
    cls=PluginsGroup,
    help="What Slurm itself loads: on compute nodes, and in slurmctld.",
    no_args_is_help=True,
    context_settings=CONTEXT,
    add_completion=False,
)


@app.callback()
def plugins() -> None:
    """What Slurm itself loads: on compute nodes, and in slurmctld."""


Libdir = Annotated[
    str, typer.Option("--libdir", metavar="DIR", help="Where builds lie, one directory a version.")
]
SlurmPrefix = Annotated[
    str,
    typer.Option("--slurm-prefix", metavar="DIR", help="Where Slurm is, if it is not found."),
]
SlurmVersionOption = Annotated[
    str,
    typer.Option("--slurm", metavar="VERSION", help="24.11 or 24.11.5; else that of this host."),
]
Plugstack = Annotated[
    str, typer.Option("--plugstack", metavar="FILE", help="Slurm's PlugStackConfig.")
]
JobComp = Annotated[
    str,
    typer.Option("--jobcomp", metavar="DIR", help="Instead: jobcomp.lua, where slurm.conf is."),
]
JobSubmitLua = Annotated[
    str,
    typer.Option(
        "--job-submit-lua", metavar="DIR", help="Instead: job_submit.lua, where slurm.conf is."
    ),
]
Trigger = Annotated[
    bool, typer.Option("--trigger", help="Instead: what slurmctld wakes the sensor by.")
]
Helper = Annotated[
    str, typer.Option("--helper", metavar="FILE", help="With --trigger: where the helper lies.")
]
Secret = Annotated[
    str, typer.Option("--secret", metavar="FILE", help="With --trigger: its secret.")
]


def build(
    headers: Annotated[
        str, typer.Option("--headers", metavar="DIR", help="Directory that holds slurm/spank.h.")
    ] = "",
    slurm_prefix: SlurmPrefix = "",
    libdir: Libdir = DEFAULT_LIBDIR,
    compiler: Annotated[
        str, typer.Option("--cc", metavar="PROGRAM", help="The C compiler; else CC, or cc.")
    ] = "",
) -> None:
    """Compile the plugins for one version of Slurm: SPANK's, and slurmctld's submit plugin.

    Builds for several versions lie side by side.
    """
    from steward.admin.plugins.build import build_plugins, find_headers

    if headers and slurm_prefix:
        raise UsageError("--headers and --slurm-prefix say the same: give one of them")
    if slurm_prefix:
        headers = os.path.join(slurm_prefix, "include")
    plugin_build = build_plugins(headers or find_headers(), libdir, compiler=compiler)
    typer.echo(f"{plugin_build.path} is for Slurm {plugin_build.version}.")
    libdir_option = "" if libdir == DEFAULT_LIBDIR else f" --libdir {libdir}"
    typer.echo(
        "On each compute node: steward plugins install --slurm "
        f"{plugin_build.version}{libdir_option}"
    )
    typer.echo(f"or in plugstack.conf: optional {plugin_build.path} spool={DEFAULT_SPOOL}")
    typer.echo(
        "Where slurmctld is to ask the bank: steward plugins install --job-submit "
        f"--slurm {plugin_build.version}{libdir_option}"
    )


def install(
    slurm: SlurmVersionOption = "",
    slurm_prefix: SlurmPrefix = "",
    libdir: Libdir = DEFAULT_LIBDIR,
    built_in: Annotated[
        str, typer.Option("--from", metavar="DIR", help="Copy the build from there to --libdir.")
    ] = "",
    plugstack: Plugstack = DEFAULT_PLUGSTACK,
    spool: Annotated[
        str, typer.Option("--spool", metavar="DIR", help="Where lines are written; a local disk.")
    ] = DEFAULT_SPOOL,
    prolog: Annotated[
        bool,
        typer.Option("--prolog", help="Tell of Prolog and Epilog, too: two processes more a job."),
    ] = False,
    jobcomp: JobComp = "",
    lines: Annotated[
        str,
        typer.Option("--lines", metavar="FILE", help="With --jobcomp: where lines go."),
    ] = DEFAULT_LINES_PATH,
    job_submit: Annotated[
        bool, typer.Option("--job-submit", help="Instead: slurmctld's plugin that asks the bank.")
    ] = False,
    job_submit_lua: JobSubmitLua = "",
    cluster: Annotated[
        str,
        typer.Option("--cluster", metavar="NAME", help="With --job-submit-lua, if there are more."),
    ] = "",
    trigger: Trigger = False,
    helper: Helper = _SENSOR.helper,
    secret: Secret = _SENSOR.secret_file,
    python: Annotated[
        str, typer.Option("--python", metavar="FILE", help="With --trigger: what runs the helper.")
    ] = "",
    user: Annotated[
        str, typer.Option("--user", metavar="NAME", help="With --trigger: SlurmUser.")
    ] = "",
    config: Config = DEFAULT_PATH,
) -> None:
    """Have Slurm load the SPANK plugin on this node, or slurmctld what is its own.

    No file of the site's is changed; what is left to add to them is said.
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
            f"there is no build for Slurm {version} in {built_in or libdir}: "
            "run steward plugins build where Slurm's headers are",
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
        for command in fault.mend:
            typer.echo(f"Now run: {command}")
    if spool != DEFAULT_SPOOL or current_spool not in ("", spool):
        typer.echo(
            f"Now let the agent read {spool}: systemctl edit steward-agent.service sets "
            "ConditionPathIsDirectory, ExecStart and ReadWritePaths"
        )


def check(
    slurm: SlurmVersionOption = "",
    slurm_prefix: SlurmPrefix = "",
    libdir: Libdir = DEFAULT_LIBDIR,
    plugstack: Plugstack = DEFAULT_PLUGSTACK,
    jobcomp: JobComp = "",
    job_submit: Annotated[
        bool, typer.Option("--job-submit", help="Instead: what slurmctld asks the bank by.")
    ] = False,
    job_submit_lua: JobSubmitLua = "",
    trigger: Trigger = False,
    helper: Helper = _SENSOR.helper,
    secret: Secret = _SENSOR.secret_file,
    config: Config = DEFAULT_PATH,
) -> None:
    """Say what would go wrong when Slurm loads them; the exit code is 1 if anything would.

    With --slurm, before an upgrade: whether the version that is to come would load the plugin,
    and, with --job-submit, whether its slurmctld would start.
    """
    from steward.admin.plugins.build import SlurmVersion
    from steward.admin.plugins.job_submit import check_reach, check_submit, find_gate_conf
    from steward.admin.plugins.jobcomp import check_jobcomp
    from steward.admin.plugins.spank import check_shim, check_upgrade, find_spool
    from steward.core.printable import escape_line

    if jobcomp:
        problems = check_jobcomp(_read_slurm_config(slurm_prefix), jobcomp)
        success_text = f"JobCompType is jobcomp/lua, and {jobcomp}/jobcomp.lua is Steward's."
    elif trigger:
        from steward.admin.plugins.trigger import check_trigger
        from steward.core.config import Settings

        socket = Settings().wake_socket("")
        problems = check_trigger(_read_slurm_config(slurm_prefix), helper, secret, socket)
        success_text = f"slurmctld can start {helper}, which wakes Steward's sensor."
    elif job_submit or job_submit_lua:
        slurm_config, version = _read_slurm_config(slurm_prefix), _find_version(slurm, slurm_prefix)
        problems = check_submit(slurm_config, version, directory=job_submit_lua)
        if not slurm:
            problems += check_reach(slurm_config, find_gate_conf(slurm_config, job_submit_lua))
        success_text = (
            f"slurmctld {version} asks the bank, by {slurm_config.get('JobSubmitPlugins', '')}."
        )
    elif slurm:
        version = SlurmVersion.parse(slurm)
        problems = check_upgrade(version, libdir=libdir)
        success_text = (
            f"Slurm {version} will load it after steward plugins install --slurm {version}."
        )
    else:
        version = _find_version("", slurm_prefix)
        problems = check_shim(
            version, libdir=libdir, plugstack=plugstack, settings=_load_or_default(config)
        )
        success_text = f"Slurm {version} loads the plugin; lines go to {find_spool(plugstack)}."
    for problem in problems:
        typer.echo(escape_line(problem))
    if problems:
        raise typer.Exit(1)
    typer.echo(success_text)


def _print_installed(result: "InstallResult") -> None:
    """Print the files installed and the remaining steps."""
    from steward.core.printable import escape_line

    for path in result.written_paths:
        typer.echo(escape_line(path))
    for sentence in result.remaining:
        typer.echo(escape_line(f"Now {sentence}"))


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
            f"which Slurm is here? Say --slurm VERSION ({error})", error
        ) from error


def _read_slurm_config(prefix: str) -> dict[str, str]:
    """Return slurmctld's configuration, as scontrol show config prints it."""
    from steward.admin.plugins.errors import PluginInstallError
    from steward.slurm.errors import SlurmError

    try:
        return _make_slurm_client(prefix).config()
    except SlurmError as error:
        remedy = "run this where slurmctld runs; SLURM_CONF names another slurm.conf"
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
        str, typer.Argument(metavar="DIR", help="Where they are kept, keys included.")
    ],
    server: Annotated[
        list[str] | None,
        typer.Option("--server", metavar="HOST", help="A name or address that agents are given."),
    ] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="NODELIST", help="Nodes, as Slurm writes them.")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option("--cluster", metavar="NAME", help="Their cluster, where Steward has several."),
    ] = "",
    days: Annotated[
        int, typer.Option("--days", min=1, max=36500, help="How long they are valid.")
    ] = 1825,
) -> None:
    """Make certificates for nodes, and for Steward.

    An authority is made with the first of them. What is there is left as it is: remove a
    file and its key to have it made anew. Each node needs ca.crt and its own two files.
    """
    if not server and not nodes:
        raise UsageError("say for whom: --server for Steward's host, --nodes for nodes")
    authority = CertificateAuthority(directory, days)
    if server:
        is_new = authority.make_server(server)
        typer.echo(f"{directory}/server.crt {'is new' if is_new else 'was there'}")
        if is_new:
            typer.echo(f"Now give {directory}/server.key to Steward's user, by chown")
    are_new = [is_new for _, is_new in authority.make_nodes(nodes, cluster)] if nodes else []
    if are_new:
        typer.echo(
            f"{directory}/nodes: {sum(are_new)} new, {len(are_new) - sum(are_new)} were there"
        )
