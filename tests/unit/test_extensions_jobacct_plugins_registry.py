"""Accounting plugins: registration, and the syntax of their parameters."""

import pytest

from harness.jobacct import TYPE
from steward.extensions.jobacct_plugins import (
    JobAcctPlugin,
    PluginError,
    parse_parameters,
)
from steward.extensions.jobacct_plugins.api import (
    NonePlugin,
    ParameterError,
    parse_number_parameter,
)
from steward.extensions.jobacct_plugins.registry import (
    find_installed_plugins,
    load_plugin_class,
    parse_plugin_types,
    third_party_types,
)


def test_what_does_nothing_does_nothing() -> None:
    plugin = NonePlugin()
    assert plugin.plugin_type == "jobacct/none"
    plugin.slurmctld_jobacct_init("", "")
    plugin.slurmctld_jobacct_fini()


def test_types_are_found_among_entry_points() -> None:
    assert {"jobacct/none", "jobacct/log"} <= find_installed_plugins().keys()
    assert load_plugin_class("jobacct/none") is NonePlugin
    assert parse_plugin_types("jobacct/log, jobacct/x,jobacct/log") == ("jobacct/log", "jobacct/x")
    assert third_party_types("jobacct/log,jobacct/none,jobacct/x") == ("jobacct/x",)
    with pytest.raises(PluginError, match=r"jobacct/nothing.*jobacct/none"):
        load_plugin_class("jobacct/nothing")


def test_what_is_no_plugin_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    from steward.extensions.jobacct_plugins import registry

    class Entry:
        value = "m:C"

        def __init__(self, found: object) -> None:
            self._found = found

        def load(self) -> object:
            if isinstance(self._found, BaseException):
                raise self._found
            return self._found

    class Wrong(JobAcctPlugin):
        plugin_type = "jobacct/wrong"

    class Later(JobAcctPlugin):
        plugin_type = TYPE
        api_version = 9

    for found, why in [
        (SystemExit(1), "cannot import"),
        (int, "not a subclass"),
        (Wrong, "registered as"),
        (Later, "version 9"),
    ]:
        monkeypatch.setattr(registry, "find_entry_point", lambda _, found=found: Entry(found))
        with pytest.raises(PluginError, match=why):
            load_plugin_class(TYPE)


def test_parameters_are_as_slurm_has_them() -> None:
    assert parse_parameters("Frequency=30, MaxSendRetries=3,,x=a=b") == {
        "Frequency": "30",
        "MaxSendRetries": "3",
        "x": "a=b",
    }
    assert parse_number_parameter("frequency=30", "Frequency", 1) == 30
    assert parse_number_parameter("", "Frequency", 1) == 1
    for wrong in ("a", "=1", "a=1,A=2"):
        with pytest.raises(ParameterError):
            parse_parameters(wrong)
    for wrong in ("a=", "a=-1", "a=1.5", "a=²"):
        with pytest.raises(ParameterError):
            parse_number_parameter(wrong, "a", 1)
