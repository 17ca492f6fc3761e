"""Words on a link: small messages in both directions beside the chains of writes. Every field is checked before it is used.

The end that sends layers asks (`Ask`); the other one grants places in its memory, refuses, or names a CNIC that is nearer.
Each ask ends with one `Applied`, `Refused` or `OtherCnic`. Every message carries receive slots that are free again.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmoverd.adapters.transport.frames import FRAME_BYTES_MAX, SLICES_MAX, Status

PROTOCOL = 1
GRANT_BYTES = 16 << 10
"""Receive slots of the end that sends layers: a thousand places a message."""
ASK_BYTES = 128
"""Receive slots of the end that is written to."""
WORDS_BYTES_MAX = 512
CNICS_MAX = 256

PLACE = np.dtype([("address", "<u8"), ("size_bytes", "<u4"), ("key", "<u4")])
"""Where bytes may be written: 16 bytes."""
Places = npt.NDArray[np.void]

_HEAD = struct.Struct("<BBHIQ")
_CREDITS = struct.Struct("<H")
_CREDITS_AT = 2
_ASK = struct.Struct("<QIIQ")
_GRANT = struct.Struct("<II")
_REFUSED = struct.Struct("<IIQ")
_OTHER_CNIC = struct.Struct("<I")
_AGAIN, _SETTLED = 1, 2
CREDITS_MAX = (1 << 16) - 1
PLACES_PER_MESSAGE = (GRANT_BYTES - _HEAD.size - _GRANT.size) // PLACE.itemsize
_REFUSALS = (Status.REFUSED, Status.MISMATCH, Status.FAILED)


class MessageError(Exception):
    """The other end does not speak this protocol; the message says which field is wrong."""


@dataclass(frozen=True, slots=True)
class Ask:
    """May this layer be written? `again`: it may have been applied already; `settled`: over this CNIC, whatever is nearer."""

    sequence: int
    sink_id: int
    layer: int
    first_block: int
    payload_bytes: int
    again: bool = False
    settled: bool = False

    def encode(self) -> bytes:
        flags = _AGAIN * self.again | _SETTLED * self.settled
        body = _ASK.pack(self.sink_id, self.layer, self.first_block, self.payload_bytes)
        return _HEAD.pack(1, flags, 0, 0, self.sequence) + body


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """Places [first, first + len(places)) of `total`: they may be written until the ask ends."""

    sequence: int
    total: int
    first: int
    places: Places

    def encode(self) -> bytes:
        head = _HEAD.pack(2, 0, 0, len(self.places), self.sequence)
        return head + _GRANT.pack(self.total, self.first) + self.places.tobytes()


@dataclass(frozen=True, slots=True)
class Refused:
    """The ask ends: nothing of it may be written any more. `detail`: the sink's bytes for a mismatch."""

    sequence: int
    status: Status
    detail: int
    words: str

    def encode(self) -> bytes:
        words = self.words.encode()[:WORDS_BYTES_MAX]
        body = _REFUSED.pack(self.status.value, 0, self.detail)
        return _HEAD.pack(3, 0, 0, len(words), self.sequence) + body + words


@dataclass(frozen=True, slots=True)
class OtherCnic:
    """The ask ends: that sink's memory is nearer to another CNIC of this node."""

    sequence: int
    cnic: int

    def encode(self) -> bytes:
        return _HEAD.pack(4, 0, 0, 0, self.sequence) + _OTHER_CNIC.pack(self.cnic)


@dataclass(frozen=True, slots=True)
class Applied:
    """The ask ends: the layer is in its sink, and told."""

    sequence: int

    def encode(self) -> bytes:
        return _HEAD.pack(5, 0, 0, 0, self.sequence)


