"""What a checkpoint's own files say about generating with it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelError
from cluster.frontend.request_fields import is_integer, is_number


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults (generation_config.json, else the API's) and the tokens that end a text."""

    eos_token_ids: tuple[int, ...] = ()
    """The union of generation_config.json's and config.json's, in ascending order."""
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, model_path: str) -> "GenerationDefaults":
        """Read from a local directory. Raises ModelError naming the file and the value that is wrong."""
        config = _read(Path(model_path) / "config.json")
        generation = _read(Path(model_path) / "generation_config.json")
        eos = {*_ids(config, "config.json"), *_ids(generation, "generation_config.json")}
        return cls(
            eos_token_ids=tuple(sorted(eos)),
            temperature=_number(generation, "temperature", 0.0, 2.0, 1.0),
            top_k=max(0, int(_number(generation, "top_k", -1, 2**31 - 1, 0))),
            top_p=_number(generation, "top_p", 1e-9, 1.0, 1.0),
            min_p=_number(generation, "min_p", 0.0, 1.0, 0.0),
            repetition_penalty=_number(generation, "repetition_penalty", 0.001, 1000.0, 1.0),
        )


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def _ids(config: dict[str, Any], file: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(is_integer(item, 0, 2**31 - 1) for item in ids):
        raise ModelError(f"eos_token_id in {file} must be a token id or a list of them")
    return ids


def _number(config: dict[str, Any], name: str, low: float, high: float, default: float) -> float:
    value = config.get(name)
    if value is None:
        return default
    if not is_number(value, low, high):
        raise ModelError(f"{name} in generation_config.json must be a number from {low:g} to {high:g}")
    return float(value)
