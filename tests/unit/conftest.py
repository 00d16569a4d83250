"""Fixtures of all unit tests, in a separate file because mypy accepts one conftest only."""

from unit_fixtures import collect_garbage, no_alarm, tmp_path_factory

__all__ = ["collect_garbage", "no_alarm", "tmp_path_factory"]
