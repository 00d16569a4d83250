import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steward.bank.estimate import find_script, parse_jobs, parse_options
from steward.bank.records import JobRequest
from steward.core.errors import UsageError


def parsed(line: str, script: str = "") -> JobRequest:
    return parse_options(line.split(), script, uid=7)


def test_the_short_and_the_long_of_it() -> None:
    long = "--ntasks=4 --cpus-per-task 2 --nodes=2-3 --time=1-2 --partition=a,b --hold"
    assert parsed(long) == parsed("-n4 -c 2 -N2-3 -t1-2 -p a,b -H")
    assert parsed("-Hn4") == parsed("--hold --ntasks=4")
    assert parsed("--ntasks-per-n=4 --cpus-per-task=2 --part=x") == parsed(
        "--ntasks-per-node=4 -c2 -p x"
    )


def test_what_sbatch_reckons_of_what_is_not_said() -> None:
    assert (parsed("").min_cpus, parsed("").num_tasks, parsed("").min_nodes) == (1, None, None)
    assert parsed("-n4 -c3").min_cpus == 12
    assert (parsed("-N3").min_cpus, parsed("-N3").num_tasks) == (3, None)
    assert (parsed("-N3").min_nodes, parsed("-N3").max_nodes) == (3, 3)
    assert (parsed("-N2-5").min_nodes, parsed("-N2-5").max_nodes) == (2, 5)
    assert parsed("-N2 --ntasks-per-node=3").num_tasks == 6
    assert parsed("-n8 -O").min_cpus == 1
    assert parsed("--hint=nomultithread").threads_per_core == 1
    assert parsed("-B 2:4:1 -N2").min_cpus == 16


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        *(("90", 90), ("1:30", 2), ("2:00:00", 120), ("1-0", 1440), ("1-2:30", 1590)),
        *(("1-0:0:1", 1441), ("UNLIMITED", -1), ("infinite", -1), ("-1", -1), ("0", 0)),
    ],
)
def test_times(text: str, minutes: int) -> None:
    assert parse_options(["--time", text]).time_limit_min == minutes


@pytest.mark.parametrize(
    ("text", "mib"),
    [("500", 500), ("4G", 4096), ("1025K", 2), ("1T", 1024**2), ("2GB", 2048), ("0", 0)],
)
def test_memory(text: str, mib: int) -> None:
    assert parsed(f"--mem={text}").pn_min_memory_mib == mib
    assert parsed(f"--mem-per-cpu={text}").mem_per_cpu_mib == mib


def test_gpus_and_their_like() -> None:
    job = parsed(
        "-G a100:2,v100:1 --gpus-per-node=3 --gres=gpu:1,shard:4 --gpus-per-task=1 "
        "--gpus-per-socket=2 --cpus-per-gpu=5 --mem-per-gpu=1G --ntasks-per-gpu=2 -L matlab:2"
    )
    assert job.tres_per_job == "gres/gpu:a100:2,gres/gpu:v100:1"
    assert job.tres_per_node == "gres/gpu:1,gres/shard:4,gres/gpu:3"
    assert (job.tres_per_task, job.tres_per_socket) == ("gres/gpu:1", "gres/gpu:2")
    assert (job.cpus_per_tres, job.mem_per_tres) == ("gres/gpu:5", "gres/gpu:1024")
    assert (job.ntasks_per_tres, job.licenses) == (2, "matlab:2")
    assert not parsed("--gres=none").tres_per_node


def test_everything_else_that_decides_on_a_price() -> None:
    job = parsed(
        "-A Phys -q high -a 0-9%2 -w n[1-2] -C fast --reservation=r --exclusive -S 2 --mincpus=3 "
        "--ntasks-per-core=1 --ntasks-per-socket=2 --time-min=5"
    )
    assert (job.uid, job.account, job.qos, job.array) == (7, "Phys", "high", "0-9%2")
    assert (job.req_nodes, job.features, job.reservation) == ("n[1-2]", "fast", "r")
    assert (job.exclusive, job.core_spec, job.pn_min_cpus) == (True, 2, 3)
    assert (job.ntasks_per_core, job.ntasks_per_socket, job.time_min_min) == (1, 2, 5)
    assert not parsed("--exclusive=user").exclusive


def test_the_lines_of_a_script_come_after_the_command_line() -> None:
    script = (
        "#!/bin/sh\n#SBATCH -n 4 --time=10  # ten minutes\n\n# more\n#SBATCH -J 'a name'\n"
        "echo hello\n#SBATCH -n 99\n"
    )
    assert (parsed("", script).num_tasks, parsed("", script).time_limit_min) == (4, 10)
    assert parsed("-n2", script).num_tasks == 2


