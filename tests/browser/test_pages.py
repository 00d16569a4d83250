"""Every page in a real browser: permissions, use, and accessibility."""

import json
from collections.abc import Iterator

import pytest
from browser_user import COLOURS, chromium
from job_submission import state_of, wait_until
from playwright.sync_api import expect
from populated_cluster import DEPOSIT, OPERATORS_FORMS, TOKEN, Stage
from web_cluster import CLUSTER, job_site
from web_site import ADMINISTRATOR, OPERATOR

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200)]
EVERYBODYS = (
    *("/", "/jobs", "/accounts", "/cluster", "/events", "/reports"),
    *("/reports/users", "/reports/waits", "/actions"),
)
OPERATORS = ("/rules", "/status", "/status/gaps", "/reports/cluster", "/reports/waste?by=day")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with job_site("") as site, chromium() as browser:
        yield Stage(site, browser)


@pytest.mark.parametrize("colours", COLOURS)
@pytest.mark.parametrize("user", ["ada", OPERATOR])
def test_every_page_is_there_without_hindrance(stage: Stage, user: str, colours: str) -> None:
    person = stage.person(user, color_scheme=colours)
    paths = (*EVERYBODYS, *stage.pages, *(OPERATORS if user == OPERATOR else ()))
    person.assert_no_hindrance(paths)
    person.close()


