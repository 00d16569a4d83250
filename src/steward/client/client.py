"""The client for programs: what can be asked by name, with answers of their own types."""

from collections.abc import Iterator
from typing import Any

from steward.client.calls import elsewhere, where
from steward.client.places import Place, Web, local, named_by_user
from steward.core.access import this_user
from steward.core.actions import Action, ActionError, request_of
from steward.core.config import Settings
from steward.core.errors import UsageError
from steward.daemon.registry import action


class Client:
    """Asks one Steward.

    Without arguments it is found as the command line finds it: by ``STEWARD_URL``, by this
    host's configuration, or by ``/etc/steward/client.toml``.

    Args:
        url: Where its pages are, to ask through them from any host.
        token: What lets us in there; by default ``STEWARD_TOKEN``, or what stands in
            ``~/.config/steward/token``.
        ca_file: Certificates that the pages' own is checked against, instead of the system's.
        socket: A daemon's socket, instead.
        config: A configuration file whose state directory is read, instead.

    Raises:
        UsageError: More than one of them is given, or what is given cannot be used.

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
            raise UsageError("a url and a socket or file name different places: give one of them")
        if (token or ca_file) and not url:
            far = named_by_user()
            if far is None:
                raise UsageError("a token and ca_file are for a url: give it, too")
            url, ca_file = far.url, ca_file or far.ca_file
        self._way: Settings | str | Web = (
            Web(url=url, token=token, ca_file=ca_file)
            if url
            else where(Place(socket=socket, config=config))
        )

    def ask(self, name: str, /, *, once: str = "", **fields: Any) -> Any:
        """The answer to a request.

        Args:
            name: The action's: ``bank.balance``.
            once: A word of yours: asked again under it within a day, it is done once. For
                requests that change something.
            fields: Of the action's request.

        Returns:
            A value of the action's answer type; of a stream the last one.

        Raises:
            UsageError: There is no such action or field, or the request makes no sense.
            Refused: You may not.
            Missing: It is not there.
            Unavailable: Nobody answers, or not now.
            StewardError: Whatever else goes wrong.
        """
        answer = None
        for item in self.stream(name, once=once, **fields):
            answer = item
        return answer

    def stream(self, name: str, /, *, once: str = "", **fields: Any) -> Iterator[Any]:
        """The items of a stream, and at last its answer; raises as :meth:`ask`."""
        asked = _action(name)
        request = request_of(asked, fields)
        if isinstance(self._way, Settings):
            return _here(self._way, asked, request, once)
        return elsewhere(self._way, asked, request, once)


def _action(name: str) -> Action:
    try:
        return action(name)
    except KeyError:
        raise ActionError(f"there is no action {name!r}", name) from None


def _here(settings: Settings, asked: Action, request: Any, once: str) -> Iterator[Any]:
    from steward.daemon.contexts import action_registry

    known = action_registry(settings)
    if not once or asked.only_reads:
        return local(known, asked, request)
    from steward.client.sockets import told
    from steward.daemon.idempotency import Repeats
    from steward.daemon.requests import read_reply

    line = Repeats(settings.state_dir).once(
        once, this_user(), asked, request, lambda: known.call(asked.name, this_user(), request)
    )
    return told(asked, iter([read_reply(line)]))