def test_what_a_quote_does_not_depend_on_is_passed_over() -> None:
    words = "-J x -o out -D /tmp --mail-type=ALL --requeue --get-user-env --nice=5 -k --export ALL"
    assert parsed(f"-n4 {words} job.sh --ntasks=9 --unknown") == parsed("-n4")


def test_heterogeneous_jobs_are_a_description_for_each_part() -> None:
    first, second = parse_jobs(["-n4", ":", "-n2", "-c3", "job.sh", "-n9"])
    assert (first.num_tasks, second.num_tasks, second.min_cpus) == (4, 2, 6)
    assert first.het
    script = "#SBATCH -n3 -t5\n#SBATCH hetjob\n#SBATCH -n6\n"
    first, second = parse_jobs(["-n4", ":", "-t9"], script)
    assert (first.num_tasks, first.time_limit_min) == (4, 5)
    assert (second.num_tasks, second.time_limit_min) == (6, 9)
    with pytest.raises(UsageError, match="heterogeneous"):
        parse_options([], script)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        *(("--nonsense=3", "--nonsense"), ("-Z", "-Z"), ("-HZ", "-Z"), ("--n=3", "--n:")),
        *(("-n", "requires a value"), ("-n x", "whole number"), ("-n ٣", "whole number")),
        *(("-n 9999999999", "whole number"), ("-N x", "a number of nodes"), ("--mem=x", "memory")),
        *(("-t soon", "give minutes"), ("-t 1:2:3:4", "give minutes"), ("-M a,b", "one cluster")),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parsed(line)


def test_a_directive_that_cannot_be_read() -> None:
    with pytest.raises(UsageError, match="cannot parse"):
        parsed("", "#SBATCH -J 'open\n")


@pytest.mark.parametrize(
    ("line", "script"),
    [
        *(("", ""), ("-n4", ""), ("-n 4 job.sh", "job.sh"), ("-Hn 4 job.sh -n 9", "job.sh")),
        *(("--time=5 -J job.sh", ""), ("--wrap true", ""), ("-- job.sh x", "job.sh")),
        *(("job.sh : x", "job.sh"), ("--exclusive job.sh", "job.sh")),
    ],
)
def test_which_word_is_the_script(line: str, script: str) -> None:
    assert find_script(line.split()) == script


words = st.lists(st.text(max_size=12) | st.sampled_from(["-n", "4", "--time", "-N2", ":", "--"]))


@given(words, st.text(max_size=80) | st.text(max_size=40).map(lambda text: f"#SBATCH {text}"))
def test_no_words_upset_it(argv: list[str], script: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_jobs(argv, script)


@pytest.mark.parametrize("value", ["9" * 5000, f"1:{'9' * 5000}", f"{'9' * 5000}-1:2"])
@pytest.mark.parametrize("option", ["--time", "--time-min", "--nodes", "--ntasks", "--mem"])
def test_numbers_of_thousands_of_digits_are_none(option: str, value: str) -> None:
    with pytest.raises(UsageError):
        parse_options([option, value])


@pytest.mark.parametrize(
    "words",
    [
        *("--stepmgr", "--oom-kill-step", "--resv-ports", "--consolidate-segments"),
        *("--spread-segments", "--requeue", "--kill-on-invalid-dep yes", "--mem-update 20@5"),
        *("--oom-kill-step=1", "--resv-ports=2", "--requeue=expedite", "--container-type oci"),
    ],
)
def test_the_script_is_found_behind_options_without_a_value(words: str) -> None:
    assert find_script([*words.split(), "job.sh", "-n9"]) == "job.sh"


def test_other_names_of_options() -> None:
    assert parsed("-N2 --tasks-per-node=4") == parsed("-N2 --ntasks-per-node=4")
    assert parsed("", "#SBATCH --tasks-per-node=4").ntasks_per_node == 4
    assert parsed("--ntasks-per-tres=2").ntasks_per_tres == 2
    assert parsed("--cluster=a -n2") == parsed("--clusters=a -n2")
    assert parsed("-L a:2 --resources=flat:1").licenses == "a:2,flat:1"


def test_an_option_that_sbatch_does_not_have_is_named() -> None:
    with pytest.raises(UsageError, match="unknown sbatch option --no-such-thing"):
        parsed("--no-such-thing")
    with pytest.raises(
        UsageError, match=r"ambiguous sbatch option --ntasks-per: .*--ntasks-per-core"
    ):
        parsed("--ntasks-per=2")
