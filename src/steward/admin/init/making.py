"""Makes what a configuration names: files and directories, whose they are to be."""

import os
import stat
import tempfile
from collections.abc import Iterator
from typing import Final

from steward.admin.init.configuration import text_of
from steward.admin.init.errors import SetupError
from steward.admin.init.wishes import Site, Wishes
from steward.capture.settings import SensorSettings
from steward.core.config.file import load
from steward.core.files import replacing
from steward.core.filesystems import network_kind

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
    from steward.admin.plugins.waking import install_trigger

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
