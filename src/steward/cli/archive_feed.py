"""``steward archive watch`` and ``import``: how scripts come into an archive."""

import os
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from steward.archive.settings import FilesSinkSettings
from steward.cli import options, output
from steward.cli.alone import SetUpError, checked, set_up, settings_path, state_dir
from steward.cli.options import Place
from steward.cli.progress import Bar
from steward.cli.text import number, safe
from steward.cli.times import local
from steward.client.here import settings_here
from steward.core.config import ArchiveSettings, LogLevel, Settings
from steward.core.errors import UsageError
from steward.daemon.__main__ import become
from steward.slurm.settings import ClusterSettings


def watch(
    cluster: Annotated[str, typer.Option("--cluster", metavar="NAME", help="The cluster's name.")],
    archive: Annotated[
        str,
        typer.Option("--archive", metavar="DIR", help="Where scripts are kept; made if need be."),
    ],
    spool: Annotated[
        str,
        typer.Option(
            "--spool",
            metavar="DIR",
            help="slurmctld's StateSaveLocation (Slurm is asked if not given), or Torque's "
            "server_priv.",
        ),
    ] = "",
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="L",
            help="default, job_archive, sarchive, sliced, or a template such as "
            "{user}/{year}/{job_id}-{name}.",
        ),
    ] = "default",
    scheduler: Annotated[
        str, typer.Option("--scheduler", metavar="NAME", help="Whose spool it is: slurm or torque.")
    ] = "slurm",
    torque_subdirs: Annotated[
        bool,
        typer.Option(
            "--torque-subdirs",
            help="Torque keeps its jobs in jobs/0 to jobs/9 only; both are looked at if not given.",
        ),
    ] = False,
    no_slurm: Annotated[
        bool, typer.Option("--no-slurm", help="Never ask Slurm: owners stay unverified.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Keep what is in the spool now, and end.")
    ] = False,
    state: Annotated[
        str,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Where databases are, on a local disk; in the archive if not given.",
        ),
    ] = "",
    timezone: Annotated[
        str, typer.Option("--timezone", metavar="ZONE", help="The zone of dates in paths.")
    ] = "",
    slurm_conf: Annotated[
        str, typer.Option("--slurm-conf", metavar="FILE", help="slurm.conf, if not the usual one.")
    ] = "",
    period: Annotated[
        Literal["yearly", "monthly", "daily", "none"],
        typer.Option(
            "--period",
            metavar="P",
            help="With --layout sarchive: a directory each year, month or day, or one for all: "
            "yearly, monthly, daily, none. Default yearly.",
        ),
    ] = "yearly",
    groups: Annotated[
        str,
        typer.Option(
            "--groups", metavar="NAME,…", help="Unix groups that may read every file. Default none."
        ),
    ] = "",
    groups_file: Annotated[
        str,
        typer.Option("--groups-file", metavar="FILE", help="A file with such groups, one a line."),
    ] = "",
    move_to: Annotated[
        str,
        typer.Option(
            "--move-to", metavar="DIR", help="A second tree that files are moved on to; not --once."
        ),
    ] = "",
    move_after: Annotated[
        float,
        typer.Option(
            "--move-after",
            metavar="S",
            help="Age of a file when it is moved on, in seconds. Default 300.",
        ),
    ] = 300.0,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            "--log-level",
            metavar="L",
            help="debug (a line for each script kept, read again, filed or moved), info, warning "
            "or error. Default info, with --once warning.",
        ),
    ] = None,
) -> None:
    """Keep one cluster's scripts, alone.

    Needs no configuration file, and changes nothing but DIR. Run it as root or
    as the user that slurmctld runs as. Ctrl-C ends it; started again it takes
    up what it missed.
    """
    if no_slurm and not spool and scheduler == "slurm":
        raise UsageError("--no-slurm leaves nobody to ask where the spool is: give --spool DIR")
    if once and move_to:
        raise UsageError("--once ends before files are old enough to be moved: leave --move-to out")
    if once and spool:
        _look_into(spool, scheduler)
    root = os.path.abspath(archive)
    settings = checked(
        Settings(
            state_dir=os.path.abspath(state) if state else state_dir(root, f"watch-{cluster}"),
            cluster={
                cluster: ClusterSettings(
                    scheduler=scheduler,
                    torque_subdirs=True if torque_subdirs else None,
                    slurm=not no_slurm,
                    spool=os.path.abspath(spool) if spool else "",
                    slurm_conf=os.path.abspath(slurm_conf) if slurm_conf else "",
                    timezone=timezone,
                )
            },
            archive=ArchiveSettings(
                sink={
                    "files": FilesSinkSettings(
                        path=root,
                        layout=layout,
                        period=period,
                        groups=tuple(filter(None, groups.split(","))),
                        groups_file=os.path.abspath(groups_file) if groups_file else "",
                        move_to=os.path.abspath(move_to) if move_to else "",
                        move_after_s=move_after,
                    )
                }
            ),
            log_level=log_level or ("warning" if once else "info"),
        ),
        "watch",
        {
            "spool": "--spool",
            "scheduler": "--scheduler",
            "groups": "--groups",
            "groups_file": "--groups-file",
            "move_to": "--move-to",
            "move_after_s": "--move-after",
        },
    )
    settings = set_up(root, settings, "watch")
    if once:
        raise typer.Exit(_once(settings, root, cluster))
    become(settings_path(root))


