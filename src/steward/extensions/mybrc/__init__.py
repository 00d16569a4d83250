"""The myBRC REST API, served to the plugins that speak it, and spoken to a server elsewhere."""

from typing import TYPE_CHECKING

from steward.core.offered import offered

if TYPE_CHECKING:
    from steward.extensions.mybrc.affording import Affording
    from steward.extensions.mybrc.application import Office, make_application
    from steward.extensions.mybrc.balances import Balances
    from steward.extensions.mybrc.doorkeeper import Doorkeeper, UsersFile
    from steward.extensions.mybrc.errors import RemoteFailed, RemoteRejected, RemoteUnavailable
    from steward.extensions.mybrc.passing import Passing, Remote
    from steward.extensions.mybrc.relaying import REMOTE_BANK
    from steward.extensions.mybrc.settings import MybrcSettings
    from steward.extensions.mybrc.telling import Teller
    from steward.extensions.mybrc.users_file import drop_user, set_user
else:
    __getattr__ = offered(
        __name__,
        affording=("Affording",),
        application=("Office", "make_application"),
        balances=("Balances",),
        doorkeeper=("Doorkeeper", "UsersFile"),
        errors=("RemoteFailed", "RemoteRejected", "RemoteUnavailable"),
        passing=("Passing", "Remote"),
        relaying=("REMOTE_BANK",),
        settings=("MybrcSettings",),
        telling=("Teller",),
        users_file=("drop_user", "set_user"),
    )

__all__ = [
    "REMOTE_BANK",
    "Affording",
    "Balances",
    "Doorkeeper",
    "MybrcSettings",
    "Office",
    "Passing",
    "Remote",
    "RemoteFailed",
    "RemoteRejected",
    "RemoteUnavailable",
    "Teller",
    "UsersFile",
    "drop_user",
    "make_application",
    "set_user",
]
