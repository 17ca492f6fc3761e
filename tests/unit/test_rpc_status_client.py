"""What `kvmoverd status` makes of a reply."""

from __future__ import annotations

from kvmover_proto import engine_pb2
from kvmoverd.rpc.status_client import plain_status


def test_numbers_of_64_bits_are_numbers_wherever_they_stand() -> None:
    reply = engine_pb2.NodeStatusReply(node="n", pool_bytes=1 << 40, outcomes={"fetch/OK": 1 << 33})
    reply.requests["fetch"] = 2
    reply.storage.add(root="s", read_bytes=1 << 35)
    found = plain_status(reply)
    assert (found["node"], found["pool_bytes"], found["draining"]) == ("n", 1 << 40, False)
    assert (found["outcomes"], found["requests"]) == ({"fetch/OK": 1 << 33}, {"fetch": 2})
    (root,) = found["storage"]
    assert (root["read_bytes"], root["corrupt_blocks"], root["why"]) == (1 << 35, 0, "")


def test_maps_are_told_in_the_same_order_every_time() -> None:
    names = ["fences", "links_in", "loop_breaks", "reconnects", "repeats"]
    for order in (names, names[::-1]):
        reply = engine_pb2.NodeStatusReply(outcomes=dict.fromkeys(order, 1))
        assert list(plain_status(reply)["outcomes"]) == names


def test_fields_stand_as_in_the_proto() -> None:
    reply = engine_pb2.NodeStatusReply(storage=[engine_pb2.StorageStatus(root="s")])
    names = [field.name for field in reply.DESCRIPTOR.fields]
    found = plain_status(reply)
    assert [name for name in names if name in found] == list(found)
    names = [field.name for field in reply.storage[0].DESCRIPTOR.fields]
    assert list(found["storage"][0]) == [name for name in names if name in found["storage"][0]]
