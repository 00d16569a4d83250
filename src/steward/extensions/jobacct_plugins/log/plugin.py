"""The plugin jobacct/log, as it is listed among the others.

Its hooks do nothing: hooks are called at least once, and a log has each record
once. So the log is written by a consumer of its own, see ``consumer.py``.
"""

from steward.extensions.jobacct_plugins.api import JobAcctPlugin


class LogPlugin(JobAcctPlugin):
    """Stands for the job log."""

    plugin_name = "The job log"
    plugin_type = "jobacct/log"
