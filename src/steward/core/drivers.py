"""Drivers of brokers, search servers and databases, which are installed apart from Steward.

Each belongs to an optional part: an extra of the wheel, and a package ``steward-PART``. A part
that the configuration names and that is not installed is unavailable; the rest of Steward runs.
"""

import importlib.metadata
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Final

import msgspec

from steward.core.config import Settings

_PACKAGED: Final = "/opt/steward/python"
"""Where the packages' virtual environments begin; a clone's is ``.venv``."""


class Driver(msgspec.Struct, frozen=True):
    """The driver of an optional part.

    Attributes:
        part: The part, as the extra of the wheel is called.
        package: The driver's Python package.
        module: The module that it is imported as.
    """

    part: str
    package: str
    module: str

    @property
    def is_installed(self) -> bool:
        """Whether the driver can be imported."""
        return importlib.util.find_spec(self.module) is not None

    @property
    def install_line(self) -> str:
        """The command that installs the driver, the way that this Steward was installed."""
        if sys.prefix.startswith(_PACKAGED):
            python = "py{}.{}".format(*sys.version_info)
            if shutil.which("apt-get"):
                return f"apt-get install ./steward-{self.part}_*+{python}_*.deb"
            return f"dnf install ./steward-{self.part}-*.{python}.*.rpm"
        return f"{sys.executable} -m pip install {shlex.quote(self._requirement())}"

    @property
    def missing(self) -> str:
        """What to tell where the driver is not installed."""
        return f"the Python package {self.package} is not installed: {self.install_line}"

    def _requirement(self) -> str:
        """The driver with the versions that Steward speaks to."""
        try:
            lines = importlib.metadata.requires("slurm-steward") or []
        except importlib.metadata.PackageNotFoundError:
            return self.package
        pattern = re.compile(rf"{re.escape(self.package)}(?:\[[^]]*\])?[ (<>=!~;]", re.IGNORECASE)
        found = (line.partition(";")[0].strip() for line in lines if pattern.match(line))
        return next(found, self.package)


ELASTICSEARCH: Final = Driver("search", "elasticsearch", "elasticsearch")
OPENSEARCH: Final = Driver("search", "opensearch-py", "opensearchpy")
KAFKA: Final = Driver("kafka", "confluent-kafka", "confluent_kafka")
PARQUET: Final = Driver("parquet", "duckdb", "duckdb")
POSTGRESQL: Final = Driver("postgresql", "psycopg", "psycopg")

DRIVERS: Final = (ELASTICSEARCH, OPENSEARCH, KAFKA, PARQUET, POSTGRESQL)
"""The drivers of all optional parts."""

_OF_SINKS: Final = {"elasticsearch": ELASTICSEARCH, "opensearch": OPENSEARCH, "kafka": KAFKA}
"""The drivers of sinks, by their kind."""


def needed_drivers(settings: Settings) -> Iterator[tuple[tuple[str, ...], Driver]]:
    """Each key of the configuration that needs a driver, and the driver."""
    if settings.forward.to:
        return  # archive, books and bank are on another host
    for name, sink in settings.archive.sink.items():
        if sink.kind in _OF_SINKS:
            yield ("archive", "sink", name), _OF_SINKS[sink.kind]
    for name in settings.consume:
        yield ("consume", name), KAFKA
    if settings.bank.database.startswith("postgresql"):
        yield ("bank", "database"), POSTGRESQL
    if "jobacct/log" in (one.strip() for one in settings.accounting.type.split(",")):
        yield ("accounting", "type"), PARQUET
