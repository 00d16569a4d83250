"""The bank in the demo: the submit plugin in slurmctld, an account with little, and its books.

All of it is left out where it cannot be had (no compiler, no headers, no root), and the
demo says so and goes on.
"""

import glob
import json
import shutil
from typing import Final

from steward.bank.asking_upkeep import CheckAnswer
from steward.core.errors import StewardError
from steward.demo.cast import Submission
from steward.sandbox import Sandbox

PLUGIN_DIRS: Final = ("{directory}/etc",)
CONTROLLER_ENV: Final = {"STEWARD_GATE_CONF": "{directory}/steward/gate.conf"}
LIBRARY: Final = "job_submit_steward.so"
ACCOUNT: Final = "chemistry"
REFUSED: Final = 1
"""What sbatch ends with when it is refused."""

_PAID: Final = """\
#!/bin/bash
#SBATCH --job-name=paid
#SBATCH --ntasks=2
#SBATCH --time=00:05:00
# Four seconds on two CPUs.
sleep 4
"""

PAID: Final = Submission(
    about="four seconds on two CPUs, with a limit of five minutes",
    name="paid",
    author=0,
    script=_PAID.encode(),
    command=("sbatch", f"--account={ACCOUNT}", "paid.sh"),
)
LARGE: Final = ("sbatch", f"--account={ACCOUNT}", "--time=20:00:00", "paid.sh")
"""What the account cannot pay."""

OPENING: Final = (
    "steward bank rate create '*' --weight cpu=100",
    f"steward bank account create {ACCOUNT} --owners {{owner}}",
    f"steward bank deposit {ACCOUNT} 500 --reason 'a grant'",
)
"""How operators open the bank."""


class Till:
    """The bank's part that is in slurmctld.

    Args:
        sandbox: The cluster, brought up with ``PLUGIN_DIRS`` and ``CONTROLLER_ENV``.
        trouble: Why it cannot be had; "" where it may.

    Attributes:
        trouble: Why it is not there; "" where it is.
    """

    def __init__(self, sandbox: Sandbox, trouble: str) -> None:
        self._sandbox = sandbox
        self.trouble = trouble or self._install()

    @property
    def settings(self) -> list[str]:
        """The lines of the configuration file."""
        if self.trouble:
            return []
        own = f"{self._sandbox.directory}/steward"
        return [
            "[bank]",
            "enabled = true",
            'unknown_accounts = "allow"',
            "",
            "[gate]",
            f"socket = {json.dumps(f'{own}/gate.sock')}",
            f"off_switch = {json.dumps(f'{own}/gate.off')}",
            f"plugin_conf = {json.dumps(f'{own}/gate.conf')}",
            "",
        ]

    def _install(self) -> str:
        """Have slurmctld ask the gate; why that cannot be, or ""."""
        directory = self._sandbox.directory
        found = glob.glob(f"{glob.escape(directory)}/lib/*/{LIBRARY}")
        if not found:
            return f"{LIBRARY} was not built"
        try:
            shutil.copy(found[0], f"{directory}/etc/{LIBRARY}")
            self._sandbox.configure("JobSubmitPlugins=steward")
            self._sandbox.run(["scontrol", "reconfigure"])
        except (OSError, StewardError) as error:
            return str(error)
        return ""


def is_proved(answer: CheckAnswer) -> bool:
    """Whether a look at the books found all as it should be, and looked at the holds, too."""
    return not answer.findings and answer.holds is not None
