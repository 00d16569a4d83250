"""Takes over what others' books hold: slurmdbd's, a file that sacct wrote, another's job log."""

from steward.accounting.imports.events import Maker, RunCounter
from steward.accounting.imports.place import Place, places_path
from steward.accounting.imports.taking import (
    Report,
    Taken,
    is_table,
    take_days,
    take_log,
    take_table,
)

__all__ = [
    "Maker",
    "Place",
    "Report",
    "RunCounter",
    "Taken",
    "is_table",
    "places_path",
    "take_days",
    "take_log",
    "take_table",
]
