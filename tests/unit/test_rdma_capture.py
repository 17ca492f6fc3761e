"""The capture of the VM judges rightly: headers of RoCE v2 taken apart, and every way in which a class may be wrong."""

from __future__ import annotations

import struct

import pytest

from kvmoverd.core.qos import KV_LANE
from tests.rdma_vm.capture import Packet, faults, parse, table
from tests.rdma_vm.model import MODEL

MODEL_PAIRS, KV_PAIRS = {17, 18}, {33, 34}
WRITE_ONLY, ACKNOWLEDGE, READ_REQUEST, SEND_ONLY = 0x0A, 0x11, 0x0C, 0x04


def frame(traffic_class: int, to_pair: int, opcode: int, *, family: int = 4, port: int = 4791) -> bytes:
    base = struct.pack(">BBHII", opcode, 0, 0xFFFF, to_pair | 0xAA000000, 7)
    udp = struct.pack(">HHHH", 50_000, port, 8 + len(base), 0) + base
    if family == 4:
        ip = struct.pack(">BBHHHBBH8x", 0x45, traffic_class, 20 + len(udp), 0, 0, 64, 17, 0)
        return bytes(12) + b"\x08\x00" + ip + udp
    ip = struct.pack(">IHBB32x", 6 << 28 | traffic_class << 20 | 0xABCDE, len(udp), 17, 64)
    return bytes(12) + b"\x86\xdd" + ip + udp


@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize(
    ("opcode", "kind"),
    [(WRITE_ONLY, "write"), (0x09, "write"), (ACKNOWLEDGE, "acknowledge"), (READ_REQUEST, "read"), (SEND_ONLY, "send")],
)
def test_class_queue_pair_and_kind_are_read_from_both_families(family: int, opcode: int, kind: str) -> None:
    found = parse("rxe0", frame(0x20, 0x12345, opcode, family=family), 1_000)
    assert found == Packet("rxe0", family, 0x20, 0x12345, kind, 1_000)


def test_what_is_no_rdma_is_left_out() -> None:
    arp = bytes(12) + b"\x08\x06" + bytes(100)
    assert parse("rxe0", arp, 114) is None
    assert parse("rxe0", frame(0, 1, WRITE_ONLY, port=53), 60) is None


def packets(*rows: tuple[int, int, int]) -> list[Packet]:
    """Of class, queue pair and opcode."""
    found = [parse("rxe0", frame(*row), 100) for row in rows]
    return [packet for packet in found if packet]


GOOD = [
    (KV_LANE.traffic_class, 34, WRITE_ONLY),
    (KV_LANE.traffic_class, 33, ACKNOWLEDGE),
    (MODEL.traffic_class, 18, WRITE_ONLY),
    (MODEL.traffic_class, 17, ACKNOWLEDGE),
]


def test_packets_of_the_right_classes_are_no_fault_and_are_counted_by_owner() -> None:
    seen = packets(*GOOD, GOOD[0])
    assert faults(seen, MODEL_PAIRS, KV_PAIRS) == []
    counted = {(row["owner"], row["kind"]): (row["packets"], row["bytes"]) for row in table(seen, MODEL_PAIRS)}
    assert counted[("KV", "write")] == (2, 200) and counted[("model", "acknowledge")] == (1, 100)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ((MODEL.traffic_class, 34, WRITE_ONLY), "should carry 0x20"),
        ((0, 33, ACKNOWLEDGE), "should carry 0x20"),
        ((KV_LANE.traffic_class | 1, 34, WRITE_ONLY), "should carry 0x20"),
        ((KV_LANE.traffic_class, 18, WRITE_ONLY), "should carry 0x68"),
        # A queue pair that nobody knows of is not the model's, so it must yield.
        ((MODEL.traffic_class, 99, SEND_ONLY), "should carry 0x20"),
        ((KV_LANE.traffic_class, 33, READ_REQUEST), "never read"),
    ],
)
def test_each_packet_of_another_class_or_kind_is_a_fault(extra: tuple[int, int, int], words: str) -> None:
    wrong = faults(packets(*GOOD, extra), MODEL_PAIRS, KV_PAIRS)
    assert len(wrong) == 1 and words in wrong[0]


def test_queue_pairs_that_were_never_seen_are_a_fault() -> None:
    wrong = faults(packets(*GOOD[:3]), MODEL_PAIRS, KV_PAIRS)
    assert wrong == ["model: nothing was seen to queue pairs [17]"]
    assert any("KV" in fault for fault in faults(packets(*GOOD[2:]), MODEL_PAIRS, KV_PAIRS))
