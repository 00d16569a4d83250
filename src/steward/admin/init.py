"""``steward init``: a first configuration, and what Slurm is to be told."""

import os
import pwd
import stat
import tempfile
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from steward.admin.plugins.installation import (
    DEFAULT_LINES,
    FETCHED_PLUGSTACK,
    conf_directory,
    includes,
    is_ours,
)
from steward.admin.plugins.job_submit import CALLED, lua_sockets
from steward.admin.plugins.jobcomp import slurm_user
from steward.bank.gate.plugin_conf import plugins_of
from steward.capture.settings import SensorSettings
from steward.core.config import Settings
from steward.core.config.reader import load
from steward.core.errors import StewardError
from steward.core.files import network_kind, replacing
from steward.slurm import Slurm, SlurmError
from steward.slurm.settings import ClusterSettings


class SetupError(StewardError):
    """Something cannot be set up, or is there already."""


DEFAULT_OUT: Final = "/etc/steward"
DEFAULT_ARCHIVE: Final = "/srv/steward/archive"
DEFAULT_STATE: Final = Settings().state_dir
_PATIENCE_S: Final = 20.0


class Site(msgspec.Struct, frozen=True, kw_only=True):
    """What Slurm says of itself.

    Attributes:
        shown: What ``scontrol show config`` shows; empty where slurmctld does not answer.
        slurm_conf: The path that was named for slurm.conf; "" where it is found by itself.
        slurm_bin: The directory that was named for its commands; "" likewise.
    """

    shown: Mapping[str, str] = {}
    slurm_conf: str = ""
    slurm_bin: str = ""

    @property
    def cluster(self) -> str:
        """ClusterName; "" where it is not shown."""
        return self.shown.get("ClusterName", "")

    @property
    def slurm_user(self) -> str:
        """SlurmUser's name."""
        found = slurm_user(self.shown)
        return found[0] if found else "slurm"

    @property
    def etc(self) -> str:
        """The directory of slurm.conf."""
        path = self.slurm_conf or self.shown.get("SLURM_CONF", "")
        return os.path.dirname(path) if path else "/etc/slurm"

    @property
    def plugstack(self) -> str:
        """Path of plugstack.conf."""
        return self.shown.get("PlugStackConfig", "") or f"{self.etc}/plugstack.conf"

    @property
    def jobcomp(self) -> str:
        """JobCompType; "" where the place is free."""
        kind = self.shown.get("JobCompType", "")
        return "" if kind == "jobcomp/none" else kind


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a site wants of Steward.

    Attributes:
        cluster: What the cluster is called.
        user: Who Steward runs as.
        archive_dir: Where scripts are archived.
        state_dir: Where journal and databases live.
        out: Directory of the configuration.
        jobcomp_lines: File that slurmctld tells of ended jobs in; "" for none.
        nodes: Address at which nodes report what jobs used; "" for none.
        listener: User that listens there; "" where the daemon does it itself.
        bank: Whether there is a bank.
        sensor: Whether nodes are watched.
        web: Address of the pages; "" for none.
        web_url: URL of the pages in users' browsers; "" if it is not known yet.
    """

    cluster: str
    user: str
    archive_dir: str = DEFAULT_ARCHIVE
    state_dir: str = DEFAULT_STATE
    out: str = DEFAULT_OUT
    jobcomp_lines: str = DEFAULT_LINES
    nodes: str = ""
    listener: str = ""
    bank: bool = False
    sensor: bool = False
    web: str = ""
    web_url: str = ""

    @property
    def path(self) -> str:
        """The configuration's file."""
        return os.path.join(self.out, "steward.toml")

    @property
    def account(self) -> pwd.struct_passwd:
        """The user that Steward runs as.

        Raises:
            SetupError: There is none of that name.
        """
        try:
            return pwd.getpwnam(self.user)
        except KeyError as error:
            raise SetupError(
                f"there is no user {self.user!r}: name SlurmUser by --user", self.user
            ) from error


