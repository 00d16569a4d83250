"""The action behind 'steward job': finds the job, what is known of it, and who may see it.

Whose job records somebody may see follows the cluster's PrivateData, as sacct's
rows do; what is as private as a script is left out of the record for others.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from steward.accounting.errors import AccountingError
from steward.accounting.page.array import array_part
from steward.accounting.page.parts import run_part
from steward.accounting.page.shapes import ArrayPart, PageAnswer, PageRequest, RunPart, Waiting
from steward.accounting.page.waiting import gone_on, waiting
from steward.accounting.room import AccountingRoom
from steward.core.access import Asker
from steward.core.errors import Missing, UsageError
from steward.core.lines import Line
from steward.core.moments import micros
from steward.core.records import JobRecord
from steward.core.usage import StepUsage
from steward.jobs import Job, Run, parse
from steward.slurm import WAITING, Outlook, Pending
from steward.slurm.arrays import count

_PRIVATE: Final = (
    *("submit_line", "command", "work_dir", "stdin", "stdout", "stderr"),
    *("comment", "admin_comment", "system_comment", "extra", "container"),
)
"""What is shown only to who may read the job's script."""
_MOST_PARTS: Final = 100


class NoSuchJob(AccountingError, Missing):
    """No job that the asker may see was called so."""


def page(room: AccountingRoom, asker: Asker, request: PageRequest) -> PageAnswer:
    """The page of a job; raises as :meth:`Pages.page`."""
    return Pages(room).page(asker, request)


