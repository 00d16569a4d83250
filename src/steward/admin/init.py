"""First configuration (``steward init``): write steward.toml and list the next steps.

``query_site`` reads the Slurm configuration into a :class:`SlurmSite`; :class:`InitOptions` holds
the options of the command. From these two ``render_config_text`` makes the configuration, as text
for people to edit; ``write_configuration`` writes it and creates the directories that it names.
``list_steps`` yields the commands and slurm.conf lines that are left to the administrator, in the
order of docs/safety.md: each step is of use without the next, and steps that change slurmctld say
so.
"""

import os
import pwd
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from steward.admin.plugins.installation import (
    DEFAULT_LINES_PATH,
    FETCHED_PLUGSTACK,
    get_conf_directory,
    has_include,
    is_own_file,
)
from steward.admin.plugins.job_submit import LUA_SCRIPT, find_lua_sockets
from steward.admin.plugins.jobcomp import parse_slurm_user
from steward.automation.settings import SHIPPED
from steward.bank.gate.plugin_conf import parse_submit_plugins
from steward.capture.settings import SensorSettings
from steward.core.config import Settings
from steward.core.config.reader import load_settings
from steward.core.errors import StewardError
from steward.core.files import find_network_type, replace_file
from steward.slurm import Slurm, SlurmError
from steward.slurm.settings import ClusterSettings


class SetupError(StewardError):
    """Something cannot be set up, or exists already."""


DEFAULT_OUT: Final = "/etc/steward"
DEFAULT_ARCHIVE: Final = "/srv/steward/archive"
DEFAULT_STATE: Final = Settings().state_dir
_PATIENCE_S: Final = 20.0
"""Longest wait for slurmctld, in seconds."""


