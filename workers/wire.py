"""msgspec's typed encoder and decoders for the step link: plain dataclasses as they are, never pickle."""

from typing import Any

import msgspec

from scheduler.plan import StepPlan, StepResult

_encoder = msgspec.msgpack.Encoder()
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)


def encode(message: Any) -> bytes:
    """One message as msgpack. Maps keep their order, so a plan's rows do."""
    return _encoder.encode(message)


def decode_plan(data: bytes | bytearray | memoryview) -> StepPlan:
    """Raises msgspec.DecodeError (ValidationError when well-formed but no StepPlan)."""
    return _plan_decoder.decode(data)


def decode_result(data: bytes | bytearray | memoryview) -> StepResult:
    """Raises msgspec.DecodeError (ValidationError when well-formed but no StepResult)."""
    return _result_decoder.decode(data)