def is_user(name: str) -> bool:
    """Look up a user, as a package makes it."""
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def site_of(slurm_conf: str = "", slurm_bin: str = "") -> Site:
    """What Slurm says of itself here; little where slurmctld does not answer.

    Args:
        slurm_conf: Path of slurm.conf, where it is not found by itself.
        slurm_bin: Directory of Slurm's commands, likewise.

    Raises:
        SetupError: slurmctld does not answer.
    """
    settings = ClusterSettings(
        slurm_conf=slurm_conf, slurm_bin=slurm_bin, command_timeout_s=_PATIENCE_S
    )
    try:
        shown = Slurm("here", settings).config()
    except SlurmError as error:
        raise SetupError(
            f"slurmctld does not answer: run this on its host while it runs ({error})", error
        ) from error
    return Site(shown=shown, slurm_conf=slurm_conf, slurm_bin=slurm_bin)


_HEAD: Final = """\
# Made by 'steward init'. What else can be set: docs/configuration.md, steward.toml(5).
# 'steward config check' says whether it is right; 'systemctl reload steward' has it read again.
"""


_NO_URL: Final = '#url = "https://steward.example.org"\n'


def text_of(wishes: Wishes, site: Site) -> str:
    """The configuration, in TOML."""
    parts = [_HEAD]
    if wishes.state_dir != DEFAULT_STATE:
        parts.append(_line("state_dir", wishes.state_dir))
    parts.append(_cluster(wishes, site))
    parts.append("[archive.sink.files]\n" + _line("path", wishes.archive_dir))
    if wishes.nodes:
        parts.append("# What 'steward agent' on compute nodes sends.\n[nodes]\n")
        parts[-1] += _line("listen", wishes.nodes)
        if wishes.listener:
            parts[-1] += _line("listener", wishes.listener)
    if wishes.bank:
        parts.append("# It observes, and refuses nothing, until 'steward bank enforce gate'.\n")
        parts[-1] += "[bank]\nenabled = true\n"
    if wishes.sensor:
        parts.append(_sensor(wishes))
    parts.append("[actions]\n" + _line("programs_file", f"{wishes.out}/programs"))
    parts.append(
        "# Rules act on events; 'steward rules enable NAME' turns on one that comes with Steward.\n"
        f'[rules]\nenabled = false\ndirectories = ["{wishes.out}/rules.d"]\n'
    )
    if wishes.web:
        parts.append("[web]\n" + _line("listen", wishes.web))
        parts[-1] += "# URL of the pages in users' browsers; 'steward login' prints links to it.\n"
        parts[-1] += _line("url", wishes.web_url) if wishes.web_url else _NO_URL
    return "\n".join(parts)


def _cluster(wishes: Wishes, site: Site) -> str:
    lines = [f"[cluster.{wishes.cluster}]\n"]
    for name in ("slurm_conf", "slurm_bin"):
        value = getattr(site, name)
        if value:
            lines.append(_line(name, value))
    if wishes.jobcomp_lines:
        lines.append(_line("jobcomp_lines", wishes.jobcomp_lines))
    return "".join(lines)


def _sensor(wishes: Wishes) -> str:
    text = "[sensor]\nenabled = true\n"
    secret = f"{wishes.out}/trigger.secret"
    if secret != SensorSettings().secret_file:
        text += _line("secret_file", secret)
    return text


def _line(name: str, value: str) -> str:
    # JSON's strings are TOML's, but for DEL, which no path of ours holds.
    return f"{name} = {msgspec.json.encode(value).decode()}\n"


_PROGRAMS: Final = """\
# Absolute paths of the programs that the actions local.command and slurm.trigger.set may
# start, one a line. See docs/actions.md.
"""


