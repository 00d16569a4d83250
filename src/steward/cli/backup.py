"""``steward backup`` and ``restore``: save all state of Steward to one file, and restore it.

Both run on this host without the daemon; ``admin/backup`` does the work.
"""

import os
import tempfile
from typing import Annotated

import typer

from steward.admin.backup.archive import CONFIG, BackupError, Manifest, check, content
from steward.admin.backup.creation import make, named
from steward.admin.backup.restoration import restore as put_back
from steward.cli import output
from steward.cli.options import Config, Json
from steward.cli.output import Bar, number, print_json, show_time, size
from steward.client.places import Place, settings_here
from steward.core.config import Settings
from steward.core.config.reader import DEFAULT_PATH, load
from steward.core.events import utc_now


def backup(
    to: Annotated[
        str,
        typer.Argument(metavar="DIR|FILE", help="Where to: a directory, or FILE.tar.zst."),
    ],
    archive: Annotated[
        bool,
        typer.Option("--with-archive", help="With the files of the archive, too."),
    ] = False,
    catalogue: Annotated[
        bool,
        typer.Option(
            "--catalogue/--no-catalogue",
            help="With the index for content search, which 'archive reindex' makes anew.",
        ),
    ] = True,
    as_json: Json = False,
    config: Config = "",
) -> None:
    """Write all that Steward knows into one file, while it runs.

    Databases, scripts that wait, secrets and the configuration are in it, so that it is as
    private as they are. A ledger in PostgreSQL and the archive's own files are not.
    """
    settings = settings_here(Place(config=config))
    path = named(to, utc_now())
    with Bar() as bar:
        made = make(
            settings,
            config or DEFAULT_PATH,
            path,
            archive=archive,
            catalogue=catalogue,
            show=bar.show,
        )
    if as_json:
        print_json(made)
        return
    print(f"{path}: {_told(made)}")
    for what in _outside(made, settings):
        output.warn(what)


def restore(
    path: Annotated[str, typer.Argument(metavar="FILE", help="What 'steward backup' made.")],
    only_check: Annotated[
        bool, typer.Option("--check", help="Only read it through and say whether it is whole.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Move aside what is in the state directory.")
    ] = False,
    as_json: Json = False,
    config: Config = "",
) -> None:
    """Put a backup back: into the place that the configuration names.

    Without a configuration on this host that of the backup is taken, and written to its place.
    The daemon must not run. Files of the configuration that are there stay as they are.
    """
    manifest = check(path)
    if only_check:
        if as_json:
            print_json(manifest)
        else:
            print(f"{path} is whole: {_told(manifest)}")
        return
    settings = _settings(path, manifest, config)
    with Bar() as bar:
        done = put_back(path, manifest, settings, force=force, now=utc_now(), show=bar.show)
    if as_json:
        print_json(done)
        return
    print(f"{number(done.files, 'file')} are back in {done.state_dir}.")
    if done.aside:
        print(f"What was there is in {done.aside} now: remove it when all is well.")
    for file in done.written:
        print(f"  wrote  {file}")
    for file in done.left:
        print(f"  left   {file}")
    for what in _outside(manifest, settings):
        output.warn(what)


def _settings(path: str, manifest: Manifest, config: str) -> Settings:
    """Return the named configuration, else this host's, else the one in the backup."""
    if config or os.path.exists(DEFAULT_PATH):
        return load(config or DEFAULT_PATH)
    if not manifest.config:
        raise BackupError("there is no configuration in this backup: name one with --config", path)
    with tempfile.TemporaryDirectory() as directory:
        there = os.path.join(directory, "steward.toml")
        with open(there, "wb") as file:
            file.write(content(path, f"{CONFIG}{manifest.config.lstrip('/')}"))
        return load(there)


def _told(manifest: Manifest) -> str:
    """Describe a backup: files, size, host, time and version."""
    at = show_time(manifest.made_at)
    files = number(len(manifest.members), "file")
    return (
        f"{files}, {size(manifest.total_bytes)}, of {manifest.host} at {at}, "
        f"by Steward {manifest.steward}"
    )


def _outside(manifest: Manifest, settings: Settings) -> list[str]:
    """Return warnings about data that a backup omits and the site must save itself."""
    found = []
    if manifest.ledger:
        found.append(
            f"the ledger is not in it: back {manifest.ledger} up with pg_dump, after each "
            "'steward backup'"
        )
    if not manifest.trees and settings.files_sinks():
        roots = ", ".join(settings.sink_path(name) for name in settings.files_sinks())
        found.append(f"the archive's own files are not in it: {roots} (see --with-archive)")
    return found
