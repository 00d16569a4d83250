"""Entry points of installed packages: errors name broken and duplicate ones, others work."""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from steward.core.config.reader import ConfigError, load_settings
from steward.core.errors import StewardError
from steward.core.extensions import list_offers, load_offer

GROUP = "steward.settings_check"


def offer(monkeypatch: pytest.MonkeyPatch, *values: str, name: str = "layout") -> None:
    """Replace the entry points of installed packages by these objects."""
    entries = EntryPoints(EntryPoint(name, value, GROUP) for value in values)
    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda *, group: entries.select(group=group)
    )


def test_two_packages_that_offer_one_name_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, "ours:check", "ours:check")
    assert list(list_offers(GROUP)) == ["layout"]
    offer(monkeypatch, "ours:check", "theirs:check")
    with pytest.raises(StewardError, match="ours:check and theirs:check both provide"):
        list_offers(GROUP)


def test_whatever_an_import_does_the_offer_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_offer.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    for value, why in (("broken_offer:check", "division by zero"), ("no_such:check", "no_such")):
        offer(monkeypatch, value)
        with pytest.raises(
            StewardError, match=rf"cannot import layout \({value}\) of {GROUP}: .*{why}"
        ):
            load_offer(GROUP, "layout")


def test_a_check_that_is_not_installed_is_a_problem_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "steward.toml"
    file.write_text('[cluster.c1]\n[archive.sink.a]\nlayout = "sarchive"\n')
    load_settings(str(file))
    offer(monkeypatch)
    with pytest.raises(ConfigError, match="no installed package provides 'layout'"):
        load_settings(str(file))