def make(wishes: Wishes, site: Site, *, force: bool = False) -> list[str]:
    """Write the configuration and make what it names; the paths that were written.

    Args:
        wishes: What is wanted.
        site: What Slurm says.
        force: Whether a configuration that is there is written over; it is kept beside.

    Raises:
        SetupError: There is a configuration, a directory is none, or nothing can be written.
        ConfigError: What was asked for makes no configuration.
    """
    account = wishes.account
    if os.geteuid() not in (0, account.pw_uid):
        raise SetupError(f"files are to be {wishes.user}'s: run this as root", wishes.user)
    if os.path.lexists(wishes.path) and not force:
        raise SetupError(
            f"{wishes.path} is there: edit it, or write it anew with --force", wishes.path
        )
    kind = network_kind(wishes.state_dir)
    if kind:
        raise SetupError(
            f"{wishes.state_dir} is on {kind}: name a local disk by --state-dir", wishes.state_dir
        )
    try:
        return list(_made(wishes, site, account.pw_uid, account.pw_gid))
    except OSError as error:
        raise SetupError(f"{error.filename or wishes.out}: {error.strerror}", wishes) from error


def _made(wishes: Wishes, site: Site, uid: int, gid: int) -> Iterator[str]:
    _directory(wishes.out, 0o755, None)
    text = text_of(wishes, site)
    _check(text, wishes)
    if os.path.lexists(wishes.path):
        os.replace(wishes.path, f"{wishes.path}.old")
        yield f"{wishes.path}.old"
    # Root's, and his group's to read: what runs as Steward does not change what it is to do.
    _file(wishes.path, text, 0o640, (os.geteuid(), gid))
    yield wishes.path
    programs = f"{wishes.out}/programs"
    if not os.path.lexists(programs):
        _file(programs, _PROGRAMS, 0o644, None)
        yield programs
    for path, mode, owner in _directories(wishes, uid, gid):
        if _directory(path, mode, owner):
            yield path
    if wishes.sensor:
        yield from _trigger(wishes)


def _directories(
    wishes: Wishes, uid: int, gid: int
) -> Iterator[tuple[str, int, tuple[int, int] | None]]:
    yield f"{wishes.out}/rules.d", 0o755, None
    yield wishes.state_dir, 0o700, (uid, gid)
    yield wishes.archive_dir, 0o755, (uid, gid)
    if wishes.jobcomp_lines:
        yield os.path.dirname(wishes.jobcomp_lines), 0o750, (uid, gid)


def _trigger(wishes: Wishes) -> Iterator[str]:
    from steward.admin.plugins.trigger import install_trigger

    helper = SensorSettings().helper
    secret = f"{wishes.out}/trigger.secret"
    yield from install_trigger(helper, secret, user=wishes.user).written


def _check(text: str, wishes: Wishes) -> None:
    """See that what is about to be written is a configuration."""
    fd, path = tempfile.mkstemp(prefix=".steward-", suffix=".toml", dir=wishes.out)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        load(path)
    finally:
        os.unlink(path)


def _file(path: str, text: str, mode: int, owner: tuple[int, int] | None) -> None:
    """Write a file that nobody finds half written, or with another's rights."""
    with replacing(path, mode, owner=owner) as file:
        file.write(text.encode())


def _directory(path: str, mode: int, owner: tuple[int, int] | None) -> bool:
    """Make a directory, and those above it; one that is there stays as it is.

    Returns:
        Whether it was made.
    """
    if os.path.lexists(path):
        if not stat.S_ISDIR(os.stat(path).st_mode):
            raise SetupError(f"{path} is there, and is no directory", path)
        return False
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    os.mkdir(path, mode)
    if owner is not None:
        os.chown(path, *owner)
    # Whatever the umask was.
    os.chmod(path, mode)
    return True


_WRITABLE: Final = "/srv/steward/"
"""What the unit file lets Steward write to beside its own directories."""


