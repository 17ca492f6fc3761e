"""Asks a running daemon for its status: for the command line, which has no loop and no session."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import json_format

from kvmover_proto import engine_pb2, engine_pb2_grpc


def node_status(socket: str, *, timeout_s: float) -> dict[str, Any] | None:
    """NodeStatus as plain data, with the names of the proto; None when nobody answers in time."""
    options = (("grpc.enable_http_proxy", 0),)
    with grpc.insecure_channel(f"unix:{socket}", options=options) as channel:
        try:
            reply = engine_pb2_grpc.EngineStub(channel).NodeStatus(engine_pb2.NodeStatusRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return None
    return json_format.MessageToDict(reply, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
