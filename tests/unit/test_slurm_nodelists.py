import pytest

from steward.slurm import NodeListError
from steward.slurm.nodelists import expand_nodelist, fold_nodelist


def test_lists_are_expanded_and_folded() -> None:
    assert expand_nodelist("n[1-3],gpu7") == ["gpu7", "n1", "n2", "n3"]
    assert expand_nodelist("") == []
    assert fold_nodelist(["n2", "n1", "n3", "gpu7"]) in ("n[1-3],gpu7", "gpu7,n[1-3]")
    assert fold_nodelist([]) == ""
    assert expand_nodelist("n[01-03]") == ["n01", "n02", "n03"]


@pytest.mark.parametrize("wrong", ["n[1-", "@all", "n[3-1]", "@*"])
def test_what_is_no_list_is_an_error(wrong: str) -> None:
    with pytest.raises(NodeListError):
        expand_nodelist(wrong)


@pytest.mark.parametrize(
    "nodelist",
    ["n[1-999999999]", "n[1-99999999999]", "a[1-9999]b[1-9999]", "n[1-60000],m[1-60000]"],
)
def test_a_short_text_does_not_mean_billions(nodelist: str) -> None:
    with pytest.raises(NodeListError, match="more than 100000"):
        expand_nodelist(nodelist)


def test_as_many_as_there_are_on_the_largest_clusters() -> None:
    assert len(expand_nodelist("n[00001-65536]")) == 65536
