"""``steward backup`` and ``restore``: save all state of Steward to one file, and restore it.

Both run on this host without the daemon; ``admin/backup`` does the work.
"""

import os
import tempfile
from typing import Annotated

from steward.admin.backup.archive import (
    CONFIG_PREFIX,
    BackupError,
    BackupManifest,
    read_member,
    verify_backup,
)
from steward.admin.backup.creation import choose_backup_path, make_backup
from steward.admin.backup.restoration import restore_backup
from steward.cli import output
from steward.cli.options import Config, Json
from steward.cli.output import ProgressLine, format_count, format_size, format_time, print_json
from steward.cli.parameters import Argument, Option
from steward.client.places import ClientPlace, require_settings
from steward.core.config import Settings
from steward.core.config.reader import DEFAULT_PATH, load_settings
from steward.core.events import utc_now


def backup(
    to: Annotated[
        str,
        Argument(metavar="DIR|FILE", help="Target: a directory, or a file FILE.tar.zst."),
    ],
    archive: Annotated[
        bool,
        Option("--with-archive", help="Include the archived files and the job log."),
    ] = False,
    catalog: Annotated[
        bool,
        Option(
            "--catalog/--no-catalog",
            help="Include the catalog. If it is missing, 'archive reindex' rebuilds it.",
        ),
    ] = True,
    as_json: Json = False,
    config: Config = "",
) -> None:
    """Back up databases, settings and secrets into one file, while Steward runs.

    A backup contains databases, waiting scripts, secrets and the configuration, so keep it
    private. It does not contain a ledger in PostgreSQL, nor the archived files.
    """
    settings = require_settings(ClientPlace(config=config))
    path = choose_backup_path(to, utc_now())
    with ProgressLine() as progress:
        manifest = make_backup(
            settings,
            config or DEFAULT_PATH,
            path,
            with_archive=archive,
            with_catalog=catalog,
            show_progress=progress.show,
        )
    if as_json:
        print_json(manifest)
        return
    print(f"{path}: {_describe_backup(manifest)}")
    for warning in _list_omitted(manifest, settings):
        output.print_warning(warning)


def restore(
    path: Annotated[
        str,
        Argument(
            metavar="FILE",
            help="Backup to restore: a file written by 'steward backup'.",
        ),
    ],
    only_check: Annotated[
        bool, Option("--check", help="Verify the backup without restoring it.")
    ] = False,
    force: Annotated[
        bool,
        Option(
            "--force",
            help="Move the current content of the state directory to its subdirectory "
            "before-restore-TIME, then restore.",
        ),
    ] = False,
    as_json: Json = False,
    config: Config = "",
) -> None:
    """Restore a backup into the directories that the configuration names.

    Stop the daemon first. If this host has no configuration, Steward uses and installs that of
    the backup. Existing configuration files stay unchanged.
    """
    manifest = verify_backup(path)
    if only_check:
        if as_json:
            print_json(manifest)
        else:
            print(f"{path} is complete: {_describe_backup(manifest)}")
        return
    settings = _choose_settings(path, manifest, config)
    with ProgressLine() as progress:
        result = restore_backup(
            path, manifest, settings, force=force, now=utc_now(), show_progress=progress.show
        )
    if as_json:
        print_json(result)
        return
    print(f"Restored {format_count(result.files, 'file')} in {result.state_dir}.")
    if result.aside:
        print(
            f"The former content is in {result.aside}: remove it after you have "
            "checked the restored state."
        )
    for file in result.written:
        print(f"  wrote  {file}")
    for file in result.unchanged:
        print(f"  left   {file}")
    for warning in _list_omitted(manifest, settings):
        output.print_warning(warning)


def _choose_settings(path: str, manifest: BackupManifest, config: str) -> Settings:
    """Return the named configuration, else this host's, else the one in the backup."""
    if config or os.path.exists(DEFAULT_PATH):
        return load_settings(config or DEFAULT_PATH)
    if not manifest.config:
        raise BackupError("the backup contains no configuration: name one with --config", path)
    with tempfile.TemporaryDirectory() as directory:
        config_path = os.path.join(directory, "steward.toml")
        with open(config_path, "wb") as file:
            file.write(read_member(path, f"{CONFIG_PREFIX}{manifest.config.lstrip('/')}"))
        return load_settings(config_path)


def _describe_backup(manifest: BackupManifest) -> str:
    """Describe a backup: files, size, host, time and version."""
    made_at = format_time(manifest.made_at)
    files = format_count(len(manifest.members), "file")
    return (
        f"{files}, {format_size(manifest.total_bytes)}, of {manifest.host} at {made_at}, "
        f"by Steward {manifest.steward}"
    )


def _list_omitted(manifest: BackupManifest, settings: Settings) -> list[str]:
    """Return warnings about data that a backup omits and the site must save itself."""
    warnings = []
    if manifest.ledger:
        warnings.append(
            f"the backup does not contain the ledger: run pg_dump on {manifest.ledger} after "
            "each 'steward backup'"
        )
    if not manifest.trees and settings.files_sinks():
        roots = ", ".join(settings.sink_path(name) for name in settings.files_sinks())
        warnings.append(
            f"the backup does not contain the archived files in {roots}: give --with-archive"
        )
    return warnings
