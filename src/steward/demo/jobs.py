"""Jobs of the demo: batch scripts and submissions, one for each case that an archive must handle.

`list_submissions` lists them: a plain job, a variant of it, an environment with secrets and
non-UTF-8 bytes, an array, a failing job, a script of 1 MB, and an interactive job.
"""

import shlex
from typing import Final

import msgspec

PASSWORD: Final = "correct-horse-battery-staple"  # noqa: S105 - invented, to be looked for on disk
LARGE_SCRIPT_BYTES: Final = 1 << 20
USER_NAMES: Final = ("ada", "bela")
"""Names of the users who submit jobs."""

RELAX: Final = """\
#!/bin/bash
#SBATCH --job-name=relax
#SBATCH --ntasks=2
#SBATCH --time=00:05:00
# Relax the structure before the production run.
module() { echo "module $*"; }
module load gromacs/2024.2

for step in 1 2 3; do
    echo "step $step: emtol=100.0"
done
"""

TRAIN: Final = """\
#!/bin/bash
#SBATCH --job-name=train
# Fit a line through three points.
x=(0 1 2)
y=(1 3 5)
echo "slope $(( (y[2] - y[0]) / (x[2] - x[0]) ))"
"""

SWEEP: Final = """\
#!/bin/bash
#SBATCH --job-name=sweep
#SBATCH --array=1-3
echo "temperature $((280 + 10 * SLURM_ARRAY_TASK_ID)) K"
"""

BROKEN: Final = """\
#!/bin/bash
#SBATCH --job-name=broken
export UPLOAD_TOKEN=0f1e2d3c4b5a6978
cat /no/such/input || exit 3
"""

_BUNDLE_HEAD: Final = """\
#!/bin/bash
#SBATCH --job-name=bundle
# A self-extracting script: what follows the last line is data.
echo "unpacking"
exit 0
"""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One job that the demo submits, with its expected outcome.

    Attributes:
        description: Its special property, in a few words.
        name: Its job name; also the name of its script's file, if it has one.
        user_index: Index of the user who submits it: 0 for the first, 1 for the second.
        script: The batch script; None for an interactive job.
        command: Command that submits it, instead of sbatch with the script.
        env: Environment variables of the submission; surrogates stand for bytes (PEP 383).
        state: The expected final state.
        exit_code: The expected exit code.
        tasks: Number of array tasks; 0 for a job without an array.
    """

    description: str
    name: str
    user_index: int
    script: bytes | None = None
    command: tuple[str, ...] = ()
    env: dict[str, str] = {}
    state: str = "COMPLETED"
    exit_code: int = 0
    tasks: int = 0

    @property
    def filename(self) -> str:
        """Return the name of the script's file."""
        return f"{self.name}.sh"

    @property
    def argv(self) -> tuple[str, ...]:
        """Return the command that submits the job."""
        return self.command or ("sbatch", self.filename)

    @property
    def shell_command(self) -> str:
        """Return the command as a user would type it, with its variables."""
        words = [f"{name}={_quote_for_bash(value)}" for name, value in self.env.items()]
        return " ".join([*words, shlex.join(self.argv)])


def _quote_for_bash(value: str) -> str:
    """Quote a value for bash; bytes that are no text become escapes."""
    if value.isprintable() and value.isascii():
        return shlex.quote(value)
    encoded = value.encode("utf-8", "surrogateescape")
    return "$'" + repr(encoded)[2:-1].replace("'", "\\'") + "'"


def list_submissions() -> tuple[Submission, ...]:
    """Return all jobs of the demo, in order."""
    return (
        Submission(description="a plain job", name="relax", user_index=0, script=RELAX.encode()),
        Submission(
            description="the same with two lines changed",
            name="relax-finer",
            user_index=0,
            script=RELAX.replace("1 2 3", "1 2 3 4 5").replace("100.0", "10.0").encode(),
            command=("sbatch", "--job-name=relax-finer", "relax-finer.sh"),
        ),
        Submission(
            description=(
                "newlines, '=', bytes that are not UTF-8, and two secrets in its environment"
            ),
            name="train",
            user_index=0,
            script=TRAIN.encode(),
            env={
                "NOTE": "two\nlines",
                "FORMULA": "E=m*c=c",
                "SURNAME": "M\udcfcller",
                "DB_PASSWORD": PASSWORD,
                "RESULTS": f"postgresql://ada:{PASSWORD}@db.example.org/results",
            },
        ),
        Submission(
            description="an array", name="sweep", user_index=1, script=SWEEP.encode(), tasks=3
        ),
        Submission(
            description="a job that fails",
            name="broken",
            user_index=1,
            script=BROKEN.encode(),
            state="FAILED",
            exit_code=3,
        ),
        Submission(
            description="a script of 1 MB", name="bundle", user_index=1, script=_make_large_script()
        ),
        Submission(
            description="an interactive job, which has no script",
            name="look",
            user_index=1,
            command=("srun", "--job-name=look", "hostname"),
        ),
    )


def _make_large_script() -> bytes:
    """Return a script of ``LARGE_SCRIPT_BYTES`` bytes, most of which are not text."""
    head = _BUNDLE_HEAD.encode()
    # sbatch rejects NUL and DOS line ends; every other byte is valid in a script.
    data_line = bytes(byte for byte in range(1, 256) if byte != 13)
    return (head + data_line * (LARGE_SCRIPT_BYTES // len(data_line) + 1))[:LARGE_SCRIPT_BYTES]