class Pages:
    """What pages are made from.

    Args:
        room: jobs.db, the settings, and who may see what.
    """

    def __init__(self, room: AccountingRoom) -> None:
        self._settings = room.settings
        self._access = room.access
        self._jobs = room.jobs
        self._zone = room.zone
        self._now = room.now()
        self._now_us = micros(self._now)

    def page(self, asker: Asker, request: PageRequest) -> PageAnswer:
        """The page of a job.

        Raises:
            JobNameError: The text names no job.
            NoSuchJob: There is none, or none that the asker may see.
            UsageError: Several clusters have such a job, or it is no array and was to be
                summed up as one.
        """
        notes = self._settings.accounting.notes
        with self._jobs.snapshot():
            job, others = self._find(asker, request)
            may_read = self._may_read(asker, job)
            answer = PageAnswer(
                job=job.label,
                cluster=job.cluster,
                job_id=job.job_id,
                verified=job.verified,
                record=job.record if may_read else without_private(job.record),
                now=self._now,
                others=tuple(other.first_submit for other in others),
                zone=self._zone(job.cluster),
                hears_nodes=bool(self._settings.nodes.listen or self._settings.receive.listen),
                cpu_low=notes.cpu_low,
                memory_low=notes.memory_low,
                memory_high=notes.memory_high,
            )
            if request.array:
                return msgspec.structs.replace(answer, array=self._array(job))
            answer = msgspec.structs.replace(
                answer,
                parts=self._parts(job, request),
                runs=self._runs(job, request, may_read=may_read),
            )
        found = self._waiting(asker, job)
        if isinstance(found, Outlook):
            return gone_on(answer, found)
        return msgspec.structs.replace(answer, waiting=found)

    def _find(self, asker: Asker, request: PageRequest) -> tuple[Job, list[Job]]:
        text, cluster = request.job, request.cluster
        seen = [
            job
            for job in self._jobs.find(text, cluster)
            if self._access.may_see_job(asker, job.cluster, job.record.uid, job.record.account)
        ]
        if not seen:
            where = f" on cluster {cluster}" if cluster else ""
            raise NoSuchJob(f"no job {text} is known{where}, or none that you may see", text)
        clusters = sorted({job.cluster for job in seen})
        if len(clusters) > 1:
            raise UsageError(
                f"clusters {', '.join(clusters)} each have a job {text}: name one with --cluster",
                text,
            )
        return seen[0], [job for job in seen[1:] if job.job_id == seen[0].job_id]

    def _may_read(self, asker: Asker, job: Job) -> bool:
        record = job.record
        return self._access.may_read_script(
            asker,
            job.cluster,
            uid=record.uid,
            user_at_submit=record.user,
            account=record.account,
        )

    def _parts(self, job: Job, request: PageRequest) -> tuple[str, ...]:
        record = job.record
        if not (record.array_job_id or record.het_job_id) or not parse(request.job).is_whole:
            return ()
        return tuple(part.label for part in self._jobs.parts_of(job)[:_MOST_PARTS])

    def _runs(self, job: Job, request: PageRequest, *, may_read: bool) -> tuple[RunPart, ...]:
        lines = self._jobs.lines_of(job)
        if not may_read:
            lines = [_line_without_private(line) for line in lines]
        launches: dict[int, list[StepUsage]] = {}
        for launch in self._jobs.launches_of(job):
            launches.setdefault(launch.restarts, []).append(launch)
        return tuple(
            self._run(run, _lines_of_run(lines, run), launches.get(run.restarts, ()), request)
            for run in self._jobs.runs_of(job)
            if any(line.restarts == run.restarts and not line.step for line in lines)
        )

    def _run(
        self,
        run: Run,
        lines: Sequence[Line],
        launches: Iterable[StepUsage],
        request: PageRequest,
    ) -> RunPart:
        by_step: dict[str, list[StepUsage]] = {}
        for launch in launches:
            by_step.setdefault(launch.step, []).append(launch)
        whole = [line for line in lines if not line.step and not line.piece_us]
        return run_part(
            whole[-1] if whole else lines[-1],
            [(line, by_step.get(line.step, ())) for line in lines if line.step],
            self._settings.accounting.notes,
            now_us=self._now_us,
            pieces=[line for line in lines if not line.step and line.piece_us],
            suspended_at=run.record.suspended_at,
            tasks=request.tasks,
            nodes=request.nodes,
        )

    def _array(self, job: Job) -> ArrayPart:
        record = job.record
        if not record.array_job_id:
            raise UsageError(
                f"job {job.label} is no array: 'steward job {job.label}' shows it", job
            )
        leader = self._jobs.find(str(record.array_job_id), job.cluster)
        # Of an id that was used again only this array's tasks.
        members = [job, *(one for root in leader[:1] for one in (root, *self._jobs.parts_of(root)))]
        tasks = {one.number: one for one in members if one.record.uid == record.uid}
        waiting = [
            one.record.array_task
            for one in tasks.values()
            if one.record.array_task and not one.record.array_task.isdecimal()
        ]
        lines = [
            line
            for one in tasks.values()
            if one.record.array_task.isdecimal()
            for line in self._jobs.lines_of(one)
            if line.is_latest and not line.step and not line.piece_us
        ]
        return array_part(
            str(record.array_job_id),
            lines,
            self._settings.accounting.notes,
            now_us=self._now_us,
            waiting=",".join(waiting),
            waiting_tasks=sum(count(expression) for expression in waiting),
        )

    def _waiting(self, asker: Asker, job: Job) -> Waiting | Outlook | None:
        if job.record.state not in WAITING or not job.verified:
            return None
        cluster = self._settings.cluster.get(job.cluster)
        asks = cluster is not None and cluster.asks_slurm and not cluster.remote
        pending = Pending(job.cluster, cluster) if asks and cluster is not None else None

        def state_of(job_id: int) -> str:
            for other in self._jobs.find(str(job_id), job.cluster)[:1]:
                record = other.record
                if self._access.may_see_job(asker, job.cluster, record.uid, record.account):
                    return record.state
            return ""

        may_read = self._may_read(asker, job)
        return waiting(job.record, pending, state_of, may_read=may_read)


def without_private(record: JobRecord) -> JobRecord:
    """A record without what is as private as a script."""
    return msgspec.structs.replace(record, **dict.fromkeys(_PRIVATE, ""))


def _line_without_private(line: Line) -> Line:
    private = {field: "" for field in _PRIVATE if field in Line.__struct_fields__}
    return msgspec.structs.replace(line, **private)


def _lines_of_run(lines: Iterable[Line], run: Run) -> list[Line]:
    return [line for line in lines if line.restarts == run.restarts]
