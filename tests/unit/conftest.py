"""Fixtures of all unit tests, in a separate file because mypy accepts one conftest only."""

from unit_fixtures import few_descriptors, no_alarm, tmp_path_factory

__all__ = ["few_descriptors", "no_alarm", "tmp_path_factory"]
