"""Offers and answers of queue pairs as messages, and back. What no device could mean is refused here, at both ends."""

from __future__ import annotations

from kvmover_proto import node_pb2
from kvmoverd.core.errors import BadRequest, ConfigError
from kvmoverd.core.qos import KvClass, Marks
from kvmoverd.ports.connection import Answer, Offer, PathEnd

CNICS_MAX = 64
QP_NUMBER_MAX = (1 << 24) - 1
LID_MAX = (1 << 16) - 1
GID_BYTES = 16
MTUS_BYTES = (256, 512, 1024, 2048, 4096)
SLOTS_MAX = 65_536
MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX = 64, 1 << 20


def offer_message(node: str, boot_id: str, data_key: bytes, offer: Offer) -> node_pb2.ConnectQueuePairRequest:
    return node_pb2.ConnectQueuePairRequest(
        node=node,
        boot_id=boot_id,
        data_key=data_key,
        protocol=offer.protocol,
        link_id=offer.link_id,
        generation=offer.generation,
        kv_class=offer.kv_class.value,
        marks=_marks_message(offer.marks),
        peer_cnic=offer.peer_cnic,
        end=_end_message(offer.end),
        receive_slots=offer.receive_slots,
        message_bytes=offer.message_bytes,
    )


def offer_from(request: node_pb2.ConnectQueuePairRequest) -> Offer:
    """Raises `BadRequest`."""
    if not request.HasField("marks") or not request.HasField("end"):
        raise BadRequest("an offer needs marks and end")
    _check_slots(request.receive_slots, request.message_bytes)
    return Offer(
        protocol=request.protocol,
        link_id=request.link_id,
        generation=request.generation,
        kv_class=_class_from(request.kv_class),
        marks=_marks_from(request.marks),
        peer_cnic=_bounded("peer_cnic", request.peer_cnic, 0, CNICS_MAX - 1),
        end=_end_from(request.end),
        receive_slots=request.receive_slots,
        message_bytes=request.message_bytes,
    )


def answer_message(answer: Answer) -> node_pb2.ConnectQueuePairReply:
    return node_pb2.ConnectQueuePairReply(
        end=_end_message(answer.end),
        marks=_marks_message(answer.marks),
        receive_slots=answer.receive_slots,
        message_bytes=answer.message_bytes,
    )


def answer_from(reply: node_pb2.ConnectQueuePairReply) -> Answer:
    """Raises `BadRequest`: the other node's daemon says what no device of ours could use."""
    _check_slots(reply.receive_slots, reply.message_bytes)
    return Answer(_end_from(reply.end), _marks_from(reply.marks), reply.receive_slots, reply.message_bytes)


def _class_from(name: str) -> KvClass:
    try:
        return KvClass(name)
    except ValueError:
        known = ", ".join(kv_class.value for kv_class in KvClass)
        raise BadRequest(f"kv_class is {name[:64]!r}, known are {known}") from None


def _marks_message(marks: Marks) -> node_pb2.QueuePairMarks:
    return node_pb2.QueuePairMarks(
        service_level=marks.service_level, traffic_class=marks.traffic_class, flow_label=marks.flow_label
    )


def _marks_from(message: node_pb2.QueuePairMarks) -> Marks:
    try:
        return Marks(message.service_level, message.traffic_class, message.flow_label)
    except ConfigError as error:
        raise BadRequest(str(error)) from None


def _end_message(end: PathEnd) -> node_pb2.QueuePairEnd:
    return node_pb2.QueuePairEnd(
        cnic=end.cnic,
        qp_number=end.qp_number,
        packet_number=end.packet_number,
        gid=end.gid,
        lid=end.lid,
        mtu_bytes=end.mtu_bytes,
    )


def _end_from(message: node_pb2.QueuePairEnd) -> PathEnd:
    if len(message.gid) != GID_BYTES:
        raise BadRequest(f"gid has {len(message.gid)} bytes, must have {GID_BYTES}")
    if message.mtu_bytes not in MTUS_BYTES:
        raise BadRequest(f"mtu_bytes is {message.mtu_bytes}, must be one of {', '.join(map(str, MTUS_BYTES))}")
    return PathEnd(
        cnic=_bounded("cnic", message.cnic, 0, CNICS_MAX - 1),
        qp_number=_bounded("qp_number", message.qp_number, 1, QP_NUMBER_MAX),
        packet_number=_bounded("packet_number", message.packet_number, 0, QP_NUMBER_MAX),
        gid=message.gid,
        lid=_bounded("lid", message.lid, 0, LID_MAX),
        mtu_bytes=message.mtu_bytes,
    )


def _check_slots(receive_slots: int, message_bytes: int) -> None:
    _bounded("receive_slots", receive_slots, 1, SLOTS_MAX)
    _bounded("message_bytes", message_bytes, MESSAGE_BYTES_MIN, MESSAGE_BYTES_MAX)


def _bounded(name: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise BadRequest(f"{name} is {value}, must be {low} to {high}")
    return value
