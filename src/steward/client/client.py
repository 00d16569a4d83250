"""Client for programs: run any action by name and get a typed answer.

:class:`Client` finds its Steward when it is made: settings, whose files it then reads in this
process, a daemon's socket, or the HTTP API of the web pages. ``ask`` returns an answer, ``stream``
yields the items before it too.
"""

from collections.abc import Iterator
from typing import Any

from steward.client.calls import ask_daemon, find_place
from steward.client.places import ClientPlace, RemoteApi, read_user_api, run_locally
from steward.core.access import get_process_user
from steward.core.actions import Action, ActionError, decode_request
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.daemon.registry import get_action


class Client:
    """Client of one Steward.

    Without arguments it finds Steward as the command line does: by ``STEWARD_URL``, by this
    host's configuration, or by ``/etc/steward/client.toml``.

    Args:
        url: Address of the web pages, to use their API from any host.
        token: API token; by default ``STEWARD_TOKEN``, or the content of
            ``~/.config/steward/token``.
        ca_file: CA certificates that verify the pages' own, instead of the system's.
        socket: Unix socket of a daemon, instead of a url.
        config: Configuration file whose state directory to read, instead of a url.

    Raises:
        UsageError: More than one of them is given, or the one given cannot be used.

    Example:
        >>> client = Client()
        >>> client.ask("bank.balance", accounts=["physics"]).accounts[0].balance
    """

    def __init__(
        self,
        *,
        url: str = "",
        token: str = "",
        ca_file: str = "",
        socket: str = "",
        config: str = "",
    ) -> None:
        if url and (socket or config):
            raise UsageError("url excludes socket and config: give one of them")
        if (token or ca_file) and not url:
            api = read_user_api()
            if api is None:
                raise UsageError("token and ca_file need a url: give it, too")
            url, ca_file = api.url, ca_file or api.ca_file
        self._place: Settings | str | RemoteApi = (
            RemoteApi(url=url, token=token, ca_file=ca_file)
            if url
            else find_place(ClientPlace(socket=socket, config=config))
        )

    def ask(self, name: str, /, *, once: str = "", **fields: Any) -> Any:
        """Run an action and return its answer.

        Args:
            name: Name of the action: ``bank.balance``.
            once: Idempotency key of yours: repeated with it within a day, the request runs
                once. For requests that change something.
            fields: Fields of the action's request.

        Returns:
            A value of the action's answer type; of a stream the last one.

        Raises:
            UsageError: There is no such action or field, or the request is invalid.
            PermissionRefused: Permission denied.
            NotFound: The object does not exist.
            Unavailable: No daemon answers, or a dependency is unavailable now.
            StewardError: Any other failure.
        """
        answer = None
        for item in self.stream(name, once=once, **fields):
            answer = item
        return answer

    def stream(self, name: str, /, *, once: str = "", **fields: Any) -> Iterator[Any]:
        """Run an action; yield the items of a stream, then its answer. Raises as :meth:`ask`."""
        action = _find_action(name)
        request = decode_request(action, fields)
        if isinstance(self._place, Settings):
            return _run_here(self._place, action, request, once)
        return ask_daemon(self._place, action, request, once)


def _find_action(name: str) -> Action:
    try:
        return get_action(name)
    except KeyError:
        raise ActionError(f"unknown action {name!r}", name) from None


def _run_here(settings: Settings, action: Action, request: Any, once: str) -> Iterator[Any]:
    """Run an action in this process, once if an idempotency key is given."""
    from steward.daemon.contexts import make_registry

    registry = make_registry(settings)
    if not once or action.only_reads:
        return run_locally(registry, action, request)
    from steward.client.sockets import decode_replies
    from steward.core.rpc import decode_reply_line
    from steward.daemon.idempotency import IdempotencyStore

    line = IdempotencyStore(settings.state_dir).run_once(
        once,
        get_process_user(),
        action,
        request,
        lambda: registry.call(action.name, get_process_user(), request),
    )
    return decode_replies(action, iter([decode_reply_line(line)]))
