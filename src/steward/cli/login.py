"""``steward login``: a link that opens the pages, for whoever is logged in on this host."""

from steward.cli import output
from steward.cli.asking import Asked, asking_json
from steward.cli.times import show


@asking_json
def app(asked: Asked) -> None:
    """Print a link that opens the pages.

    It logs you in, once, and only for a few minutes: give it to nobody.
    """
    from steward.admin.credentials.requests import LoginRequest

    answer = asked.call("credentials.login", LoginRequest())
    if asked.style.json:
        output.print_json(answer)
        return
    print(answer.url)
    output.note(f"It can be used once, until {show(answer.expires)}.")
