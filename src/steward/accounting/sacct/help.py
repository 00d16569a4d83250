"""What sacct tells of itself: its options, and the fields that it can print."""

from typing import Final

from steward.accounting.pending import EXPLANATIONS
from steward.accounting.sacct.fields import OURS, SLURMS
from steward.slurm.states import NAMES

USAGE: Final = "Usage: steward sacct [-S TIME] [-E TIME] [-j JOB,…] [-o FIELD,…] [OPTIONS]\n"

HELP: Final = (
    USAGE
    + """
List jobs and steps with what they used, as Slurm's sacct does.

Which jobs:
  -a, --allusers            Of all users, as far as you may see them.
  -A, --accounts=NAME,…     Charged to these accounts.
      --array               Taken and without effect.
  -C, --constraints=NAME,…  That asked for all of these features.
  -D, --duplicates          Former runs of requeued jobs, too.
  -E, --endtime=TIME        Until then; now if left out.
  -F, --flags=NAME,…        Started so: SchedSubmit, SchedMain, SchedBackfill.
  -g, --gid, --group=NAME,… Of these groups, names or gids.
  -i, --nnodes=N[-N]        On so many nodes.
  -I, --ncpus=N[-N]         On so many CPUs.
  -j, --jobs=JOB,…          These: 123, 123_4, 123_[1-3], 123+1, 123.batch.
  -k, --timelimit-min=TIME  With this time limit; with -K at least this.
  -K, --timelimit-max=TIME  With -k, at most this.
  -L, --allclusters         Of every cluster; --federation means the same.
  -M, --clusters=NAME,…     Of these clusters.
  -N, --nodelist=NODES      That ran on one of these nodes.
      --name=NAME,…         That are called so.
  -q, --qos=NAME,…          Of these QOSes.
  -r, --partition=NAME,…    In these partitions.
  -R, --reason=NAME,…       That waited last for one of these reasons.
  -s, --state=STATE,…       In one of these states then: CD, F, TO, RUNNING …
  -S, --starttime=TIME      Since then; midnight if left out, with -j always, with -s now.
  -u, --uid, --user=NAME,…  Of these users, names or uids.
  -W, --wckeys=NAME,…       Of these wckeys.
      --whole-hetjob=yes|no All components of a heterogeneous job, or just what was named.
  -X, --allocations         Without steps.

Times: 08:00, 11/20, 2026-11-20, 2026-11-20T10:00, today, midnight, noon, now-1day.

What is printed:
  -b, --brief               JobID, State and ExitCode.
  -c, --completion          What a job completion record has, one line a job.
      --delimiter=TEXT      Stands between fields with -p and -P; '|' if left out.
  -e, --helpformat          The fields that there are.
      --expand-patterns     Patterns in StdIn, StdOut and StdErr, such as %j, as values.
  -l, --long                Many fields.
  -n, --noheader            No heading.
      --noconvert           Sizes in the unit that they came in.
  -o, --format=FIELD,…      These fields; %20 behind one is its width, %-20 from the left.
  -p, --parsable            Fields with '|' behind each.
  -P, --parsable2           Fields with '|' between them.
  -T, --truncate            Times cut to the window of time.
      --units=K|M|G|T|P     Sizes in this unit.
      --use-local-uid       UID is what the user's name resolves to on this host.

What else comes out:
  -B, --batch-script        The scripts of the jobs named with -j.
      --env-vars            The environments that they were submitted with.
      --json, --yaml        Everything that is known, for programs.
      --parquet=FILE        All columns of the lines, as a Parquet file.

Where from:
      --config=FILE         The configuration file.
  -f, --file=FILE           A job log, a directory of it, or Parquet.
      --socket=PATH         The socket of a daemon to ask.

      --autocomplete=TEXT   The long options that begin with this.
  -h, --help                This page.
      --helpreason          The reasons that -R knows; others are taken.
      --helpstate           The states that -s knows.
  -U, --usage               One line of it.
  -v, --verbose             Say which window of time is looked at.
  -V, --version             The version.

SACCT_FORMAT, SACCT_FEDERATION, SACCT_LOCAL, SLURM_TIME_FORMAT and TZ are heeded.
"""
)


def field_list() -> str:
    """The fields that there are, four a line, Slurm's first."""
    return _columns([field.name for field in (*SLURMS, *OURS)], 4, 19)


def state_list() -> str:
    """Return the states of jobs, four a line."""
    return _columns(sorted(NAMES), 4, 19)


def reason_list() -> str:
    """Return the reasons that Steward explains, two a line."""
    return _columns(sorted(EXPLANATIONS), 2, 39)


def _columns(names: list[str], count: int, width: int) -> str:
    rows = [names[at : at + count] for at in range(0, len(names), count)]
    return "".join(" ".join(f"{name:<{width}}" for name in row) + "\n" for row in rows)
