"""Fixtures of every unit test. They are in another file because mypy knows one conftest only."""

from quick import tmp_path_factory

__all__ = ["tmp_path_factory"]
