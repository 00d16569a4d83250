"""myBRC REST API: a server for the plugins that speak it, and a client for a server elsewhere."""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports

if TYPE_CHECKING:
    from steward.extensions.mybrc.answers import Affording, Teller
    from steward.extensions.mybrc.application import Office, make_application
    from steward.extensions.mybrc.balances import Balances
    from steward.extensions.mybrc.outbox import REMOTE_BANK
    from steward.extensions.mybrc.remote import Passing, Remote
    from steward.extensions.mybrc.settings import MybrcSettings
    from steward.extensions.mybrc.users import Doorkeeper, UsersFile, drop_user, set_user
    from steward.extensions.mybrc.wire import RemoteFailed, RemoteRejected, RemoteUnavailable
else:
    __getattr__ = lazy_exports(
        __name__,
        answers=(
            "Affording",
            "Teller",
        ),
        application=(
            "Office",
            "make_application",
        ),
        balances=("Balances",),
        users=(
            "Doorkeeper",
            "UsersFile",
            "drop_user",
            "set_user",
        ),
        wire=(
            "RemoteFailed",
            "RemoteRejected",
            "RemoteUnavailable",
        ),
        remote=(
            "Passing",
            "Remote",
        ),
        outbox=("REMOTE_BANK",),
        settings=("MybrcSettings",),
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
