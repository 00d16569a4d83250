"""The settings of archives: files sinks, their layouts and limits."""

from typing import Literal

import msgspec

from steward.core.section import Section

Layout = str
"""A preset's name (``default``, ``job_archive``, ``sarchive``, ``sliced``) or a template."""


class SinkSettings(Section, frozen=True, kw_only=True, tag_field="kind", tag=""):
    """[archive.sink.NAME]: one place that scripts are archived to; its ``kind`` says what it is.

    Attributes:
        identity_wait_s: How long a script waits for its job's identity before it is
            archived as unverified, in seconds.
        retention_days: What is older than this is removed; 0 keeps it for ever.
    """

    identity_wait_s: float = 10.0
    retention_days: int = 0

    @property
    def kind(self) -> str:
        """``files``, ``elasticsearch``, ``opensearch`` or ``kafka``."""
        return str(self.__struct_config__.tag)


class LimitSettings(Section, frozen=True, kw_only=True):
    """[archive.sink.NAME.limit.LIMIT]: what users or accounts may keep in a files sink.

    The oldest scripts go first, as by ``retention_days``. Of several limits each holds.

    Attributes:
        users: Whose scripts, by the users' names at submit; everybody's if empty.
        accounts: Only those submitted under these accounts; under any if empty.
        days: What is older than this is removed; 0 keeps it for ever.
        max_bytes: Size, in bytes, that is kept of each user, or of each account where
            ``accounts`` names some; 0 for no limit.
    """

    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    days: int = 0
    max_bytes: int = 0


class FilesSinkSettings(SinkSettings, frozen=True, kw_only=True, tag="files"):
    """[archive.sink.NAME] with kind = "files": a directory tree.

    Attributes:
        path: The tree's root; ``<state_dir>/archive`` if empty.
        layout: A preset's name or a template, see docs/archive.md.
        period: For the preset ``sarchive``: how its directories are cut.
        groups: Unix groups that may read every file.
        groups_file: A file with such groups, one a line, as job_archive's -c took it.
        move_to: A second tree that files are moved on to (a common file system); "" for none.
        move_after_s: How old a file must be, in seconds, before it is moved on.
        compress: ``zstd`` compresses what is filed from now on; ``none`` leaves it as it was.
    """

    path: str = ""
    layout: Layout = "default"
    period: Literal["yearly", "monthly", "daily", "none"] = "yearly"
    groups: tuple[str, ...] = ()
    groups_file: str = ""
    move_to: str = ""
    move_after_s: float = 300.0
    compress: Literal["none", "zstd"] = "none"
    limit: dict[str, LimitSettings] = msgspec.field(default_factory=dict)
