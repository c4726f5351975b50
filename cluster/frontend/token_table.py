"""The bytes that each token id stands for.

Both decoders of the supported families make a text by joining what each token stands for: byte-level
BPE (GPT-2, Llama 3, Qwen, SmolLM2) and SentencePiece's with byte fallback (Llama 2, Mistral). So a
table of bytes is enough to detokenise, and it also gives the true bytes of a token that is only a part
of a character.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as BackendTokenizer

from cluster.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class TokenTable:
    """`pieces[id]` is a token's bytes; ids without a token (padding rows of the head) stand for nothing."""

    pieces: list[bytes]
    special_ids: frozenset[int]
    strip_leading_spaces: int = 0
    """Spaces that the decoder drops at the very beginning of a text (SentencePiece's dummy prefix)."""

    def piece(self, token_id: int) -> bytes:
        return self.pieces[token_id] if token_id < len(self.pieces) else b""

    @classmethod
    def build(cls, backend: BackendTokenizer) -> "TokenTable":
        """Raises ModelError when the tokenizer's decoder is of neither family."""
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
            chars = _byte_level_chars()
            strip = 0

            def to_bytes(token: str) -> bytes:
                values = [chars.get(char) for char in token]
                return token.encode() if None in values else bytes(value for value in values if value is not None)

        elif kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
            replacements = [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
            byte_fallback = "ByteFallback" in kinds
            strip = sum(step["start"] for step in steps if step["type"] == "Strip")

            def to_bytes(token: str) -> bytes:
                for pattern, content in replacements:
                    token = token.replace(pattern, content)
                byte = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
                return bytes([int(byte[1], 16)]) if byte else token.encode()

        else:
            raise ModelError(f"the tokenizer's decoder {sorted(kinds) or 'is missing and'} is not supported")
        tokens = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
        added = backend.get_added_tokens_decoder()
        tokens.update({token_id: token.content for token_id, token in added.items()})
        pieces = [b""] * (max(tokens, default=-1) + 1)
        for token_id, token in tokens.items():
            pieces[token_id] = to_bytes(token)
        return cls(pieces, frozenset(token_id for token_id, token in added.items() if token.special), strip)


def _decoder_steps(backend: BackendTokenizer) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    spec = json.loads(backend.decoder.__getstate__())
    return list(spec["decoders"]) if spec["type"] == "Sequence" else [spec]


def _byte_level_chars() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, reversed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    chars = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    chars.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return chars