def test_a_narrow_window_scrolls_down_and_not_to_the_side(stage: Stage) -> None:
    person = stage.person("ada", viewport={"width": 380, "height": 700})
    page = person.page
    for path in (*EVERYBODYS, *stage.pages):
        person.open(path)
        wide = page.evaluate(
            "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        widest = "() => [...document.querySelectorAll('main *')].filter(one => "
        widest += "one.getBoundingClientRect().right > innerWidth && !one.closest('.scroll'))"
        widest += ".map(one => one.outerHTML.slice(0, 120)).slice(0, 5)"
        assert wide <= 1, (path, page.evaluate(widest))
    person.close()


def test_without_scripts_all_is_there(stage: Stage) -> None:
    person = stage.person("ada", java_script_enabled=False)
    page = person.page
    page.goto("/jobs")
    expect(page.get_by_role("link", name=str(stage.waits), exact=True).first).to_be_visible()
    page.get_by_role("link", name="More").first.click()
    expect(page.locator("h1")).to_have_text("Jobs")
    page.goto("/reports/users?since=now-1days")
    page.get_by_role("link", name="Show report").click()
    expect(page.locator("table")).to_be_visible()
    page.goto(f"/jobs/{CLUSTER}/{stage.worked}")
    expect(page.get_by_text("srun -n2").first).to_be_visible()
    person.close()


def test_the_keyboard_goes_everywhere(stage: Stage) -> None:
    person = stage.person("ada")
    page = person.page
    person.open("/jobs")
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("() => location.hash") == "#main"
    seen = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("() => document.activeElement.outerHTML.slice(0, 80)"))
    assert len(seen) >= 10
    person.close()


def test_the_endless_list_keeps_ones_place(stage: Stage) -> None:
    person = stage.person("ada")
    page = person.page
    person.open("/jobs")
    first = page.locator("table.jobs tbody tr").count()
    page.keyboard.press("End")
    page.mouse.wheel(0, 20_000)
    expect(page.get_by_role("link", name=str(stage.worked), exact=True)).to_be_visible()
    assert page.locator("table.jobs tbody tr").count() > first
    page.get_by_role("link", name=str(stage.worked), exact=True).click()
    page.locator("h1").filter(has_text=str(stage.worked)).wait_for()
    page.go_back()
    expect(page.get_by_role("link", name=str(stage.worked), exact=True)).to_be_in_viewport()
    person.close()


def test_a_job_of_ones_own_is_cancelled(stage: Stage) -> None:
    job = stage.site.submit("sleep 100", job_name="oops", begin="now+1days")
    stage.site.until(job, "PENDING")
    person = stage.person("ada")
    person.page.on("dialog", lambda dialog: dialog.accept())
    person.open(f"/jobs/{CLUSTER}/{job}")
    person.page.get_by_role("button", name="Cancel").click()
    stage.site.until(job, "CANCELLED")
    person.close()
    assert person.troubles == []


def test_nobody_sees_what_is_anothers(stage: Stage) -> None:
    person = stage.person("grace")
    page = person.page
    job = f"/jobs/{CLUSTER}/{stage.worked}"
    assert person.open(job) == 200
    assert "srun -n2" not in page.content()
    assert page.get_by_role("button", name="Cancel").count() == 0
    for path in (f"{job}/script", f"{job}/environment", f"{job}/compare?with={stage.failed}"):
        person.open(path)
        assert "srun -n2" not in page.content(), path
        assert TOKEN not in page.content(), path
    for path in ("/status", "/rules", "/accounts/chemistry"):
        assert person.open(path) in (403, 404), path
    # A form made by hand, with a token of her own page, changes nothing either.
    person.send_by_hand(
        (
            (f"/jobs/{CLUSTER}/{stage.waits}/cancel", {}),
            ("/accounts/chemistry/money", DEPOSIT),
            *OPERATORS_FORMS,
        )
    )
    state = stage.site.cluster.run(["scontrol", "show", "node", "node1"]).stdout
    assert "DRAIN" not in state
    # By Slurm itself: what Steward knows of is what the last look at the queue showed.
    assert state_of(stage.site.cluster, stage.waits) == "PENDING"
    balance = stage.site.web.daemon.ask("bank", "balance", "chemistry", "--json").stdout
    assert json.loads(balance)["accounts"][0]["balance"] == 1000 * 10**6
    person.close()


def test_the_owner_of_an_account_sets_a_limit(stage: Stage) -> None:
    person = stage.person("grace")
    page = person.page
    person.open("/accounts/physics")
    page.get_by_role("combobox", name="User").fill("ada")
    page.get_by_role("textbox", name="Limit").fill("321")
    page.get_by_role("button", name="Set limit").click()
    expect(page.get_by_role("cell", name="321.00").first).to_be_visible()
    person.close()
    assert person.troubles == []


def test_an_administrator_drains_a_node_with_a_reason_and_confirms(stage: Stage) -> None:
    person = stage.person(ADMINISTRATOR)
    page = person.page
    person.open("/nodes/box/node3")
    page.get_by_role("link", name="Drain").or_(
        page.get_by_role("button", name="Drain")
    ).first.click()
    page.get_by_role("textbox", name="Reason").fill("fan")
    page.get_by_role("button", name="Preview changes").click()
    shown = stage.site.cluster.run(["scontrol", "show", "node", "node3"]).stdout
    assert "DRAIN" not in shown
    page.get_by_role("button", name="Drain node3").click()
    wait_until(
        lambda: (
            f"fan (steward: {ADMINISTRATOR})"
            in stage.site.cluster.run(["scontrol", "show", "node", "node3"]).stdout
        )
    )
    person.close()


def test_what_happens_is_seen_as_it_happens(stage: Stage) -> None:
    person = stage.person(OPERATOR)
    person.open("/events")
    stage.site.cluster.run(
        ["scontrol", "update", "nodename=node4", "state=drain", "reason=live-and-well"]
    )
    expect(person.page.get_by_text("live-and-well").first).to_be_visible(timeout=60_000)
    person.close()
    assert person.troubles == []


def test_pages_are_small(stage: Stage) -> None:
    person = stage.person("ada")
    sizes: dict[str, int] = {}
    person.page.on(
        "requestfinished",
        lambda request: sizes.__setitem__(
            request.url.removeprefix(stage.site.web.url),
            request.sizes()["responseBodySize"],
        ),
    )
    person.open("/jobs")
    person.close()
    print(sizes)
    # All that a first visit loads, on a slow line: half a second at 1.6 Mbit/s.
    assert sum(sizes.values()) < 100_000
