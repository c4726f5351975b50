"""What travels on a token link, from an engine to a front end, and how it is written.

The front end listens and the engine dials the address that came with a request: one link for each
pair, one message a step. The front end's first message says what it holds already (`Resume`), so a
link that drops while both live loses nothing: the engine redials and sends on from there. An engine
sends a heartbeat each second. `token_sender` is the engine's end, `token_receiver` the front end's.
"""

from typing import Any

import msgspec

from cluster.links.messages import Admission, EngineToFrontend, Finish, FrontendToEngine, Resume, TokenBatch, Watch
from scheduler.plan import ReplicaReport
from workers.link import LinkError

HEARTBEAT_SECONDS = 1.0
HEARTBEAT = 5
"""The kind of a message that says only that its sender lives."""

_KINDS: dict[type, int] = {Admission: 1, TokenBatch: 2, Resume: 3, Finish: 4, Watch: 6, ReplicaReport: 7}
_encoder = msgspec.msgpack.Encoder()
_from_engine = {_KINDS[each]: msgspec.msgpack.Decoder(each) for each in (Admission, TokenBatch, ReplicaReport)}
_from_frontend = {_KINDS[each]: msgspec.msgpack.Decoder(each) for each in (Resume, Finish, Watch)}


def encode_message(message: EngineToFrontend | FrontendToEngine) -> tuple[int, bytes]:
    """(kind, payload) for a link's `send`."""
    return _KINDS[type(message)], _encoder.encode(message)


def decode_from_engine(kind: int, payload: bytes) -> EngineToFrontend:
    """Raises LinkError for anything an engine may not say."""
    message: EngineToFrontend = _decode(_from_engine, kind, payload)
    return message


def decode_from_frontend(kind: int, payload: bytes) -> FrontendToEngine:
    """Raises LinkError for anything a front end may not say."""
    message: FrontendToEngine = _decode(_from_frontend, kind, payload)
    return message


def _decode(decoders: dict[int, msgspec.msgpack.Decoder[Any]], kind: int, payload: bytes) -> Any:
    if kind not in decoders:
        raise LinkError(f"a message of kind {kind} is not one that may come from this side")
    try:
        return decoders[kind].decode(payload)
    except msgspec.DecodeError as error:
        raise LinkError(f"a message of kind {kind} cannot be read: {error}") from error
