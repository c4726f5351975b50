"""Reading slices of a checkpoint straight from safetensors files, and accounting for every tensor in it."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a model directory: `model.safetensors`, or the shards that its index names.

    Reads only the bytes asked for. A context manager: tensors read stay valid after it closes.
    """

    def __init__(self, model_path: str) -> None:
        """Raises FileNotFoundError naming the files looked for, ValueError naming one that cannot be read."""
        self._folder = Path(model_path)
        self._files = ExitStack()
        self._open_files: dict[str, Any] = {}
        self._file_of = self._index()
        self._read: set[str] = set()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._files.close()
        self._open_files.clear()

    def read(
        self, name: str, shape: Sequence[int], rows: range | None = None, columns: range | None = None
    ) -> torch.Tensor:
        """A tensor's slice: `rows` of its first dimension, `columns` of its second (None: all), in its own dtype.

        `shape` is what the whole tensor must have. Raises ValueError naming a tensor that is missing or shaped
        otherwise.
        """
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: tensor {name} is missing from the checkpoint")
        view = self._open(self._file_of[name]).get_slice(name)
        if tuple(view.get_shape()) != tuple(shape):
            raise ValueError(
                f"{self._folder}: tensor {name} has shape {tuple(view.get_shape())}; config.json says {tuple(shape)}"
            )
        self._read.add(name)
        window = [slice(part.start, part.stop) for part in (rows or range(shape[0]),)]
        if columns is not None:
            window.append(slice(columns.start, columns.stop))
        tensor: torch.Tensor = view[tuple(window)]
        return tensor

    def refuse_unread(self, ignored_ends: Sequence[str]) -> None:
        """Raises ValueError naming tensors that nothing read, except those whose name ends in an ignored one."""
        unread = sorted(name for name in self._file_of.keys() - self._read if not name.endswith(tuple(ignored_ends)))
        if unread:
            more = f" and {len(unread) - 8} more" if len(unread) > 8 else ""
            raise ValueError(f"{self._folder}: unexpected tensors in the checkpoint: {', '.join(unread[:8])}{more}")

    def _index(self) -> dict[str, str]:
        """tensor name -> file name."""
        if (self._folder / _INDEX).is_file():
            try:
                return dict(json.loads((self._folder / _INDEX).read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError) as error:
                raise ValueError(f"{self._folder / _INDEX} holds no weight_map: {error}") from error
        if not (self._folder / _SINGLE).is_file():
            raise FileNotFoundError(f"{self._folder} holds neither {_SINGLE} nor {_INDEX}")
        return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)

    def _open(self, file_name: str) -> Any:
        if file_name not in self._open_files:
            path = self._folder / file_name
            if not path.is_file():
                raise FileNotFoundError(f"{path}, which {_INDEX} names, is missing")
            try:
                self._open_files[file_name] = self._files.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
        return self._open_files[file_name]