class SlurmSite(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of the site's Slurm.

    Attributes:
        config: Output of ``scontrol show config``; empty if slurmctld does not answer.
        slurm_conf: Given path of slurm.conf; "" if Slurm finds it itself.
        slurm_bin: Given directory of Slurm's commands; "" if they are in PATH.
    """

    config: Mapping[str, str] = {}
    slurm_conf: str = ""
    slurm_bin: str = ""

    @property
    def cluster(self) -> str:
        """ClusterName; "" if unknown."""
        return self.config.get("ClusterName", "")

    @property
    def slurm_user(self) -> str:
        """Name of SlurmUser."""
        user = parse_slurm_user(self.config)
        return user[0] if user else "slurm"

    @property
    def conf_dir(self) -> str:
        """Directory of slurm.conf."""
        path = self.slurm_conf or self.config.get("SLURM_CONF", "")
        return os.path.dirname(path) if path else "/etc/slurm"

    @property
    def plugstack(self) -> str:
        """Path of plugstack.conf."""
        return self.config.get("PlugStackConfig", "") or f"{self.conf_dir}/plugstack.conf"

    @property
    def jobcomp(self) -> str:
        """JobCompType; "" for none."""
        kind = self.config.get("JobCompType", "")
        return "" if kind == "jobcomp/none" else kind


class InitOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``steward init``.

    Attributes:
        cluster: Name of the cluster.
        user: User that Steward runs as.
        archive_dir: Directory of the script archive.
        state_dir: Directory of journal and databases.
        out: Directory of the configuration.
        jobcomp_lines: File that slurmctld writes ended jobs to; "" for none.
        nodes: Address at which nodes report the use of jobs; "" for none.
        listener: User of a separate listener there; "" if the daemon listens itself.
        bank: Whether to enable the bank.
        sensor: Whether to enable the sensor of node states.
        web: Address of the web pages; "" for none.
        web_url: URL of the pages in users' browsers; "" if it is not known yet.
    """

    cluster: str
    user: str
    archive_dir: str = DEFAULT_ARCHIVE
    state_dir: str = DEFAULT_STATE
    out: str = DEFAULT_OUT
    jobcomp_lines: str = DEFAULT_LINES_PATH
    nodes: str = ""
    listener: str = ""
    bank: bool = False
    sensor: bool = False
    web: str = ""
    web_url: str = ""

    @property
    def path(self) -> str:
        """Path of the configuration file."""
        return os.path.join(self.out, "steward.toml")

    @property
    def account(self) -> pwd.struct_passwd:
        """Passwd entry of the user that Steward runs as.

        Raises:
            SetupError: There is none of that name.
        """
        try:
            return pwd.getpwnam(self.user)
        except KeyError as error:
            raise SetupError(
                f"unknown user {self.user!r}: give SlurmUser with --user", self.user
            ) from error


def has_user(name: str) -> bool:
    """Return whether a user exists, such as one that a package creates."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def query_site(slurm_conf: str = "", slurm_bin: str = "") -> SlurmSite:
    """Query the configuration of this host's Slurm.

    Args:
        slurm_conf: Path of slurm.conf, if Slurm does not find it itself.
        slurm_bin: Directory of Slurm's commands, if they are not in PATH.

    Raises:
        SetupError: slurmctld does not answer.
    """
    settings = ClusterSettings(slurm_conf=slurm_conf, slurm_bin=slurm_bin)
    try:
        config = Slurm("here", settings, _PATIENCE_S).config()
    except SlurmError as error:
        raise SetupError(
            f"slurmctld does not answer: run this on its host while slurmctld is running ({error})",
            error,
        ) from error
    return SlurmSite(config=config, slurm_conf=slurm_conf, slurm_bin=slurm_bin)


_HEAD: Final = """\
# Written by 'steward init'. All settings: docs/configuration.md, steward.toml(5).
# 'steward config check' checks this file; 'systemctl reload steward' applies it.
"""


_NO_URL: Final = '#url = "https://steward.example.org"\n'


def render_config_text(options: InitOptions, site: SlurmSite) -> str:
    """Render the configuration as TOML."""
    sections = [_HEAD]
    if options.state_dir != DEFAULT_STATE:
        sections.append(_render_line("state_dir", options.state_dir))
    sections.append(_render_cluster(options, site))
    sections.append("[archive.sink.files]\n" + _render_line("path", options.archive_dir))
    if options.nodes:
        sections.append("# Reports of 'steward agent' on compute nodes.\n[nodes]\n")
        sections[-1] += _render_line("listen", options.nodes)
        if options.listener:
            sections[-1] += _render_line("listener", options.listener)
    if options.bank:
        sections.append(
            "# The bank observes and rejects nothing until 'steward bank mode enforce'.\n"
        )
        sections[-1] += "[bank]\nenabled = true\n"
    if options.sensor:
        sections.append(_render_sensor(options))
    sections.append("[actions]\n" + _render_line("programs_file", f"{options.out}/programs"))
    sections.append(
        "# Rules react to events; 'steward rules enable NAME' enables one of those of Steward.\n"
        f'[rules]\nmode = "off"\ndirectories = ["{options.out}/rules.d", "{SHIPPED}"]\n'
    )
    if options.web:
        sections.append("[web]\n" + _render_line("listen", options.web))
        sections[-1] += (
            "# URL of the pages in users' browsers; 'steward login' prints links to it.\n"
        )
        sections[-1] += _render_line("url", options.web_url) if options.web_url else _NO_URL
    return "\n".join(sections)


def _render_cluster(options: InitOptions, site: SlurmSite) -> str:
    """Render the section of the cluster."""
    lines = [f"[cluster.{options.cluster}]\n"]
    for name in ("slurm_conf", "slurm_bin"):
        value = getattr(site, name)
        if value:
            lines.append(_render_line(name, value))
    if options.jobcomp_lines:
        lines.append(_render_line("jobcomp_lines", options.jobcomp_lines))
    return "".join(lines)


def _render_sensor(options: InitOptions) -> str:
    text = "[sensor]\nenabled = true\n"
    secret = f"{options.out}/trigger.secret"
    if secret != SensorSettings().secret_file:
        text += _render_line("secret_file", secret)
    return text


def _render_line(name: str, value: str) -> str:
    # JSON strings are valid TOML, except for DEL, which none of our paths contains.
    return f"{name} = {msgspec.json.encode(value).decode()}\n"


_PROGRAMS: Final = """\
# Absolute paths of the programs that the actions local.command and slurm.trigger.set may
# start, one per line. See docs/actions.md.
"""


def write_configuration(options: InitOptions, site: SlurmSite, *, force: bool = False) -> list[str]:
    """Write the configuration and create what it names; return the written paths.

    Args:
        options: Options of the command.
        site: Configuration of the site's Slurm.
        force: Whether to replace an existing configuration; the old one is kept beside it.

    Raises:
        SetupError: There is a configuration, a directory is none, or nothing can be written.
        ConfigError: The options make no valid configuration.
    """
    account = options.account
    if os.geteuid() not in (0, account.pw_uid):
        raise SetupError(f"the files must belong to {options.user}: run this as root", options.user)
    if os.path.lexists(options.path) and not force:
        raise SetupError(
            f"{options.path} exists already: edit it, or replace it with --force", options.path
        )
    kind = find_network_type(options.state_dir)
    if kind:
        raise SetupError(
            f"{options.state_dir} is on {kind}: choose a local disk with --state-dir",
            options.state_dir,
        )
    try:
        return list(_write_files(options, site, account.pw_uid, account.pw_gid))
    except OSError as error:
        raise SetupError(f"{error.filename or options.out}: {error.strerror}", options) from error


def _write_files(options: InitOptions, site: SlurmSite, uid: int, gid: int) -> Iterator[str]:
    """Write files and create directories; yield the paths that are new."""
    _make_directory(options.out, 0o755, None)
    text = render_config_text(options, site)
    _check_config_text(text, options)
    if os.path.lexists(options.path):
        os.replace(options.path, f"{options.path}.old")
        yield f"{options.path}.old"
    # Owned by root, readable by Steward's group: Steward must not change its own settings.
    _write_file(options.path, text, 0o640, (os.geteuid(), gid))
    yield options.path
    programs = f"{options.out}/programs"
    if not os.path.lexists(programs):
        _write_file(programs, _PROGRAMS, 0o644, None)
        yield programs
    for path, mode, owner in _list_directories(options, uid, gid):
        if _make_directory(path, mode, owner):
            yield path
    if options.sensor:
        yield from _install_trigger(options)


def _list_directories(
    options: InitOptions, uid: int, gid: int
) -> Iterator[tuple[str, int, tuple[int, int] | None]]:
    yield f"{options.out}/rules.d", 0o755, None
    yield options.state_dir, 0o700, (uid, gid)
    yield options.archive_dir, 0o755, (uid, gid)
    if options.jobcomp_lines:
        yield os.path.dirname(options.jobcomp_lines), 0o750, (uid, gid)


def _install_trigger(options: InitOptions) -> Iterator[str]:
    from steward.admin.plugins.trigger import install_trigger

    helper = SensorSettings().helper
    secret = f"{options.out}/trigger.secret"
    yield from install_trigger(helper, secret, user=options.user).written_paths


def _check_config_text(text: str, options: InitOptions) -> None:
    """Check that the text to write is a valid configuration."""
    fd, path = tempfile.mkstemp(prefix=".steward-", suffix=".toml", dir=options.out)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        load_settings(path)
    finally:
        os.unlink(path)


def _write_file(path: str, text: str, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a file atomically, with owner and mode set from the start."""
    with replace_file(path, mode, owner=owner) as file:
        file.write(text.encode())


def _make_directory(path: str, mode: int, owner: tuple[int, int] | None) -> bool:
    """Create a directory and its parents; an existing one stays unchanged.

    Returns:
        Whether it was made.
    """
    if os.path.lexists(path):
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise SetupError(f"{path} exists and is not a directory", path)
        return False
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    os.mkdir(path, mode)
    if owner is not None:
        os.chown(path, *owner)
    # Sets the mode whatever the umask.
    os.chmod(path, mode)
    return True


_WRITABLE: Final = "/srv/steward/"
"""Directory that the unit file lets Steward write to besides its own."""


_LUA_SOCKET: Final = "apt-get install lua-socket        # on EL: dnf install lua-socket, of EPEL"


class SetupStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the installation, for the administrator.

    Attributes:
        title: Purpose of the step.
        commands: Commands to type in this order, and lines to add to Slurm's files.
        note: Note on the step; "" for none.
    """

    title: str
    commands: tuple[str, ...]
    note: str = ""


def list_steps(options: InitOptions, site: SlurmSite) -> Iterator[SetupStep]:
    """Yield the remaining steps in order."""
    config_option = "" if options.out == DEFAULT_OUT else f" --config {options.path}"
    yield SetupStep(
        title="The archive, from queue polls and the spool; Slurm is unchanged",
        commands=(
            f"steward config check{config_option}",
            *_list_unit_commands(options),
            "systemctl enable --now steward",
            f"steward doctor{config_option}",
        ),
    )
    if options.jobcomp_lines:
        yield _make_jobcomp_step(site)
    if options.nodes:
        yield _make_nodes_step(options, site)
    if options.bank:
        yield _make_bank_step(config_option)
        yield _make_gate_step(site, config_option)
    if options.web:
        yield _make_web_step(options, config_option)


def _list_unit_commands(options: InitOptions) -> Iterator[str]:
    """Yield commands that adapt the unit file to this site."""
    if options.user != "slurm":
        yield f"systemctl edit steward        # [Service] User={options.user} Group={options.user}"
    if not f"{options.archive_dir}/".startswith(_WRITABLE):
        yield f"systemctl edit steward        # [Service] ReadWritePaths={options.archive_dir}"


def _make_jobcomp_step(site: SlurmSite) -> SetupStep:
    return SetupStep(
        title="Job ends, reported by slurmctld",
        commands=(
            f"steward plugins install --jobcomp {site.conf_dir}",
            f"{site.conf_dir}/slurm.conf: JobCompType=jobcomp/lua",
            "systemctl restart slurmctld",
            f"steward plugins check --jobcomp {site.conf_dir}",
        ),
    )


def _make_nodes_step(options: InitOptions, site: SlurmSite) -> SetupStep:
    """Make the step that installs SPANK plugin and agents on nodes."""
    plugstack = site.plugstack
    conf = f"{get_conf_directory(plugstack)}/steward.conf"
    plugstack_option = (
        f" --plugstack {plugstack}" if plugstack != "/etc/slurm/plugstack.conf" else ""
    )
    include = f"{plugstack}: include {get_conf_directory(plugstack)}/*.conf"
    port = options.nodes.rpartition(":")[2]
    agent_line = f'STEWARD_AGENT="--to {os.uname().nodename}:{port} --user {options.user}"'
    return SetupStep(
        title="Resource use of steps and tasks, reported by nodes",
        commands=(
            *(("systemctl enable --now steward-listen",) if options.listener else ()),
            "steward plugins build",
            f"steward plugins install{plugstack_option}        # on each node",
            *(() if has_include(plugstack, conf) else (include,)),
            f"steward plugins check{plugstack_option}          # on each node",
            f"echo '{agent_line}' > /etc/steward/agent.conf        # on each node",
            "systemctl enable --now steward-agent.timer        # on each node",
        ),
        note=f"Nodes without their own slurm.conf include it through {FETCHED_PLUGSTACK}.",
    )


def _make_bank_step(config_option: str) -> SetupStep:
    return SetupStep(
        title="The bank in mode observe: it prices and charges jobs, and rejects none",
        commands=(
            f"steward bank rate create '*' --weight cpu=1{config_option}",
            f"steward bank import sacctmgr --dry-run{config_option}",
            f"steward bank import sacctmgr{config_option}",
        ),
        note="Without a slurmdbd, create accounts with 'steward bank account create'.",
    )


def _make_gate_step(site: SlurmSite, config_option: str) -> SetupStep:
    """Make the step that installs the submit plugin."""
    plugins = parse_submit_plugins(site.config)
    site_script = f"{site.conf_dir}/{LUA_SCRIPT}"
    note = "The file gate.off disables it at once: docs/gate.md."
    if os.path.exists(site_script) and not is_own_file(site_script):
        note = (
            f"{site_script} is the site's own: the first command prints what it must call. {note}"
        )
    plugin_names = [*(plugin for plugin in plugins if plugin != "lua"), "lua"]
    return SetupStep(
        title="The gate: slurmctld asks the bank before it accepts a job",
        commands=(
            *(() if find_lua_sockets() else (_LUA_SOCKET,)),
            f"steward plugins install --job-submit-lua {site.conf_dir}",
            f"{site.conf_dir}/slurm.conf: JobSubmitPlugins={','.join(plugin_names)}",
            "systemctl restart slurmctld",
            f"steward plugins check --job-submit-lua {site.conf_dir}",
            f"steward bank would-reject --since now-7days{config_option}        # some days later",
            f"steward bank mode enforce{config_option}",
        ),
        note=note,
    )


def _make_web_step(options: InitOptions, config_option: str) -> SetupStep:
    note = f"{options.path}: set [web] url, which 'steward login' prints. Then: steward reload."
    return SetupStep(
        title="The web pages and the API",
        commands=("systemctl enable --now steward-web", f"steward login{config_option}"),
        note="" if options.web_url else note,
    )
