"""Sets of names on disk, which make an export write each script once."""

from steward.archive.export import NameSet


def test_a_name_is_new_once() -> None:
    with NameSet() as names:
        assert "a" not in names
        assert [names.add(name) for name in ("a", "b", "a")] == [True, True, False]
        assert "a" in names
        assert "c" not in names
        assert len(names) == 2
