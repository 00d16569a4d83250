"""Accounting settings: sections [accounting] and [mail]."""

from steward.core.section import Section


class AccountingSettings(Section, frozen=True, kw_only=True):
    """[accounting]: accounting plugins and the job log.

    Attributes:
        type: Plugins by type, separated by commas: ``jobacct/log``, ``jobacct/none``, or one from
            another package (JobAcctType).
        location: Directory that a plugin writes to; ``<state_dir>/joblog`` if empty (JobAcctLoc).
        parameters: Options of plugins, as ``name=value`` separated by commas (JobAcctParameters).
        close_after_days: Days from the end of a day until that day of the job log is closed.
        hook_timeout_s: Maximum run time of a plugin's hook, in seconds.
    """

    type: str = "jobacct/log"
    location: str = ""
    parameters: str = ""
    close_after_days: int = 3
    hook_timeout_s: float = 60.0


class MailSettings(Section, frozen=True, kw_only=True):
    """[mail]: how ``steward mail``, as Slurm's MailProg, sends mail.

    Attributes:
        program: Program that sends mail. ``sendmail``, ``msmtp`` and ``ssmtp`` get a whole message
            with its recipients. Any other, such as the previous MailProg (``/usr/bin/mail``), gets
            the arguments of a MailProg, and the text on standard input.
        sender: From address, passed to a ``sendmail`` only; if empty, the user of slurmctld.
    """

    program: str = "/usr/sbin/sendmail"
    sender: str = ""
