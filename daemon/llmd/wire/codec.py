"""msgpack encoding of messages. A frame that does not decode is dropped by the caller and counted, never fatal."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class BadFrame(ValueError):
    """A frame that is not a message of the channel. Its content is never logged."""


def encode(message: msgspec.Struct) -> bytes:
    """Message -> one frame."""
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """Decodes the frames of one channel; `kind` is the union of the messages that may arrive there."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, frame: bytes) -> T:
        """One frame -> message. Raises BadFrame."""
        try:
            return self._decoder.decode(frame)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadFrame(f"{len(frame)} bytes that are not a message of this channel: {type(error).__name__}") from None
