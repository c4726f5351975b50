"""What a full block of tokens is called: the same in every process and replica.

A block's hash chains its parent's hash and its own tokens, so that it names the whole sequence up to its end.
"""

import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def root_hash(lora_id: str | None, cache_salt: str | None) -> bytes:
    """Parent of a first block: whatever but tokens changes the KV or may not be shared.

    Chaining carries it into every later block. Lengths keep the parts apart.
    """
    root = blake2b(digest_size=HASH_BYTES)
    for extra in (lora_id, cache_salt):
        data = b"" if extra is None else b"=" + extra.encode("utf-8", "surrogatepass")
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of `token_ids`, which follow the block whose hash is `parent`."""
    num_blocks = len(token_ids) // block_size
    packed = _pack(token_ids[: num_blocks * block_size])
    num_bytes = len(packed) // num_blocks if num_blocks else 1
    block_hashes = []
    for start in range(0, len(packed), num_bytes):
        parent = blake2b(parent + packed[start : start + num_bytes], digest_size=HASH_BYTES).digest()
        block_hashes.append(parent)
    return block_hashes


def _pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian 64-bit integers, on every machine."""
    packed = array("q", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
