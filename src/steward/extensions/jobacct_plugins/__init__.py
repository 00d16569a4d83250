"""Job accounting plugins (``jobacct/NAME``): plugin API, plugin processes, job log.

``api`` is what plugins are written against, ``registry`` finds them. ``consumer`` runs one plugin
in a process of its own and calls its hooks through ``hooks``; ``state`` is that process's database,
``messages`` sends messages between a plugin's halves. ``log`` is the built-in plugin jobacct/log.
``actions`` and ``settings_check`` serve command line, API and configuration.
"""

from typing import TYPE_CHECKING

from steward.core.extensions import make_lazy_getattr
from steward.extensions.jobacct_plugins.api import (
    API_VERSION,
    JobAcctPlugin,
    JobRun,
    Message,
    PluginError,
    Rusage,
    SendFailed,
    Step,
    parse_parameters,
)

if TYPE_CHECKING:
    from steward.extensions.jobacct_plugins.api import NonePlugin
    from steward.extensions.jobacct_plugins.consumer import (
        PluginConsumer,
        PluginHost,
        consumer_name,
    )
    from steward.extensions.jobacct_plugins.log.actions import (
        DumpAnswer,
        DumpChunk,
        PurgeAnswer,
    )
    from steward.extensions.jobacct_plugins.log.consumer import LogConsumer, LogPlugin
    from steward.extensions.jobacct_plugins.log.parquet import write_parquet
    from steward.extensions.jobacct_plugins.log.reader import JOB_LOG
    from steward.extensions.jobacct_plugins.registry import (
        LOG_TYPE,
        parse_plugin_types,
        third_party_types,
    )
    from steward.extensions.jobacct_plugins.settings_check import check_settings
else:
    __getattr__ = make_lazy_getattr(
        __name__,
        consumer=(
            "PluginHost",
            "PluginConsumer",
            "consumer_name",
        ),
        registry=(
            "LOG_TYPE",
            "third_party_types",
            "parse_plugin_types",
        ),
        api=("NonePlugin",),
        settings_check=("check_settings",),
        **{
            "log.actions": ("DumpAnswer", "DumpChunk", "PurgeAnswer"),
            "log.consumer": ("LogConsumer", "LogPlugin"),
            "log.parquet": ("write_parquet",),
            "log.reader": ("JOB_LOG",),
        },
    )

__all__ = [
    "API_VERSION",
    "JOB_LOG",
    "LOG_TYPE",
    "DumpAnswer",
    "DumpChunk",
    "JobAcctPlugin",
    "JobRun",
    "LogConsumer",
    "LogPlugin",
    "Message",
    "NonePlugin",
    "PluginConsumer",
    "PluginError",
    "PluginHost",
    "PurgeAnswer",
    "Rusage",
    "SendFailed",
    "Step",
    "check_settings",
    "consumer_name",
    "parse_parameters",
    "parse_plugin_types",
    "third_party_types",
    "write_parquet",
]
