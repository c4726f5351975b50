"""Writes the names of all settings into the chart's values.schema.json: python helm/settings_schema.py

To be run when a setting was added or renamed; a test fails until then. The rest of the file is written by hand.
"""

import json
from pathlib import Path
from typing import Any

from cluster.settings.schema import settings_schema

SCHEMA = Path(__file__).parent / "chunkserve" / "values.schema.json"
SECRET = ("server.api_key", "server.api_key_file")
"""Keys come from a Secret: a ConfigMap and a release's values are no place for them."""


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of the values with the settings of today."""
    settings = settings_schema(*SECRET)
    properties = settings["properties"]
    # The templates read these themselves.
    properties["model"]["required"] = ["path", "device"]
    properties["model"]["properties"]["device"] = {"enum": ["cpu", "cuda"]}
    properties["server"]["required"] = ["host", "port"]
    properties["server"]["properties"]["port"] = {"type": "integer", "minimum": 1, "maximum": 65535}
    settings["required"] = ["model", "server"]
    return schema | {"properties": schema["properties"] | {"settings": settings}}


def main() -> None:
    """Read, put in, write."""
    SCHEMA.write_text(json.dumps(with_settings(json.loads(SCHEMA.read_text())), indent=2) + "\n")


if __name__ == "__main__":
    main()
