"""Accounting plugins: what they are written against, and the process that calls them."""

from typing import TYPE_CHECKING

from steward.core.offered import offered
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
    from steward.extensions.jobacct_plugins.asking import (
        ACTIONS,
        PluginLine,
        PluginsAnswer,
        PluginsRequest,
    )
    from steward.extensions.jobacct_plugins.consumer import Around, PluginConsumer, consumer_name
    from steward.extensions.jobacct_plugins.loading import LOG, third_parties, types_of
    from steward.extensions.jobacct_plugins.log.asking import (
        DumpAnswer,
        DumpRequest,
        ExpireAnswer,
        ExpireRequest,
    )
    from steward.extensions.jobacct_plugins.log.consumer import LogConsumer
    from steward.extensions.jobacct_plugins.log.packing import write_parquet
    from steward.extensions.jobacct_plugins.log.plugin import LogPlugin
    from steward.extensions.jobacct_plugins.log.reading import JOB_LOG
    from steward.extensions.jobacct_plugins.none import NonePlugin
    from steward.extensions.jobacct_plugins.settings_check import check_settings
else:
    __getattr__ = offered(
        __name__,
        asking=("ACTIONS", "PluginLine", "PluginsAnswer", "PluginsRequest"),
        consumer=("Around", "PluginConsumer", "consumer_name"),
        loading=("LOG", "third_parties", "types_of"),
        **{
            "log.asking": ("DumpAnswer", "DumpRequest", "ExpireAnswer", "ExpireRequest"),
            "log.consumer": ("LogConsumer",),
            "log.packing": ("write_parquet",),
            "log.plugin": ("LogPlugin",),
            "log.reading": ("JOB_LOG",),
        },
        none=("NonePlugin",),
        settings_check=("check_settings",),
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
