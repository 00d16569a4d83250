"""Action behind ``steward job``: it chooses the job, checks permissions and returns the page."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import accounting
from harness.accounting import START
from harness.site import ADA, BELA, ROOT, Site
from steward.accounting.job_page.page import NoSuchJob
from steward.accounting.job_page.pending_reasons import apply_new_state
from steward.cli.charts import ASCII, render_plain
from steward.cli.job import layout_reply
from steward.core.access import ClusterRoles
from steward.core.errors import UsageError
from steward.slurm import PendingStatus


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = accounting.make_site(tmp_path)
    yield site
    site.close()


def test_a_job_with_its_steps(site: Site) -> None:
    accounting.add_run(site)
    accounting.add_launch(site, step="batch", cpu_s=(1.0,), peak_bytes=2**20)
    accounting.add_launch(site, cpu_s=(1000.0, 200.0), peak_bytes=1024**3)
    answer = site.ask("accounting.job", job="7")
    (run,) = answer.runs
    assert [step.line.step for step in run.steps] == ["batch", "0"]
    assert run.efficiency.cpu == pytest.approx(1201 / 2400)
    assert run.efficiency.memory == 0.25
    assert run.efficiency.memory_node == "n1"
    assert not run.efficiency.at_least
    assert [task.cpu_s for task in run.steps[1].tasks] == [1000.0, 200.0]
    assert run.steps[1].nodes[0].peak_bytes == 1024**3
    assert answer.hears_nodes
    assert "Tasks of step 0" in render_plain(layout_reply(answer, ASCII))


def test_all_runs_of_a_requeued_job(site: Site) -> None:
    accounting.add_run(site, state="NODE_FAIL", failed_node="n1")
    again = START + timedelta(minutes=20)
    accounting.add_launch(site, cpu_s=(5.0,))
    accounting.add_run(
        site,
        restarts=1,
        submit=again,
        eligible=again,
        start=again,
        end=again + timedelta(minutes=10),
    )
    accounting.add_launch(site, at=again + timedelta(seconds=1), cpu_s=(50.0,))
    answer = site.ask("accounting.job", job="7")
    assert [run.line.state for run in answer.runs] == ["NODE_FAIL", "COMPLETED"]
    assert [run.efficiency.cpu_used_s for run in answer.runs] == [5.0, 50.0]
    assert [note.kind for note in answer.runs[0].notes][:1] == ["node-fail"]
    text = render_plain(layout_reply(answer, ASCII))
    assert text.index("Run 1 of 2") < text.index("Run 2 of 2")


def test_an_array(site: Site) -> None:
    for task in range(4):
        state = "FAILED" if task == 2 else "COMPLETED"
        accounting.add_run(
            site,
            20 + task,
            array_job_id=20,
            array_task=str(task),
            state=state,
            exit_code=int(task == 2),
        )
        accounting.add_launch(site, 20 + task, cpu_s=(100.0 * task + 1,))
    answer = site.ask("accounting.job", job="20", array=True)
    assert answer.array is not None
    assert answer.array.states == {"COMPLETED": 3, "FAILED": 1}
    assert answer.array.worst[0].job == "20_2"
    assert answer.array.cpu is not None
    assert answer.array.cpu.count == 4
    # Of one of its tasks the sum is the same.
    assert site.ask("accounting.job", job="20_3", array=True).array == answer.array
    assert set(site.ask("accounting.job", job="20").components) == {"20_1", "20_2", "20_3"}
    assert site.ask("accounting.job", job="20_3").components == ()
    accounting.add_run(site, 7)
    with pytest.raises(UsageError, match="is not an array"):
        site.ask("accounting.job", job="7", array=True)


def test_who_may_see_it(site: Site) -> None:
    accounting.add_run(site)
    assert site.ask("accounting.job", ADA, job="7").record.submit_line == "sbatch secret.sh"
    assert site.ask("accounting.job", ROOT, job="7").record.submit_line == "sbatch secret.sh"
    with pytest.raises(NoSuchJob):
        site.ask("accounting.job", BELA, job="7")
    with pytest.raises(NoSuchJob):
        site.ask("accounting.job", BELA, job="7", array=True)


def test_where_jobs_are_public_what_is_private_is_left_out(tmp_path: Path) -> None:
    site = accounting.make_site(tmp_path)
    site.standing = ClusterRoles()
    accounting.add_run(site, comment="hush", work_dir="/home/ada/secret")
    accounting.add_launch(site)
    answer = site.ask("accounting.job", BELA, job="7")
    text = render_plain(layout_reply(answer, ASCII))
    assert answer.runs[0].line.submit_line == ""
    for private in ("secret", "hush"):
        assert private not in text
        assert private not in repr(answer)
    site.close()


def test_a_job_that_waits_where_slurm_is_not_asked(site: Site) -> None:
    accounting.add_run(site, state="PENDING", reason="Priority", start=None, end=None, nodelist="")
    answer = site.ask("accounting.job", job="7")
    assert answer.waiting is not None
    assert answer.waiting.reason == "Priority"
    assert "higher priority" in render_plain(layout_reply(answer, ASCII))


def test_a_job_that_was_refused_says_why_and_not_how_it_ended(site: Site) -> None:
    refused: dict[str, Any] = {
        "exit_code": 0,
        "exit_signal": 1,
        "reason": "BadConstraints",
        "nodelist": "",
    }
    accounting.add_run(site, state="FAILED", start=START, end=START, **refused)
    answer = site.ask("accounting.job", job="7")
    assert (answer.record.exit_code, answer.record.exit_signal) == (1, 0)
    text = render_plain(layout_reply(answer, ASCII))
    assert "FAILED before it started. No node satisfies the request" in text
    assert "(BadConstraints)" in text
    assert "SIGHUP" not in text
    assert "Efficiency" not in text


def test_a_job_that_slurm_has_started_meanwhile_is_running(site: Site) -> None:
    accounting.add_run(site, state="PENDING", start=None, end=None, nodelist="")
    before = site.ask("accounting.job", job="7")
    started = before.now - timedelta(seconds=3)
    told = PendingStatus(
        reason="None", state="RUNNING", expected_start=started, expected_nodes="n7"
    )
    answer = apply_new_state(msgspec.structs.replace(before, waiting=None), told)
    assert (answer.record.state, answer.record.nodelist, answer.ahead) == ("RUNNING", "n7", True)
    assert answer.runs[-1].efficiency.elapsed_s == 3
    text = render_plain(layout_reply(answer, ASCII))
    assert "  RUNNING\n" in text
    assert "has run 3 s" in text
    # What else became of it is told, whatever that is.
    assert (
        apply_new_state(before, PendingStatus(reason="", state="COMPLETED")).record.state
        == "COMPLETED"
    )


def test_no_job(site: Site) -> None:
    accounting.add_run(site)
    with pytest.raises(NoSuchJob, match="unknown job 8"):
        site.ask("accounting.job", job="8")
    with pytest.raises(UsageError):
        site.ask("accounting.job", job="7; rm")


def test_a_run_of_which_no_node_has_told(site: Site) -> None:
    accounting.add_run(site)
    text = render_plain(layout_reply(site.ask("accounting.job", job="7"), ASCII))
    assert "No node reported on the steps of this job" in text
