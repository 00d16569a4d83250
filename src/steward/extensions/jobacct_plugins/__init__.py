"""Accounting plugins: what they are written against, and the process that calls them."""

from steward.extensions.jobacct_plugins.api import (
    API_VERSION,
    Job,
    JobAcctPlugin,
    Message,
    PluginError,
    Rusage,
    SendFailed,
    Step,
    parse_parameters,
)

__all__ = [
    "API_VERSION",
    "Job",
    "JobAcctPlugin",
    "Message",
    "PluginError",
    "Rusage",
    "SendFailed",
    "Step",
    "parse_parameters",
]
