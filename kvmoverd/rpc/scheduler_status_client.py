"""Asks a running scheduler for its books: for the command line, which has no loop."""

from __future__ import annotations

import json
from typing import Any

import grpc

from kvmover_proto import scheduler_pb2, scheduler_pb2_grpc
from kvmoverd.core.errors import SchedulerUnreachable


def scheduler_status(address: str, *, timeout_s: float) -> dict[str, Any]:
    """Its books, and who it is. Raises `SchedulerUnreachable`, which says why nobody answers."""
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            reply = scheduler_pb2_grpc.SchedulerStub(channel).GetSchedulerStatus(
                scheduler_pb2.GetSchedulerStatusRequest(), timeout=timeout_s
            )
        except grpc.RpcError as error:
            raise _unreachable(address, error, timeout_s) from error
    who = {
        "boot_id": reply.scheduler.boot_id,
        "epoch": reply.scheduler.epoch,
        "leads": reply.leads,
        "leader": reply.leader,
        "policy": reply.policy,
    }
    return {**who, **json.loads(reply.json)}


def _unreachable(address: str, error: Any, timeout_s: float) -> SchedulerUnreachable:
    """`error`: gRPC's, which is a call that has ended, too."""
    code = error.code()
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return SchedulerUnreachable(f"what answers at {address} is no scheduler, or one of another version")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return SchedulerUnreachable(f"no scheduler answers at {address} within {timeout_s:g} s")
    return SchedulerUnreachable(f"no scheduler answers at {address}: {code.name}: {error.details()}")
