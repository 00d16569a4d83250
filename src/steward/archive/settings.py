"""Archive settings: sections ``[archive.sink.NAME]``, their layouts, limits and retention.

:class:`FilesSinkSettings` configures a files sink; the settings of other kinds derive from
:class:`SinkSettings` in their extensions.
"""

from typing import Final, Literal

import msgspec

from steward.core.section import Section

IDENTITY_WAIT_S: Final = 10.0
"""Longest time a script waits for its job's identity before it is archived as unverified."""
Layout = str
"""Name of a preset, such as ``default`` or ``sarchive-monthly``, or a template."""


class SinkSettings(Section, frozen=True, kw_only=True, tag_field="kind", tag=""):
    """[archive.sink.NAME]: one sink, where scripts are archived; its ``kind`` selects the type.

    Attributes:
        retention_days: Age in days at which scripts are purged; 0 keeps them forever.
        environments: Whether the sink stores environments, if ``[archive] environments`` does.
    """

    retention_days: int = 0
    environments: bool = True

    @property
    def kind(self) -> str:
        """Return the kind: ``files``, ``elasticsearch``, ``opensearch`` or ``kafka``."""
        return str(self.__struct_config__.tag)


class LimitSettings(Section, frozen=True, kw_only=True):
    """[archive.sink.NAME.limit.LIMIT]: retention and quota of users or accounts in a files sink.

    Eviction removes the oldest scripts first. All limits apply.

    Attributes:
        users: User names at submit. Default: all users.
        accounts: Accounts at submit. Default: all accounts.
        days: Age in days at which scripts are purged; 0 keeps them forever.
        max_bytes: Quota in bytes of each user, or of each account if ``accounts`` is set; 0 for
            none.
    """

    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    days: int = 0
    max_bytes: int = 0


class FilesSinkSettings(SinkSettings, frozen=True, kw_only=True, tag="files"):
    """[archive.sink.NAME] with kind = "files": a directory tree.

    Attributes:
        path: Root directory of the tree. Default: ``<state_dir>/archive``.
        layout: Name of a preset, or a template; see docs/archive.md.
        groups: Unix groups that may read every file.
        move_to: Second tree, on a common file system, to which files are moved; "" for none.
        move_after_s: Age in seconds at which a file is moved.
        compress: ``zstd`` compresses new files; ``none`` stores them as they are. Existing files
            are not changed.
    """

    path: str = ""
    layout: Layout = "default"
    groups: tuple[str, ...] = ()
    move_to: str = ""
    move_after_s: float = 300.0
    compress: Literal["none", "zstd"] = "none"
    limit: dict[str, LimitSettings] = msgspec.field(default_factory=dict)
