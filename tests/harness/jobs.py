"""Job records: events about jobs, and jobs.db without a Site, for tests of steward.jobs."""

from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from harness.events import at, make_event
from harness.site import Site
from steward.core.config import Settings
from steward.core.events import (
    JOB_END,
    JOB_IDENTITY,
    JOB_SCRIPT,
    JOB_SEEN,
    JOB_STATE,
    Event,
    JobFacts,
    JobIdentity,
    JobScript,
    make_script_key,
)
from steward.core.records import JobRecord
from steward.core.sqlite import open_reader
from steward.jobs import JobsConsumer

OPEN_END = {"COMPLETED", "FAILED", "REQUEUED", "RESIZING", "UNKNOWN"}


def script(job_id: int, seconds: float, *, cluster: str = "c1", **body: Any) -> Event:
    """Return the job.script of a spool entry, ``seconds`` after noon."""
    mtime_ns = int(at(seconds).timestamp()) * 10**9 + round(seconds % 1 * 1000) * 10**6 + 321
    spooled = JobScript(job_id=job_id, spool_mtime_ns=mtime_ns, **body)
    key = make_script_key(job_id, mtime_ns)
    return make_event(JOB_SCRIPT, key, spooled, at(seconds), cluster=cluster, source="spool")


def record(
    job_id: int,
    submit: float,
    state: str = "PENDING",
    *,
    seen: float | None = None,
    end: float | None = None,
    whole: bool = False,
    source: str = "snapshot",
    cluster: str = "c1",
    **fields: Any,
) -> Event:
    """Return the job.seen, job.state or job.end of a state; times are seconds after noon."""
    kind = JOB_SEEN if state == "PENDING" else JOB_END if state in OPEN_END else JOB_STATE
    facts = JobRecord(
        job_id=job_id,
        submit=at(submit),
        state=state,
        end=None if end is None else at(end),
        **{"uid": 1000, "user": "ada", "batch": True, **fields},
    )
    moment = submit + 1 if seen is None else seen
    key = f"{kind}:{job_id}:{submit}:{facts.restarts}:{state}:{moment}:{whole}"
    body = JobFacts(record=facts, whole=whole)
    return make_event(kind, key, body, at(moment), cluster=cluster, source=source)


def open_jobs(site: Site) -> JobsConsumer:
    """Open the consumer of jobs.db with the Site's clock."""
    return JobsConsumer(site.settings, lambda: site.now)


class Books:
    """A JobsConsumer in a separate directory, with the events that it appended."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.path = f"{directory}/jobs.db"
        self.consumer = JobsConsumer(Settings(state_dir=str(directory)))
        self.said: list[Event] = []
        self._position = 0

    def take(self, *events: Event) -> list[JobIdentity]:
        """Apply events as one batch; return the job.identity bodies that this appended."""
        before = len(self.said)
        self._position += len(events)
        self.consumer.apply(events, self._position, self.said.extend)
        return [event.body for event in self.said[before:] if event.kind == JOB_IDENTITY]

    def owner_of(self) -> dict[str, int | None]:
        """Return the uid of each script's last job.identity, by script key."""
        return {event.body.script_key: event.body.record.uid for event in self.identities()}

    def identities(self) -> list[Event]:
        """Return every job.identity event that the consumer appended."""
        return [event for event in self.said if event.kind == JOB_IDENTITY]


class Life:
    """One job from submit to end: its owner, and the events about it."""

    def __init__(self, job_id: int, uid: int, begin: int, draw: Any) -> None:
        self.job_id, self.uid, self.begin = job_id, uid, begin
        self.script: Event | None = None
        self.events: list[Event] = []
        if draw(st.booleans()):
            self.script = script(job_id, begin + draw(st.floats(0.0, 1.9)))
            self.events.append(self.script)
        runs = draw(st.integers(1, 3))
        submit = begin
        for restarts in range(runs):
            # Other runs may have no events: the script or the first run makes the job known.
            needed = restarts == 0 and self.script is None
            if needed or draw(st.booleans()):
                self._run(submit, restarts, is_last=restarts == runs - 1, draw=draw)
            submit += 100
        self.end = submit

    def _run(self, submit: int, restarts: int, *, is_last: bool, draw: Any) -> None:
        fields: dict[str, Any] = {"uid": self.uid, "restarts": restarts}
        fields["account"] = f"a{self.uid}"
        fields["user"] = draw(st.sampled_from(["", f"u{self.uid}"]))
        events = [record(self.job_id, submit, seen=submit + 1, **fields)]
        # The name of a uid may resolve late, or to a new name after the user was renamed.
        fields["user"] = draw(st.sampled_from(["", f"u{self.uid}", f"renamed{self.uid}"]))
        events.append(record(self.job_id, submit, "RUNNING", seen=submit + 5, whole=True, **fields))
        final = "COMPLETED" if is_last else "REQUEUED"
        events.append(
            record(self.job_id, submit, final, seen=submit + 50, end=submit + 45, **fields)
        )
        # The second end record that Slurm before 25.11 writes when a job is requeued.
        fields |= {"seen": submit + 60, "end": submit + 58, "source": "jobcomp"}
        events.append(record(self.job_id, submit, final, **fields))
        chosen = draw(st.lists(st.sampled_from(events), unique_by=lambda e: e.key, min_size=1))
        self.events += chosen

    @property
    def is_known(self) -> bool:
        """Return whether any event but the script is about this job."""
        return any(event.kind != JOB_SCRIPT for event in self.events)


@st.composite
def lives(draw: Any) -> list[Life]:
    """Generate up to five jobs, one after the other, that share two job ids."""
    jobs: list[Life] = []
    begin = 0
    for _ in range(draw(st.integers(1, 5))):
        life = Life(draw(st.sampled_from([7, 8])), draw(st.sampled_from([11, 12])), begin, draw)
        jobs.append(life)
        begin = life.end + 100
    return jobs


def read_json(books: Books) -> list[bytes]:
    """Return the JSON that jobs.db stores, as it is stored: compressed or not."""
    columns = {"job": "record", "run": "facts", "launch": "facts", "script": "body"}
    stored: list[bytes] = []
    with closing(open_reader(books.path)) as reader:
        for table, column in columns.items():
            rows = reader.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL")
            stored += [value for (value,) in rows.fetchall()]
    return stored
