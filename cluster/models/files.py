"""Whether a directory holds a whole model: configuration, tokenizer, and every byte of its safetensors weights."""

import json
from pathlib import Path
from typing import Any

from cluster.errors import ModelError

INDEX = "model.safetensors.index.json"


def verify(directory: Path) -> None:
    """Raises ModelError naming the first file that is missing, unreadable or cut short."""
    config = _json(directory / "config.json")
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{directory / 'config.json'} names no model_type")
    _json(directory / "tokenizer.json")
    if (directory / INDEX).exists():
        names = sorted(set(_json(directory / INDEX).get("weight_map", {}).values()))
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ModelError(f"{directory} has no *.safetensors weights; no other format is read")
    for name in names:
        _verify_safetensors(directory / name)


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def _verify_safetensors(path: Path) -> None:
    """The format: 8 bytes length of the header (little endian), the header as JSON, then the data it describes."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= size - 8:
                raise ModelError(f"{path} is cut short or no safetensors file")
            header = json.loads(file.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{path} has {size} bytes where its header promises {expected}: fetch it again")
