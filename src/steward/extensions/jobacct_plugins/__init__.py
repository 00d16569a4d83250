"""Job accounting plugins (``jobacct/NAME``): plugin API, plugin processes, job log."""

from typing import TYPE_CHECKING

from steward.core.extensions import lazy_exports
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

if TYPE_CHECKING:
    from steward.extensions.jobacct_plugins.actions import (
        ACTIONS,
        PluginLine,
        PluginsAnswer,
        PluginsRequest,
    )
    from steward.extensions.jobacct_plugins.api import NonePlugin
    from steward.extensions.jobacct_plugins.consumer import Around, PluginConsumer, consumer_name
    from steward.extensions.jobacct_plugins.log.actions import (
        DumpAnswer,
        DumpRequest,
        ExpireAnswer,
        ExpireRequest,
    )
    from steward.extensions.jobacct_plugins.log.consumer import LogConsumer, LogPlugin
    from steward.extensions.jobacct_plugins.log.packing import write_parquet
    from steward.extensions.jobacct_plugins.log.reader import JOB_LOG
    from steward.extensions.jobacct_plugins.registry import LOG, third_parties, types_of
    from steward.extensions.jobacct_plugins.settings_check import check_settings
else:
    __getattr__ = lazy_exports(
        __name__,
        actions=(
            "ACTIONS",
            "PluginLine",
            "PluginsAnswer",
            "PluginsRequest",
        ),
        consumer=(
            "Around",
            "PluginConsumer",
            "consumer_name",
        ),
        registry=(
            "LOG",
            "third_parties",
            "types_of",
        ),
        api=("NonePlugin",),
        settings_check=("check_settings",),
        **{
            "log.actions": ("DumpAnswer", "DumpRequest", "ExpireAnswer", "ExpireRequest"),
            "log.consumer": ("LogConsumer", "LogPlugin"),
            "log.packing": ("write_parquet",),
            "log.reader": ("JOB_LOG",),
        },
    )

__all__ = [
    "ACTIONS",
    "API_VERSION",
    "JOB_LOG",
    "LOG",
    "Around",
    "DumpAnswer",
    "DumpRequest",
    "ExpireAnswer",
    "ExpireRequest",
    "Job",
    "JobAcctPlugin",
    "LogConsumer",
    "LogPlugin",
    "Message",
    "NonePlugin",
    "PluginConsumer",
    "PluginError",
    "PluginLine",
    "PluginsAnswer",
    "PluginsRequest",
    "Rusage",
    "SendFailed",
    "Step",
    "check_settings",
    "consumer_name",
    "parse_parameters",
    "third_parties",
    "types_of",
    "write_parquet",
]
