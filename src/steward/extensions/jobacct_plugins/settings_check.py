"""Settings check for accounting plugins and the job log: the section [accounting].

:func:`check_settings` checks plugin types, parameters and the job log's directory; it yields a
problem for each invalid setting.
"""

import os
import re
from collections.abc import Iterator
from typing import Final

from steward.core.config import Settings
from steward.core.config.problems import ConfigProblem
from steward.core.errors import StewardError
from steward.extensions.jobacct_plugins.api import ParameterError, parse_number_parameter
from steward.extensions.jobacct_plugins.messages import DELAY_PARAMETER, RETRIES_PARAMETER
from steward.extensions.jobacct_plugins.registry import (
    NONE_TYPE,
    find_entry_point,
    parse_plugin_types,
    third_party_types,
)

_TYPE_PATTERN: Final = re.compile(r"jobacct/[A-Za-z0-9_-]{1,64}")


def check_settings(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield a problem for each invalid setting of [accounting]."""
    accounting = settings.accounting
    types = parse_plugin_types(accounting.type)
    key = ("accounting", "type")
    if not types:
        yield ConfigProblem(
            key, f"'accounting.type' is empty: to disable plugins, write {NONE_TYPE!r}"
        )
    for plugin_type in types:
        if _TYPE_PATTERN.fullmatch(plugin_type) is None:
            yield ConfigProblem(
                key, f"'accounting.type': invalid plugin {plugin_type!r}: write 'jobacct/NAME'"
            )
            return
    for plugin_type in third_party_types(accounting.type):
        try:
            find_entry_point(plugin_type)
        except StewardError as error:
            yield ConfigProblem(key, f"'accounting.type': {error}")
    try:
        for name in ("Frequency", RETRIES_PARAMETER, DELAY_PARAMETER):
            parse_number_parameter(accounting.parameters, name, 0)
    except ParameterError as error:
        yield ConfigProblem(("accounting", "parameters"), f"'accounting.parameters': {error}")
    yield from _check_location(settings)


def _check_location(settings: Settings) -> Iterator[ConfigProblem]:
    """Yield a problem where the job log's directory is relative, or inside a spool or archive."""
    location = settings.accounting.location
    key = ("accounting", "location")
    if not location:
        return
    if not os.path.isabs(location):
        yield ConfigProblem(key, f"'accounting.location': {location!r} is not an absolute path")
        return
    reserved = [
        (cluster.spool, f"the spool of cluster {name!r}")
        for name, cluster in settings.cluster.items()
    ]
    for name, sink in settings.files_sinks().items():
        reserved += [(settings.sink_path(name), f"sink {name!r}"), (sink.move_to, f"sink {name!r}")]
    for path, owner in reserved:
        if path and f"{os.path.normpath(location)}/".startswith(f"{os.path.normpath(path)}/"):
            yield ConfigProblem(
                key, f"{location} lies in {path} of {owner}: choose another directory"
            )
