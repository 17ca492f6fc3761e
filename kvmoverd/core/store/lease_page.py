"""The heartbeat of an author: one page, `lease`, written again and again by him alone. All numbers are little-endian.

    0   magic "KVLEASE\\n", crc32c of all after it u32, format u32
    16  beat u64: how often it was written
    24  pid u32, flags u32 (1: the author has ended, in good order)
    32  start of the process, in clock ticks since boot, u64
    40  log u32 and segment u32: the highest that there are
    48  bytes of the machine's name u16; 64: the name

A changed beat is what counts, on the reader's own monotonic clock; no wall-clock time stands here. `machine` is the same for
two processes only if each sees the other's pid: so a reader there may ask the kernel whether the author still runs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from crc32c import crc32c

from kvmoverd.core.store.places import PAGE_BYTES

MAGIC = b"KVLEASE\n"
FORMAT = 1
MACHINE_BYTES_MAX = 512
_FIXED = struct.Struct("<8sIIQIIQIIH14x")
_CRC = struct.Struct("<I")
_COVERED_FROM = len(MAGIC) + _CRC.size
_ENDED = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """`ended`: the author has closed his store and will not write again."""

    beat: int
    pid: int
    start_ticks: int
    log: int
    segment: int
    machine: str
    ended: bool = False


def encode_lease(lease: Lease) -> bytes:
    """`PAGE_BYTES` bytes."""
    machine = lease.machine.encode()[:MACHINE_BYTES_MAX]
    flags = _ENDED if lease.ended else 0
    raw = bytearray(PAGE_BYTES)
    _FIXED.pack_into(
        raw,
        0,
        MAGIC,
        0,
        FORMAT,
        lease.beat,
        lease.pid,
        flags,
        lease.start_ticks,
        lease.log,
        lease.segment,
        len(machine),
    )
    raw[_FIXED.size : _FIXED.size + len(machine)] = machine
    _CRC.pack_into(raw, len(MAGIC), crc32c(memoryview(raw)[_COVERED_FROM:]))
    return bytes(raw)


def decode_lease(raw: bytes | memoryview) -> Lease | None:
    """The lease, or None for what is short, torn, or of another format."""
    if len(raw) < PAGE_BYTES:
        return None
    magic, crc, version, beat, pid, flags, start_ticks, log, segment, size_bytes = _FIXED.unpack_from(raw)
    if magic != MAGIC or version != FORMAT or size_bytes > MACHINE_BYTES_MAX:
        return None
    if crc32c(memoryview(raw)[_COVERED_FROM:PAGE_BYTES]) != crc:
        return None
    machine = bytes(raw[_FIXED.size : _FIXED.size + size_bytes]).decode(errors="replace")
    return Lease(beat, pid, start_ticks, log, segment, machine, bool(flags & _ENDED))
