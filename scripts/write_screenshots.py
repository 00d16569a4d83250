"""Takes the pictures in docs/images: pages of a real cluster, in a real browser.

Run it as root with the tests' directories in PYTHONPATH, as ``make docs`` does; it
needs what ``scripts/setup.sh web browser slurm`` installs.
"""

from pathlib import Path
from typing import Final

from browser_user import Person, chromium
from populated_cluster import Stage
from web_cluster import CLUSTER, job_site
from web_site import OPERATOR

IMAGES: Final = Path(__file__).resolve().parent.parent / "docs" / "images"
_SIZE: Final = {"width": 1000, "height": 640}


def take(person: Person, name: str, path: str) -> None:
    """Take a picture of the part of a page that is seen first."""
    person.open(path)
    person.page.wait_for_timeout(500)
    person.page.screenshot(path=IMAGES / f"{name}.png")


def main() -> None:
    """Take all of them."""
    IMAGES.mkdir(exist_ok=True)
    with job_site("") as site, chromium() as browser:
        stage = Stage(site, browser, reason="bad DIMM")
        job = f"/jobs/{CLUSTER}/{stage.worked}"
        ada = stage.person("ada", viewport=_SIZE)
        take(ada, "jobs", "/jobs")
        take(ada, "job", job)
        take(ada, "compare", f"{job}/compare?with={stage.failed}")
        take(ada, "user", "/users/ada")
        ada.close()
        grace = stage.person("grace", viewport=_SIZE)
        take(grace, "account", "/accounts/physics")
        grace.close()
        operator = stage.person(OPERATOR, viewport=_SIZE)
        take(operator, "cluster", "/cluster")
        take(operator, "node", f"/nodes/{CLUSTER}/node2")
        take(operator, "events", "/events")
        take(operator, "report", "/reports/users?since=now-1days")
        take(operator, "status", "/status")
        operator.close()


if __name__ == "__main__":
    main()
