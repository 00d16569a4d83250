"""The plugin jobacct/none: does nothing, for sites that want no plugin at all."""

from steward.extensions.jobacct_plugins.api import JobAcctPlugin


class NonePlugin(JobAcctPlugin):
    """Does nothing."""

    plugin_name = "No job accounting plugin"
    plugin_type = "jobacct/none"
