"""Asks a running daemon for its status: for the command line, which has no loop and no session."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor

from kvmover_proto import engine_pb2, engine_pb2_grpc


def node_status(socket: str, *, timeout_s: float) -> dict[str, Any] | None:
    """NodeStatus as plain data, with the names of the proto; None when nobody answers in time."""
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        try:
            reply = engine_pb2_grpc.EngineStub(channel).NodeStatus(engine_pb2.NodeStatusRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return None
    found = json_format.MessageToDict(
        reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return _in_order(found, reply.DESCRIPTOR)


def _in_order(found: dict[str, Any], kind: Descriptor) -> dict[str, Any]:
    """The fields as the proto has them: left alone, one that becomes 0 or empty moves to the end."""
    ordered = {field.name: found[field.name] for field in kind.fields if field.name in found}
    for field in kind.fields:
        if field.message_type is not None and isinstance(found.get(field.name), list):
            ordered[field.name] = [_in_order(entry, field.message_type) for entry in found[field.name]]
    return ordered
