"""Fixtures of every unit test. They are in another file because mypy knows one conftest only."""

from unit_fixtures import few_descriptors, tmp_path_factory

__all__ = ["few_descriptors", "tmp_path_factory"]
