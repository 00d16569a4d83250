"""What is left to do, in the order in which a site is to adopt Steward (docs/safety.md).

Each step is of use without the next ones; what touches slurmctld says so.
"""

import os
from collections.abc import Iterator
from typing import Final

import msgspec

from steward.admin.init.wishes import DEFAULT_OUT, Site, Wishes
from steward.admin.plugins import submitting
from steward.admin.plugins.installing import FETCHED_PLUGSTACK, conf_directory, includes, is_ours
from steward.bank.gate.plugin_conf import plugins_of

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
    called = f"{site.etc}/{submitting.CALLED}"
    note = "gate.off takes it out again at once: docs/gate.md."
    if os.path.exists(called) and not is_ours(called):
        note = f"{called} is the site's own: the first command says what it is to call. {note}"
    named = [*(one for one in plugins if one != "lua"), "lua"]
    return Step(
        title="The gate: slurmctld asks the bank before it takes a job",
        commands=(
            *(() if submitting.lua_sockets() else (_LUA_SOCKET,)),
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
