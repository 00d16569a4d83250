"""The settings of accounting: what nodes report, plugins, the job log, and notes on jobs."""

from steward.core.section import Section


class NotesSettings(Section, frozen=True, kw_only=True):
    """[accounting.notes]: when 'steward job' remarks on something; shares are of 1.

    Attributes:
        least_run_s: Efficiency is not remarked on in a run that was shorter, in seconds; how
            it ended is.
        memory_low: Peak memory below this share of what was allocated is far over-asked.
        memory_high: Peak memory above this share is nearly under-asked.
        cpu_low: CPU efficiency below this share means idle CPUs.
        serial_cpus: A run that kept one CPU busy is serial on many where it had this many.
        time_low: Elapsed time below this share of the limit means that the limit is far off.
        time_high: Elapsed time above this share of the limit means that it is nearly hit.
        imbalance: A task that used this many times the CPU of the mean task, or more.
        failed_within_s: A failure within this time, in seconds, is remarked on.
    """

    least_run_s: float = 60.0
    memory_low: float = 0.25
    memory_high: float = 0.95
    cpu_low: float = 0.5
    serial_cpus: int = 4
    time_low: float = 0.1
    time_high: float = 0.95
    imbalance: float = 2.0
    failed_within_s: float = 60.0


class AccountingSettings(Section, frozen=True, kw_only=True):
    """[accounting]: the accounting plugins, and the job log.

    Attributes:
        type: The plugins by type, with commas between: ``jobacct/log``, ``jobacct/none``, or
            what another package offers (JobAcctType).
        location: Where a plugin writes; ``<state_dir>/joblog`` if empty (JobAcctLoc).
        parameters: What plugins are told, as ``name=value`` with commas between
            (JobAcctParameters).
        close_after_days: Days after its end that a day of the job log is closed.
        hook_timeout_s: How long a plugin's hook may take, in seconds, before it is ended.
        notes: When 'steward job' remarks on something.
    """

    type: str = "jobacct/log"
    location: str = ""
    parameters: str = ""
    close_after_days: int = 3
    hook_timeout_s: float = 60.0
    notes: NotesSettings = NotesSettings()


class MailSettings(Section, frozen=True, kw_only=True):
    """[mail]: how ``steward mail``, as Slurm's MailProg, sends what it wrote.

    Attributes:
        program: What MailProg was before (``/usr/bin/mail``): it is called as Slurm would
            call it, with the longer text. If empty, ``sendmail`` is.
        sendmail: A program that takes a whole message and sends it to whom it names.
        sender: From whom the mail is; the user that slurmctld runs as if empty. Only
            ``sendmail`` is told.
        wait_s: How long the facts from the nodes are waited for, in seconds.
        timeout_s: How long the program that sends may take, in seconds.
    """

    program: str = ""
    sendmail: str = "/usr/sbin/sendmail"
    sender: str = ""
    wait_s: float = 120.0
    timeout_s: float = 60.0
