"""Asks a running scheduler for its books: for the command line, which has no loop."""

from __future__ import annotations

import json
from typing import Any

import grpc

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc


def scheduler_status(address: str, *, timeout_s: float) -> dict[str, Any] | None:
    """Its books, and who it is; None when nobody answers in time."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            reply = scheduler_pb2_grpc.SchedulerStub(channel).GetSchedulerStatus(
                scheduler_pb2.GetSchedulerStatusRequest(), timeout=timeout_s
            )
        except grpc.RpcError:
            return None
    who = {
        "boot_id": reply.scheduler.boot_id,
        "epoch": reply.scheduler.epoch,
        "leads": reply.leads,
        "leader": reply.leader,
        "policy": reply.policy,
    }
    return {**who, **json.loads(reply.json)}