_LUA_SOCKET: Final = "apt-get install lua-socket        # on EL: dnf install lua-socket, of EPEL"


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a site's way to Steward.

    Attributes:
        title: What it brings.
        commands: What to type, in this order; lines of Slurm's files come between.
        note: What has to be known of it; "" for nothing.
    """

    title: str
    commands: tuple[str, ...]
    note: str = ""


def steps(wishes: Wishes, site: Site) -> Iterator[Step]:
    """The steps that are left, in their order."""
    at = "" if wishes.out == DEFAULT_OUT else f" --config {wishes.path}"
    yield Step(
        title="The archive, from snapshots and the spool alone: nothing of Slurm is changed",
        commands=(
            f"steward config check{at}",
            *_unit(wishes),
            "systemctl enable --now steward",
            f"steward doctor{at}",
        ),
    )
    if wishes.jobcomp_lines:
        yield _jobcomp(site)
    if wishes.nodes:
        yield _nodes(wishes, site)
    if wishes.bank:
        yield _bank(at)
        yield _gate(site, at)
    if wishes.web:
        yield _pages(wishes, at)


def _unit(wishes: Wishes) -> Iterator[str]:
    """What the unit file has to be told of this site."""
    if wishes.user != "slurm":
        yield f"systemctl edit steward        # [Service] User={wishes.user} Group={wishes.user}"
    if not f"{wishes.archive_dir}/".startswith(_WRITABLE):
        yield f"systemctl edit steward        # [Service] ReadWritePaths={wishes.archive_dir}"


def _jobcomp(site: Site) -> Step:
    return Step(
        title="Every job's end, told by slurmctld as it happens",
        commands=(
            f"steward plugins install --jobcomp {site.etc}",
            f"{site.etc}/slurm.conf: JobCompType=jobcomp/lua",
            "systemctl restart slurmctld",
            f"steward plugins check --jobcomp {site.etc}",
        ),
    )


def _nodes(wishes: Wishes, site: Site) -> Step:
    plugstack = site.plugstack
    conf = f"{conf_directory(plugstack)}/steward.conf"
    at = f" --plugstack {plugstack}" if plugstack != "/etc/slurm/plugstack.conf" else ""
    include = f"{plugstack}: include {conf_directory(plugstack)}/*.conf"
    port = wishes.nodes.rpartition(":")[2]
    words = f'STEWARD_AGENT="--to {os.uname().nodename}:{port} --user {wishes.user}"'
    return Step(
        title="What steps and tasks used, told by the nodes",
        commands=(
            *(("systemctl enable --now steward-listen",) if wishes.listener else ()),
            "steward plugins build",
            f"steward plugins install{at}        # on each node",
            *(() if includes(plugstack, conf) else (include,)),
            f"steward plugins check{at}          # on each node",
            f"echo '{words}' > /etc/steward/agent.conf        # on each node",
            "systemctl enable --now steward-agent.timer        # on each node",
        ),
        note=f"Without a slurm.conf of their own nodes include it by {FETCHED_PLUGSTACK}.",
    )


def _bank(at: str) -> Step:
    return Step(
        title="The bank, which observes: jobs are priced and charged, none is refused",
        commands=(
            f"steward bank rate create '*' --weight cpu=1{at}",
            f"steward bank import sacctmgr --dry-run{at}",
            f"steward bank import sacctmgr{at}",
        ),
        note="Without a slurmdbd accounts come by 'steward bank account create'.",
    )


def _gate(site: Site, at: str) -> Step:
    plugins = plugins_of(site.shown)
    called = f"{site.etc}/{CALLED}"
    note = "gate.off takes it out again at once: docs/gate.md."
    if os.path.exists(called) and not is_ours(called):
        note = f"{called} is the site's own: the first command says what it is to call. {note}"
    named = [*(one for one in plugins if one != "lua"), "lua"]
    return Step(
        title="The gate: slurmctld asks the bank before it takes a job",
        commands=(
            *(() if lua_sockets() else (_LUA_SOCKET,)),
            f"steward plugins install --job-submit-lua {site.etc}",
            f"{site.etc}/slurm.conf: JobSubmitPlugins={','.join(named)}",
            "systemctl restart slurmctld",
            f"steward plugins check --job-submit-lua {site.etc}",
            f"steward bank would-refuse --since now-7days{at}        # some days later",
            f"steward bank enforce gate{at}",
        ),
        note=note,
    )


def _pages(wishes: Wishes, at: str) -> Step:
    note = f"{wishes.path}: set [web] url, which 'steward login' prints. Then: steward reload."
    return Step(
        title="The web pages and the API",
        commands=("systemctl enable --now steward-web", f"steward login{at}"),
        note="" if wishes.web_url else note,
    )
