"""Optional drivers: Python packages for brokers and databases; how to install them.

Each belongs to an optional part: an extra of the wheel, and a package ``steward-PART``. If the
configuration names a part that is not installed, that part is unavailable and the rest of
Steward runs. The doctor and the configuration checks use ``list_needed_drivers``.
"""

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
"""Prefix of the virtual environments in our deb and rpm packages; a clone uses ``.venv``."""


class OptionalDriver(msgspec.Struct, frozen=True):
    """Driver of an optional part.

    Attributes:
        part: Name of the part, and of the wheel's extra.
        package: Python package of the driver.
        module: Module to import.
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
        """Command that installs the driver in the way this Steward was installed."""
        if sys.prefix.startswith(_PACKAGED):
            python = "py{}.{}".format(*sys.version_info)
            if shutil.which("apt-get"):
                return f"apt-get install ./steward-{self.part}_*+{python}_*.deb"
            return f"dnf install ./steward-{self.part}-*.{python}.*.rpm"
        return f"{sys.executable} -m pip install {shlex.quote(self._get_requirement())}"

    @property
    def missing_error(self) -> str:
        """Error text for a driver that is not installed."""
        return f"the Python package {self.package} is not installed: run {self.install_line}"

    def _get_requirement(self) -> str:
        """Return the driver's requirement with the supported versions."""
        # It takes as long to import as a short command runs, and only an error needs it.
        import importlib.metadata

        try:
            lines = importlib.metadata.requires("slurm-steward") or []
        except importlib.metadata.PackageNotFoundError:
            return self.package
        pattern = re.compile(rf"{re.escape(self.package)}(?:\[[^]]*\])?[ (<>=!~;]", re.IGNORECASE)
        matches = (line.partition(";")[0].strip() for line in lines if pattern.match(line))
        return next(matches, self.package)


KAFKA: Final = OptionalDriver("kafka", "confluent-kafka", "confluent_kafka")
PARQUET: Final = OptionalDriver("parquet", "duckdb", "duckdb")
POSTGRESQL: Final = OptionalDriver("postgresql", "psycopg", "psycopg")

DRIVERS: Final = (KAFKA, PARQUET, POSTGRESQL)
"""Drivers of all optional parts."""


def list_needed_drivers(settings: Settings) -> Iterator[tuple[tuple[str, ...], OptionalDriver]]:
    """Yield each configuration key that needs a driver, with the driver."""
    if settings.forward.to:
        return  # archive, books and bank are on another host
    for name, sink in settings.archive.sink.items():
        if sink.kind == "kafka":
            yield ("archive", "sink", name), KAFKA
    for name in settings.consume:
        yield ("consume", name), KAFKA
    if settings.bank.database.startswith("postgresql"):
        yield ("bank", "database"), POSTGRESQL
    if "jobacct/log" in (plugin.strip() for plugin in settings.accounting.type.split(",")):
        yield ("accounting", "type"), PARQUET
