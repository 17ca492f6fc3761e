"""What goes over a data channel beside the bytes of layers: a preface, then frames one way and acks the other.

All headers have one fixed size each; every field is checked before it is used. A frame names a sink, a layer and a block:
never an address to write to.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

MAGIC = b"KVMDATA\n"
PROTOCOL = 2
KEY_BYTES = 32
NODE_CHARS_MAX = 128
BOOT_CHARS_MAX = 64
FRAME_BYTES_MAX = 1 << 36
"""64 GiB: far above a layer of the longest request; a header beyond it is damage, not work."""
SLICES_MAX = 1 << 22
"""Rows of a frame by address: 64 MiB of them."""
U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1

_PREFACE = struct.Struct("<8sI32sQHH512s256s")
_FRAME = struct.Struct("<4sIQQIIQQ")
_ACK = struct.Struct("<4sIQQQ")
_FRAME_MAGIC, _ACK_MAGIC = b"KVMF", b"KVMA"

PREFACE_BYTES = _PREFACE.size
FRAME_BYTES = _FRAME.size
ACK_BYTES = _ACK.size


class FrameError(Exception):
    """The other side does not speak this protocol; the message says which field is wrong."""


class BodyKind(enum.Enum):
    """What follows a frame's header: the layer's bytes, or rows of (address, length) in the sender's memory."""

    PAYLOAD = 1
    ADDRESSES = 2


class Status(enum.Enum):
    """What became of a frame. `detail` of the ack: the sink's bytes for MISMATCH, the errno for FAILED."""

    ACCEPTED = 1
    """Not of a frame: the preface was good."""
    APPLIED = 2
    REFUSED = 3
    """No such sink for this sender, or it does not allow this layer, or not once more."""
    MISMATCH = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Preface:
    """Who opens the channel: node and boot id must be those that the key was issued to.

    `link_id`: channels with the same one are one sender's way here, and break together.
    """

    node: str
    boot_id: str
    key: bytes
    link_id: int

    def encode(self) -> bytes:
        """Raises `FrameError` for a name, boot id or key that does not fit."""
        node, boot_id = self.node.encode(), self.boot_id.encode()
        if not 1 <= len(self.node) <= NODE_CHARS_MAX or not 1 <= len(self.boot_id) <= BOOT_CHARS_MAX:
            raise FrameError(f"node must have 1 to {NODE_CHARS_MAX} characters, boot id 1 to {BOOT_CHARS_MAX}")
        if len(self.key) != KEY_BYTES:
            raise FrameError(f"the key has {len(self.key)} bytes, must have {KEY_BYTES}")
        return _PREFACE.pack(MAGIC, PROTOCOL, self.key, self.link_id, len(node), len(boot_id), node, boot_id)

    @classmethod
    def decode(cls, raw: bytes) -> Preface:
        magic, protocol, key, link_id, node_bytes, boot_bytes, node, boot_id = _PREFACE.unpack(raw)
        if magic != MAGIC or protocol != PROTOCOL:
            raise FrameError(f"preface {magic!r} of protocol {protocol}, expected {MAGIC!r} of {PROTOCOL}")
        if node_bytes > len(node) or boot_bytes > len(boot_id):
            raise FrameError(f"preface names {node_bytes} and {boot_bytes} bytes of names")
        try:
            return cls(node[:node_bytes].decode(), boot_id[:boot_bytes].decode(), key, link_id)
        except UnicodeDecodeError as error:
            raise FrameError("preface with a name that is not UTF-8") from error


@dataclass(frozen=True, slots=True)
class Frame:
    """One layer. `slices` counts the rows of a body by address, 0 for a payload."""

    kind: BodyKind
    sequence: int
    sink_id: int
    layer: int
    first_block: int
    payload_bytes: int
    slices: int = 0

    def encode(self) -> bytes:
        """Raises `FrameError` for a number out of its bounds."""
        self._check()
        return _FRAME.pack(
            _FRAME_MAGIC,
            self.kind.value,
            self.sequence,
            self.sink_id,
            self.layer,
            self.first_block,
            self.payload_bytes,
            self.slices,
        )

    @classmethod
    def decode(cls, raw: bytes) -> Frame:
        magic, kind, *numbers = _FRAME.unpack(raw)
        if magic != _FRAME_MAGIC:
            raise FrameError(f"frame header begins with {magic!r}, expected {_FRAME_MAGIC!r}")
        if kind not in (BodyKind.PAYLOAD.value, BodyKind.ADDRESSES.value):
            raise FrameError(f"frame body of kind {kind}")
        found = cls(BodyKind(kind), *numbers)
        found._check()
        return found

    def _check(self) -> None:
        if not 0 <= self.payload_bytes <= FRAME_BYTES_MAX:
            raise FrameError(f"a frame of {self.payload_bytes} bytes, at most {FRAME_BYTES_MAX} are allowed")
        if not 0 <= self.slices <= (SLICES_MAX if self.kind is BodyKind.ADDRESSES else 0):
            raise FrameError(f"a frame of {self.slices} slices, at most {SLICES_MAX} are allowed")
        if not 0 <= self.layer <= U32_MAX or not 0 <= self.first_block <= U32_MAX or not 0 <= self.sink_id <= U64_MAX:
            raise FrameError(f"layer {self.layer}, block {self.first_block} or sink {self.sink_id} is out of bounds")


@dataclass(frozen=True, slots=True)
class Ack:
    """Answer to the frame with the same sequence. `moved_bytes` reached the sink's slices."""

    sequence: int
    status: Status
    moved_bytes: int = 0
    detail: int = 0

    def encode(self) -> bytes:
        return _ACK.pack(_ACK_MAGIC, self.status.value, self.sequence, self.moved_bytes, self.detail)

    @classmethod
    def decode(cls, raw: bytes) -> Ack:
        magic, status, sequence, moved_bytes, detail = _ACK.unpack(raw)
        if magic != _ACK_MAGIC:
            raise FrameError(f"ack begins with {magic!r}, expected {_ACK_MAGIC!r}")
        try:
            return cls(sequence, Status(status), moved_bytes, detail)
        except ValueError as error:
            raise FrameError(f"ack with status {status}") from error
