"""Asks a running daemon for its status: for the command line, which has no loop and no session."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from kvmover_proto import engine_pb2, engine_pb2_grpc

_WIDE = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)


def node_status(socket: str, *, timeout_s: float) -> dict[str, Any] | None:
    """NodeStatus as plain data, with the names of the proto; None when nobody answers in time."""
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        try:
            reply = engine_pb2_grpc.EngineStub(channel).NodeStatus(engine_pb2.NodeStatusRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return None
    return plain_status(reply)


def plain_status(reply: engine_pb2.NodeStatusReply) -> dict[str, Any]:
    """All fields, by the names of the proto."""
    found = json_format.MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _plain(found, reply.DESCRIPTOR)


def _plain(found: dict[str, Any], kind: Descriptor) -> dict[str, Any]:
    """The fields as the proto has them, in its order, and 64-bit numbers as numbers.

    Left alone, one that becomes 0 or empty moves to the end, and those numbers are text, for the sake of readers whose only
    numbers are doubles: counters stay far below the 2**53 that these can tell apart.
    """
    return {field.name: _value(found[field.name], field) for field in kind.fields if field.name in found}


def _value(value: Any, field: FieldDescriptor) -> Any:
    if isinstance(value, list):
        return [_value(entry, field) for entry in value]
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name["value"]
        # On the wire a map has no order: two calls would show the same words in two.
        return {name: _value(value[name], entry) for name in sorted(value)}
    if field.message_type is not None:
        return _plain(value, field.message_type)
    return int(value) if field.cpp_type in _WIDE else value
