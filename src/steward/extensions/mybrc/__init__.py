"""myBRC REST API: a server for the plugins that speak it, and a client for a server elsewhere.

Server: ``application`` (routes), ``answers`` (handlers), ``users`` (passwords and tokens). Client:
``outbox`` (queues messages), ``remote`` (sends them), ``balances`` (follows the server's balances).
Both: ``wire``.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr

if TYPE_CHECKING:
    from steward.extensions.mybrc.application import ApiServices, make_application
    from steward.extensions.mybrc.balances import RemoteBalances
    from steward.extensions.mybrc.outbox import REMOTE_BANK
    from steward.extensions.mybrc.remote import MybrcClient, OutboxSender
    from steward.extensions.mybrc.services import JobRegistry, SubmitChecks
    from steward.extensions.mybrc.settings import MybrcSettings
    from steward.extensions.mybrc.users import TokenAuthority, UsersFile, remove_user, set_user
    from steward.extensions.mybrc.wire import RemoteFailed, RemoteRejected, RemoteUnavailable
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        services=(
            "SubmitChecks",
            "JobRegistry",
        ),
        application=(
            "ApiServices",
            "make_application",
        ),
        balances=("RemoteBalances",),
        users=(
            "TokenAuthority",
            "UsersFile",
            "remove_user",
            "set_user",
        ),
        wire=(
            "RemoteFailed",
            "RemoteRejected",
            "RemoteUnavailable",
        ),
        remote=(
            "OutboxSender",
            "MybrcClient",
        ),
        outbox=("REMOTE_BANK",),
        settings=("MybrcSettings",),
    )

__all__ = [
    "REMOTE_BANK",
    "ApiServices",
    "JobRegistry",
    "MybrcClient",
    "MybrcSettings",
    "OutboxSender",
    "RemoteBalances",
    "RemoteFailed",
    "RemoteRejected",
    "RemoteUnavailable",
    "SubmitChecks",
    "TokenAuthority",
    "UsersFile",
    "make_application",
    "remove_user",
    "set_user",
]
