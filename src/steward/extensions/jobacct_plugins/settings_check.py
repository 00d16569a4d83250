"""Settings check for accounting plugins and the job log: the section [accounting]."""

import os
import re
from collections.abc import Iterator
from typing import Final

from steward.core.config import Settings
from steward.core.config.problems import Problem
from steward.core.errors import StewardError
from steward.extensions.jobacct_plugins.api import ParameterError, number_of
from steward.extensions.jobacct_plugins.messages import DELAY, RETRIES
from steward.extensions.jobacct_plugins.registry import NONE, entry_of, third_parties, types_of

_TYPE: Final = re.compile(r"jobacct/[A-Za-z0-9_-]{1,64}")


def check_settings(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each invalid setting of [accounting]."""
    of = settings.accounting
    types = types_of(of.type)
    key = ("accounting", "type")
    if not types:
        yield Problem(key, f"'accounting.type' names no plugin: for none of them write {NONE!r}")
    for one in types:
        if _TYPE.fullmatch(one) is None:
            yield Problem(key, f"'accounting.type': {one!r} is no plugin: write 'jobacct/NAME'")
            return
    for one in third_parties(of.type):
        try:
            entry_of(one)
        except StewardError as error:
            yield Problem(key, f"'accounting.type': {error}")
    try:
        for name in ("Frequency", RETRIES, DELAY):
            number_of(of.parameters, name, 0)
    except ParameterError as error:
        yield Problem(("accounting", "parameters"), f"'accounting.parameters': {error}")
    yield from _location(settings)


def _location(settings: Settings) -> Iterator[Problem]:
    """Yield a problem where the job log's directory is relative, or inside a spool or archive."""
    location = settings.accounting.location
    key = ("accounting", "location")
    if not location:
        return
    if not os.path.isabs(location):
        yield Problem(key, f"'accounting.location' must be an absolute path, not {location!r}")
        return
    taken = [
        (cluster.spool, f"the spool of cluster {name!r}")
        for name, cluster in settings.cluster.items()
    ]
    for name, sink in settings.files_sinks().items():
        taken += [(settings.sink_path(name), f"sink {name!r}"), (sink.move_to, f"sink {name!r}")]
    for path, whose in taken:
        if path and f"{os.path.normpath(location)}/".startswith(f"{os.path.normpath(path)}/"):
            yield Problem(key, f"{location} lies in {path} of {whose}: choose another place")
