"""Writes the JSON Schema of a Kafka message, as the code has it, for docs/kafka.md."""

import json
from pathlib import Path

from steward.extensions.kafka.messages import make_json_schema

PATH = Path(__file__).parent.parent / "docs" / "steward.job-1.schema.json"


def text() -> str:
    """Return the schema as text."""
    return json.dumps(make_json_schema(), indent=2, sort_keys=True) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
