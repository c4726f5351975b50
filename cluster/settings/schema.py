"""The names of all settings as a JSON schema, for the values of the chart."""

from typing import Any

from cluster.settings.tree import PARSERS, SECTIONS


def settings_schema(*left_out: str) -> dict[str, Any]:
    """Sections and settings by name, and nothing beside them; `left_out` are full names of settings.

    Values are only known to be single ones: which of them a setting takes, its parser says when the tree is read.
    """
    value = {"type": ["string", "number", "boolean", "null"]}
    sections = {
        section: {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name.partition(".")[2]: value
                for name in PARSERS
                if name.startswith(f"{section}.") and name not in left_out
            },
        }
        for section in SECTIONS
    }
    return {"type": "object", "additionalProperties": False, "properties": sections}
