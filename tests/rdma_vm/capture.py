"""Which class every RDMA packet carries: looked up on the wire, in the VM, while KV cache and a model's stand-in share it.

`python -m tests.rdma_vm.capture` prints counts by owner, class and kind of packet, over IPv4 and IPv6, and as its last line
the same as JSON. Exit code 1: a packet carried the wrong class, or there was none to look at.
"""

from __future__ import annotations

import argparse
import json
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from kvmoverd.core.qos import KV_LANE
from tests.rdma_vm import flows, qos
from tests.rdma_vm.flows import Flow, Window
from tests.rdma_vm.kv import Layers
from tests.rdma_vm.model import FAR, MODEL, NEAR, Writes

INTERFACES = {"veth0": NEAR, "veth1": FAR}
"""Interface of each device."""
GID_INDEX = {4: 1, 6: 0}
"""Of the VM's devices: RoCE v2 over their IPv4 address, and over the link-local IPv6 one."""
SECONDS = 1.0
ROCE_PORT = 4791
HEADERS_BYTES = 128
BUFFER_BYTES = 256 << 20
"""All that a run sends: it is looked at afterwards, as nothing in Python keeps up with it."""
SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE = 263, 6, 33
ETHERTYPES = {0x0800: 4, 0x86DD: 6}
ROW = "{owner:6} from {from:5} class {traffic_class:#04x} IPv{ip} {kind:12} {packets:6} packets {bytes:9} B"
KINDS = {"acknowledge": range(0x11, 0x12), "read": range(0x0C, 0x11), "send": range(6), "write": range(0x06, 0x0C)}


@dataclass(frozen=True, slots=True)
class Packet:
    """What counts of one packet. `to_pair`: the queue pair that it is for, at the other device."""

    device: str
    family: int
    traffic_class: int
    to_pair: int
    kind: str
    size_bytes: int


def parse(device: str, frame: bytes, size_bytes: int) -> Packet | None:
    """None for all that is not RoCE v2. `size_bytes` is that of the whole frame."""
    family = ETHERTYPES.get(int.from_bytes(frame[12:14], "big"))
    if family is None:
        return None
    network = frame[14:]
    if family == 4:
        protocol, traffic_class, transport = network[9], network[1], network[(network[0] & 15) * 4 :]
    else:
        protocol, traffic_class, transport = network[6], (network[0] << 4 | network[1] >> 4) & 0xFF, network[40:]
    if protocol != socket.IPPROTO_UDP or int.from_bytes(transport[2:4], "big") != ROCE_PORT:
        return None
    # The base transport header: opcode, flags, partition, then the queue pair in the low three of four bytes.
    opcode, to_pair = transport[8], struct.unpack_from(">I", transport, 12)[0] & 0xFFFFFF
    kind = next((name for name, codes in KINDS.items() if opcode in codes), f"opcode {opcode:#x}")
    return Packet(device, family, traffic_class, to_pair, kind, size_bytes)


class Tap:
    """What leaves one interface, kept by the kernel until it is asked for."""

    def __init__(self, interface: str) -> None:
        self.device = INTERFACES[interface]
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0003))
        self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        self.socket.bind((interface, 0x0003))
        self.socket.setblocking(False)

    def packets(self) -> Iterator[Packet]:
        """Raises `RuntimeError` when the kernel had to drop any: then nothing is proved."""
        room = bytearray(HEADERS_BYTES)
        while True:
            try:
                size_bytes, address = self.socket.recvfrom_into(room, 0, socket.MSG_TRUNC)
            except BlockingIOError:
                break
            if address[2] == socket.PACKET_OUTGOING and (found := parse(self.device, bytes(room), size_bytes)):
                yield found
        _, dropped = struct.unpack("II", self.socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
        if dropped:
            raise RuntimeError(f"the kernel dropped {dropped} packets on the way to the capture")

    def close(self) -> None:
        self.socket.close()


def seen(made: dict[str, Flow]) -> list[Packet]:
    """Both flows at once over a slow link, so that what is sent fits into the capture's buffers."""
    with ExitStack() as stack:
        taps = [Tap(interface) for interface in INTERFACES]
        for tap in taps:
            stack.callback(tap.close)
        begin_s = time.monotonic() + flows.SETTLE_S + 0.1
        for flow in made.values():
            flow.begin(Window(begin_s, begin_s + SECONDS))
        for name, flow in made.items():
            assert flow.end().moved_bytes, f"{name} moved nothing"
        return [packet for tap in taps for packet in tap.packets()]


def faults(packets: list[Packet], model_pairs: set[int], kv_pairs: set[int]) -> list[str]:
    """What is wrong, in words. Pairs of both ends; whatever is not the model's is KV cache's, known or not."""
    wrong = []
    for packet in packets:
        marks = MODEL if packet.to_pair in model_pairs else KV_LANE
        if packet.traffic_class != marks.traffic_class:
            wrong.append(f"{packet} should carry {marks.traffic_class:#x}")
    for name, pairs in (("model", model_pairs), ("KV", kv_pairs)):
        if missing := pairs - {packet.to_pair for packet in packets}:
            wrong.append(f"{name}: nothing was seen to queue pairs {sorted(missing)}")
    kv_kinds = {packet.kind for packet in packets if packet.to_pair not in model_pairs}
    if not {"write", "acknowledge"} <= kv_kinds or "read" in kv_kinds:
        wrong.append(f"KV is written and acknowledged, never read; seen: {sorted(kv_kinds)}")
    return wrong


def table(packets: list[Packet], model_pairs: set[int]) -> list[dict[str, str | int]]:
    counts: Counter[tuple[str, str, int, str, int]] = Counter()
    sizes: Counter[tuple[str, str, int, str, int]] = Counter()
    for packet in packets:
        owner = "model" if packet.to_pair in model_pairs else "KV"
        key = (owner, packet.device, packet.traffic_class, packet.kind, packet.family)
        counts[key] += 1
        sizes[key] += packet.size_bytes
    names = ("owner", "from", "traffic_class", "kind", "ip")
    return [
        {**dict(zip(names, key, strict=True)), "packets": counts[key], "bytes": sizes[key]} for key in sorted(counts)
    ]


def numbers(flow: Flow) -> set[int]:
    return {number for pairs in flow.numbers.values() for number in pairs}


def look(family: int) -> tuple[list[dict[str, str | int]], list[str]]:
    """Rows of the table and faults, between the devices' addresses of one family."""
    gid_index = GID_INDEX[family]
    with flows.flows(model=(Writes, MODEL, gid_index), kv=(Layers, KV_LANE, gid_index)) as made:
        packets = seen(made)
        model_pairs, kv_pairs = numbers(made["model"]), numbers(made["kv"])
    wrong = faults(packets, model_pairs, kv_pairs)
    return table(packets, model_pairs), wrong + [
        f"{packet} over IPv{family}" for packet in packets if packet.family != family
    ]


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows, wrong = [], []
    qos.set_queue("fifo")
    for family in GID_INDEX:
        its_rows, its_wrong = look(family)
        rows += its_rows
        wrong += its_wrong
    qos.set_queue("none")
    for row in rows:
        print(ROW.format(**row))
    print(*wrong[:10], sep="\n")
    print(json.dumps({"rows": rows, "wrong": len(wrong), "ok": not wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
