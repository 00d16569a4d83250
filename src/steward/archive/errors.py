"""Archive errors, and advice for errno values such as ENOSPC or ESTALE.

Every error is one line. :func:`make_archive_unavailable` converts an OSError.
"""

import errno

from steward.core.errors import NotFound, StewardError, Unavailable, UsageError


class ArchiveError(StewardError):
    """Error of an archive; base class of the others."""


class LayoutError(ArchiveError, UsageError):
    """Error: invalid layout in the configuration; ``offender`` is its text."""

    exit_code = 2


class ArchiveUnavailable(ArchiveError, Unavailable):
    """Error: an archive cannot be written or read now; the caller retries, nothing is lost."""


class NotArchived(ArchiveError):
    """Error: a script is not in this archive; ``offender`` is its key."""


class NoMatch(ArchiveError, NotFound):
    """Error: no archived script matches the jobs or users that a request names."""


_ADVICE = {
    errno.ENOSPC: "the disk is full: free space",
    errno.EDQUOT: "the quota is used up: raise it, or free space",
    errno.EROFS: "the file system is mounted read-only: remount it read-write",
    errno.EACCES: "permission denied: let Steward's user write there",
    errno.EPERM: "not permitted: let Steward's user write there",
    errno.EIO: "the disk reports an input/output error: check it",
    errno.ESTALE: "the network file system forgot the directory: check its mount",
    errno.ENOTCONN: "the file system is not connected: mount it again",
    errno.ETIMEDOUT: "the file system does not answer: check its server",
    errno.EHOSTDOWN: "the file system's server is down",
    errno.EMFILE: "too many open files: raise the limit (LimitNOFILE)",
    errno.ENFILE: "the system has too many open files: raise fs.file-max",
    errno.ENOENT: "a directory vanished: check that the file system is mounted",
    errno.ENOTDIR: "a symbolic link or a file has the name of a directory: remove it",
    errno.ELOOP: "a symbolic link is in the path, and Steward follows none: remove it",
}


def make_archive_unavailable(root: str, error: OSError) -> ArchiveUnavailable:
    """Convert an OSError to ArchiveUnavailable, with advice.

    Args:
        root: The archive's root directory.
        error: The error of a call on a file below the root.

    Returns:
        The error to raise: failure, path and advice.
    """
    reason = _ADVICE.get(error.errno or 0) or error.strerror or str(error)
    location = root
    if isinstance(error.filename, str) and error.filename:
        name = error.filename
        location = name if name.startswith("/") else f"{root} ({name!r})"
    return ArchiveUnavailable(f"cannot use archive {location}: {reason}", root)
