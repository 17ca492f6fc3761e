"""A stored record: a header page of 4096 bytes, then the payload, padded with zeros to 4096.

All numbers are little-endian. The header's checksum covers every byte of the page after itself, so a page that passes
is as it was written. `layer_crcs` are *chained*: entry l is the crc32c of layers 0 to l, that is of layer l started
from entry l - 1. Thus one call over the whole payload checks every layer, and a layer can still be checked alone. One
call is what matters: a thread that gives up the interpreter lock once a layer, while another thread computes, waits up
to 5 ms for it each time, hundreds of times what the checksum takes.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import NoReturn

from crc32c import crc32c

from kvmoverd.core.errors import KvmoverError
from kvmoverd.core.layout import HEADER_BYTES, LAYERS_MAX, Layout
from kvmoverd.core.manifest import Namespace

MAGIC = b"KVMOVER\n"
FORMAT = 1
LAYER_CRCS_AT = 256
_FIXED = struct.Struct("<8sII32s32s32sIIIIQQI")
_CRC = struct.Struct("<I")
_CRC_AT = len(MAGIC)
_COVERED_FROM = _CRC_AT + _CRC.size
_KEEP_LOCK, _RELEASE_LOCK = 0, 1
_KEEP_LOCK_BYTES_MAX = 256 << 10
"""A checksum this long takes some 10 us: less than it may cost to get the interpreter lock back."""

assert _FIXED.size <= LAYER_CRCS_AT and LAYER_CRCS_AT + LAYERS_MAX * _CRC.size <= HEADER_BYTES


class RecordMismatch(KvmoverError):
    """A record is not what it should be; `field` names the first difference."""

    reason = "CORRUPT"

    def __init__(self, field: str, *, found: object, expected: object) -> None:
        super().__init__(f"{field} is {found}, expected {expected}", field=field, found=found, expected=expected)
        self.field = field


@dataclass(frozen=True, slots=True)
class Header:
    """What a header page says. `write_time_ns` is wall-clock time, for people; nothing is decided by it."""

    fingerprint: bytes
    key: bytes
    parent: bytes
    depth: int
    generation: int
    block_tokens: int
    payload_bytes: int
    write_time_ns: int
    flags: int
    layer_crcs: tuple[int, ...]


def encode(header: Header) -> bytes:
    """The header page, `HEADER_BYTES` long."""
    page = bytearray(HEADER_BYTES)
    _FIXED.pack_into(
        page,
        0,
        MAGIC,
        0,
        FORMAT,
        header.fingerprint,
        header.key,
        header.parent,
        header.depth,
        header.generation,
        len(header.layer_crcs),
        header.block_tokens,
        header.payload_bytes,
        header.write_time_ns,
        header.flags,
    )
    struct.pack_into(f"<{len(header.layer_crcs)}I", page, LAYER_CRCS_AT, *header.layer_crcs)
    _CRC.pack_into(page, _CRC_AT, crc32c(memoryview(page)[_COVERED_FROM:], 0, _KEEP_LOCK))
    return bytes(page)


def decode(page: bytes | memoryview) -> Header:
    """Reads a header page of any namespace. Raises `RecordMismatch` for a page that is short, foreign or damaged."""
    if len(page) < HEADER_BYTES:
        raise RecordMismatch("header_bytes", found=len(page), expected=HEADER_BYTES)
    magic, crc, version, fingerprint, key, parent, depth, generation, layers, tokens, payload_bytes, time_ns, flags = (
        _FIXED.unpack_from(page)
    )
    _expect("magic", magic, MAGIC)
    computed = crc32c(memoryview(page)[_COVERED_FROM:HEADER_BYTES], 0, _KEEP_LOCK)
    _expect("format", version, FORMAT)
    _expect("header_crc32c", f"{crc:08x}", f"{computed:08x}")
    if layers > LAYERS_MAX:
        raise RecordMismatch("layer_count", found=layers, expected=f"at most {LAYERS_MAX}")
    crcs = struct.unpack_from(f"<{layers}I", page, LAYER_CRCS_AT)
    return Header(fingerprint, key, parent, depth, generation, tokens, payload_bytes, time_ns, flags, crcs)


def verify(page: bytes | memoryview, namespace: Namespace, key: bytes) -> tuple[int, ...]:
    """Checks that a header page is that of `key`; gives its chained layer checksums. Raises `RecordMismatch`."""
    header, layout = decode(page), namespace.layout
    if header.fingerprint != namespace.fingerprint:
        raise RecordMismatch("fingerprint", found=header.fingerprint.hex(), expected=namespace.fingerprint.hex())
    if header.key != key:
        raise RecordMismatch("key", found=header.key.hex(), expected=key.hex())
    _expect("layer_count", len(header.layer_crcs), layout.layer_count)
    _expect("block_tokens", header.block_tokens, layout.block_tokens)
    _expect("payload_bytes", header.payload_bytes, layout.block_bytes)
    return header.layer_crcs


def chained_crcs(payload: memoryview, layout: Layout) -> tuple[int, ...]:
    """The chained checksums of a payload's layers.

    >>> chained_crcs(memoryview(b"hello world"), Layout(1, ((5,), (6,)))) == (crc32c(b"hello"), crc32c(b"hello world"))
    True
    """
    crcs, value = [], 0
    for start, size_bytes in zip(layout.layer_offsets, layout.layer_bytes, strict=True):
        lock = _KEEP_LOCK if size_bytes <= _KEEP_LOCK_BYTES_MAX else _RELEASE_LOCK
        value = crc32c(payload[start : start + size_bytes], value, lock)
        crcs.append(value)
    return tuple(crcs)


def check_layers(record: memoryview, namespace: Namespace, key: bytes, first_layer: int, stop_layer: int) -> None:
    """Checks the header and layers [first_layer, stop_layer) of a whole record. Raises `RecordMismatch`.

    The checksums are chained: one call covers the range, started from the checksum of the layer before it. An empty range:
    the header alone.
    """
    layout = namespace.layout
    _expect("record_bytes", len(record), layout.record_bytes)
    crcs = verify(record[:HEADER_BYTES], namespace, key)
    if first_layer == stop_layer:
        return
    begun_from = crcs[first_layer - 1] if first_layer else 0
    start = HEADER_BYTES + layout.layer_offsets[first_layer]
    stop = HEADER_BYTES + layout.layer_span(stop_layer - 1).stop
    if crc32c(record[start:stop], begun_from, _RELEASE_LOCK) != crcs[stop_layer - 1]:
        _name_the_damage(record[HEADER_BYTES:], layout, crcs, first_layer, stop_layer)


def seal(
    record: memoryview,
    namespace: Namespace,
    *,
    key: bytes,
    parent: bytes,
    depth: int,
    write_time_ns: int,
    generation: int | None = None,
    layer_crcs: tuple[int, ...] = (),
) -> None:
    """Makes a record of the payload that lies `HEADER_BYTES` into it: fills the header page, zeroes the padding.

    The padding may still hold bytes of another tenant's block. `generation`: of the segment, else the namespace's epoch.
    `layer_crcs`: the payload's `chained_crcs`, where they are known already.
    """
    layout = namespace.layout
    header = Header(
        fingerprint=namespace.fingerprint,
        key=key,
        parent=parent,
        depth=depth,
        generation=namespace.manifest.epoch if generation is None else generation,
        block_tokens=layout.block_tokens,
        payload_bytes=layout.block_bytes,
        write_time_ns=write_time_ns,
        flags=0,
        layer_crcs=layer_crcs or chained_crcs(record[HEADER_BYTES:], layout),
    )
    record[:HEADER_BYTES] = encode(header)
    end = HEADER_BYTES + layout.block_bytes
    record[end:] = bytes(len(record) - end)


def memory_view(address: int, size_bytes: int) -> memoryview:
    """The bytes at an address of this process, writable. The caller vouches that they stay mapped."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def _name_the_damage(payload: memoryview, layout: Layout, crcs: tuple[int, ...], first: int, stop: int) -> NoReturn:
    """Raises `RecordMismatch` for the first layer of the range that differs."""
    value = crcs[first - 1] if first else 0
    for layer in range(first, stop):
        span = layout.layer_span(layer)
        value = crc32c(payload[span.start : span.stop], value, _RELEASE_LOCK)
        _expect(f"layer_crc32c[{layer}]", f"{value:08x}", f"{crcs[layer]:08x}")
    raise RecordMismatch("payload", found="changing while it is checked", expected="still")


def _expect(field: str, found: object, expected: object) -> None:
    if found != expected:
        raise RecordMismatch(field, found=found, expected=expected)