def _look_into(spool: str, scheduler: str) -> None:
    """Make sure that one pass over the spool does not find nothing just because it may not look.

    Raises:
        SetUpError: The spool cannot be read now.
    """
    try:
        os.scandir(spool).close()
    except OSError as error:
        what = "slurmctld's StateSaveLocation, and run this as root or as slurmctld's user"
        if scheduler == "torque":
            what = "Torque's server_priv, and run this as root"
        raise SetUpError(
            f"cannot read the spool {spool}: {error.strerror}; give {what}",
            spool,
        ) from error


def _once(settings: Settings, root: str, cluster: str) -> int:
    from steward.core.logs import set_up
    from steward.daemon.once import run_once

    set_up(settings.log_level)
    os.umask(0o077)
    began = time.monotonic()
    report = run_once(settings)
    took_s = time.monotonic() - began
    print(
        f"Kept {number(report.captured, 'new script')} of {safe(cluster)} in {safe(root)}; "
        f"it took {took_s:.1f} s."
    )
    for name, reason in report.waiting.items():
        output.warn(f"{name} could not go on: {reason}")
    output.note(f"  steward archive list --archive {safe(root)}")
    return 1 if report.waiting else 0


def import_(
    kind: Annotated[
        Literal["job_archive", "sarchive", "slurmdbd"],
        typer.Argument(metavar="KIND", help="job_archive, sarchive or slurmdbd."),
    ],
    root: Annotated[
        str, typer.Argument(metavar="[DIR]", help="The root of job_archive's or SArchive's tree.")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option("--cluster", "-M", metavar="NAME", help="The cluster whose jobs they were."),
    ] = "",
    since: options.Since = "",
    until: options.Until = "",
    as_json: options.Json = False,
    config: options.Config = "",
    archive: options.Archive = "",
) -> None:
    """Take over another tool's archive.

    Reads the tree that job_archive or SArchive wrote, or the scripts that
    slurmdbd stored (-S and -E say of when). Nothing is changed there, secrets
    are taken out of environments, and doing it twice does no harm.
    """
    settings = settings_here(Place(config=config, archive=archive))
    cluster = cluster or _only(settings)
    from steward.daemon.imports import take_over_stored, take_over_tree

    with Bar() as bar:

        def report(done: int) -> None:
            bar.show(done, None, "scripts")

        if kind == "slurmdbd":
            if root:
                raise UsageError("slurmdbd has no directory to import from: leave it out", root)
            begin, end = _times(since, until)
            imported = take_over_stored(settings, cluster, begin, end, report)
        else:
            if not root:
                raise UsageError(f"say where the tree is: steward archive import {kind} DIR")
            imported = take_over_tree(settings, cluster, kind, os.path.abspath(root), report)
    if as_json:
        output.print_json(imported)
        return
    print(
        f"Took over {number(imported.scripts, 'script')}, {imported.owned} of them with an owner."
    )
    if imported.known:
        print(f"The archive had {number(imported.known, 'script')} already.")
    if imported.scriptless:
        print(f"slurmdbd stored no script of {number(imported.scriptless, 'submission')}.")
    if imported.skipped:
        output.warn(f"passed over {number(imported.skipped, 'file')}: the log says which and why")
    if imported.unknown_users:
        names = ", ".join(safe(name) for name in imported.unknown_users)
        output.warn(f"no such users here, their scripts stay unverified: {names}")


def _only(settings: Settings) -> str:
    if len(settings.cluster) == 1:
        return next(iter(settings.cluster))
    raise UsageError(f"say which with --cluster: {', '.join(settings.cluster)}")


def _times(since: str, until: str) -> tuple[datetime, datetime]:
    from steward.slurm.times import parse_time

    now = datetime.now(UTC)
    zone = local(now).tzinfo or UTC
    if not since:
        raise UsageError("say since when: steward archive import slurmdbd -S 2026-01-01")
    return parse_time(since, now, zone), parse_time(until, now, zone) if until else now
