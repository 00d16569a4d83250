"""slurm.conf contains the requested settings, and no value breaks out of its line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.sandbox import SandboxError, SandboxSpec
from steward.sandbox.configuration import check_slurm_conf, format_slurm_conf


def conf(spec: SandboxSpec) -> list[str]:
    check_slurm_conf(spec)
    return format_slurm_conf(
        spec,
        directory="/srv/box",
        host="here",
        ports=range(20000, 20001 + spec.nodes),
        slurm_user="slurm",
        slurmd_user="root",
        munge_socket="/srv/box/run/munge.socket",
        plugin_dir="",
    ).splitlines()


def test_every_node_has_a_port_of_its_own() -> None:
    nodes = [line for line in conf(SandboxSpec(nodes=3)) if line.startswith("NodeName=")]
    assert [line.split()[0] for line in nodes] == [f"NodeName=node{n}" for n in (1, 2, 3)]
    assert [line.split()[3] for line in nodes] == [f"Port={n}" for n in (20001, 20002, 20003)]


def test_nothing_points_outside_the_directory() -> None:
    paths = [word for line in conf(SandboxSpec()) for word in line.split("=") if word[:1] == "/"]
    assert paths
    assert {path for path in paths if not path.startswith("/srv/box/")} == {"/bin/true"}


def test_options_are_written() -> None:
    spec = SandboxSpec(
        cluster="alpha",
        first_job_id=7,
        max_job_id=9,
        min_job_age_s=2,
        private_data="jobs,users",
        job_requeue=False,
        extra=("DefMemPerNode=5",),
    )
    assert {
        "ClusterName=alpha",
        "FirstJobId=7",
        "MaxJobId=9",
        "MinJobAge=2",
        "PrivateData=jobs,users",
        "JobRequeue=0",
        "DefMemPerNode=5",
    } <= set(conf(spec))


def test_what_was_not_asked_for_is_left_to_slurm() -> None:
    assert not [line for line in conf(SandboxSpec()) if line.startswith(("PrivateD", "MaxJobId"))]


@pytest.mark.parametrize("nodes", [0, -1, 257])
def test_a_number_of_nodes_that_cannot_be_had(nodes: int) -> None:
    with pytest.raises(SandboxError, match="invalid number of nodes"):
        check_slurm_conf(SandboxSpec(nodes=nodes))


@given(st.text(max_size=60))
def test_a_cluster_name_is_one_word_or_refused(name: str) -> None:
    try:
        lines = conf(SandboxSpec(cluster=name))
    except SandboxError:
        assert not (name.isascii() and name.isidentifier() and len(name) <= 40)
        return
    assert lines[0] == f"ClusterName={name}"
    assert len(lines) == len(conf(SandboxSpec()))


@pytest.mark.parametrize("line", ["A=1\nB=2", "A=1\rB=2", "A=1\\", "A=\0"])
def test_a_line_that_is_more_than_one_is_refused(line: str) -> None:
    with pytest.raises(SandboxError, match="use one line"):
        check_slurm_conf(SandboxSpec(extra=(line,)))


def test_a_line_of_plugins_that_is_more_than_one_is_refused() -> None:
    with pytest.raises(SandboxError, match=r"of plugstack\.conf: use one line"):
        check_slurm_conf(SandboxSpec(plugstack=("optional a.so\nrequired b.so",)))


@given(st.text(alphabet=st.characters(max_codepoint=0x2100), max_size=40))
def test_an_extra_line_is_one_line_or_refused(line: str) -> None:
    plain = SandboxSpec()
    try:
        text = conf(SandboxSpec(extra=(line,)))
    except SandboxError:
        return
    assert len(text) <= len(conf(plain)) + 1


def test_submit_plugins_and_a_second_controller_are_written() -> None:
    lines = conf(SandboxSpec(job_submit=("lua", "steward"), backup=True, cluster="box"))
    assert "JobSubmitPlugins=lua,steward" in lines
    hosts = [line for line in lines if line.startswith("SlurmctldHost=")]
    assert len(hosts) == 2
    assert hosts[1].endswith("b(127.0.0.2)")
    assert not [line for line in conf(SandboxSpec()) if line.startswith("JobSubmitPlugins")]


@pytest.mark.parametrize("name", ["lua\nSlurmUser=root", "steward\\"])
def test_a_submit_plugin_is_one_word_or_refused(name: str) -> None:
    with pytest.raises(SandboxError, match=r"of slurm\.conf: use one line"):
        check_slurm_conf(SandboxSpec(job_submit=(name,)))