@dataclass(frozen=True, slots=True)
class Revoke:
    """Write no more of this layer, and say when nothing is on its way."""

    sequence: int

    def encode(self) -> bytes:
        return _HEAD.pack(6, 0, 0, 0, self.sequence)


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Nothing of this layer is on its way any more: it was posted behind the last of its writes."""

    sequence: int

    def encode(self) -> bytes:
        return _HEAD.pack(7, 0, 0, 0, self.sequence)


@dataclass(frozen=True, slots=True)
class Credit:
    """Only gives slots back, or says that its sender lives."""

    def encode(self) -> bytes:
        return _HEAD.pack(8, 0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Bye:
    """The end that sends layers has had none for long: both ends go."""

    def encode(self) -> bytes:
        return _HEAD.pack(9, 0, 0, 0, 0)


Message: TypeAlias = Ask | Grant | Refused | OtherCnic | Applied | Revoke | Abandoned | Credit | Bye


def with_credits(raw: bytes, slots: int) -> bytes:
    """A message as it goes out: `slots` receive slots of its sender are free again."""
    return raw[:_CREDITS_AT] + _CREDITS.pack(slots) + raw[_CREDITS_AT + _CREDITS.size :]


def decode(raw: bytes) -> tuple[int, Message]:
    """Receive slots that are free again, and the message. Raises `MessageError`."""
    if len(raw) < _HEAD.size:
        raise MessageError(f"a message of {len(raw)} bytes, {_HEAD.size} are the least")
    kind, flags, slots, count, sequence = _HEAD.unpack_from(raw)
    try:
        return slots, _body(kind, flags, count, sequence, raw[_HEAD.size :])
    except struct.error as error:
        raise MessageError(f"a message of kind {kind} with {len(raw)} bytes: {error}") from error


def _body(kind: int, flags: int, count: int, sequence: int, body: bytes) -> Message:
    match kind:
        case 1:
            sink_id, layer, first_block, payload_bytes = _ASK.unpack(body)
            if payload_bytes > FRAME_BYTES_MAX:
                raise MessageError(f"a layer of {payload_bytes} bytes, at most {FRAME_BYTES_MAX} are allowed")
            again, settled = bool(flags & _AGAIN), bool(flags & _SETTLED)
            return Ask(sequence, sink_id, layer, first_block, payload_bytes, again, settled)
        case 2:
            return _grant(count, sequence, body)
        case 3:
            return _refused(count, sequence, body)
        case 4:
            (cnic,) = _OTHER_CNIC.unpack(body)
            return OtherCnic(sequence, cnic)
    bare: dict[int, Message] = {
        5: Applied(sequence),
        6: Revoke(sequence),
        7: Abandoned(sequence),
        8: Credit(),
        9: Bye(),
    }
    if kind not in bare or body:
        raise MessageError(f"a message of kind {kind} with {len(body)} bytes behind its head")
    return bare[kind]


def _grant(count: int, sequence: int, body: bytes) -> Grant:
    total, first = _GRANT.unpack_from(body)
    size_bytes = len(body) - _GRANT.size
    if size_bytes != count * PLACE.itemsize or not count:
        raise MessageError(f"a grant of {count} places with {size_bytes} bytes of them")
    if total > SLICES_MAX or first + count > total:
        raise MessageError(f"a grant of places {first} to {first + count} of {total}, at most {SLICES_MAX} are allowed")
    return Grant(sequence, total, first, np.frombuffer(body, PLACE, count, _GRANT.size))


def _refused(count: int, sequence: int, body: bytes) -> Refused:
    status, _, detail = _REFUSED.unpack_from(body)
    words = body[_REFUSED.size :]
    if len(words) != count or count > WORDS_BYTES_MAX:
        raise MessageError(
            f"a refusal with {len(words)} bytes of words, {count} are told, at most {WORDS_BYTES_MAX} go"
        )
    found = next((known for known in _REFUSALS if known.value == status), None)
    if found is None:
        raise MessageError(f"a refusal with status {status}")
    return Refused(sequence, found, detail, words.decode(errors="replace"))
